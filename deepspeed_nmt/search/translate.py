"""Translation of a stream of lines of any length, in its order and in bounded memory.

Lines are read a buffer at a time. The sentences of a buffer are batched by length and put back into order.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.search import SEARCHES, Search, SearchConfig


class Tokenizer(Protocol):
    """The part of a tokenizer that translation needs."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Sizes and special tokens of both sides."""
        ...

    def encode(self, text: str, /) -> list[int]:
        """Encode a source sentence as tokens, without EOS."""
        ...

    def decode(self, tokens: list[int], /) -> str:
        """Decode target tokens into a sentence."""
        ...


@dataclass(frozen=True)
class Translation:
    """One translation of one line.

    Attributes:
        text: the translation.
        score: its score in the search; 0 for an empty line.
        tokens: its tokens, without BOS and EOS.
    """

    text: str
    score: float
    tokens: list[int]


def translate_lines(
    model: DecodableModel,
    tokenizer: Tokenizer,
    lines: Iterable[str],
    config: SearchConfig,
    max_tokens: int = 4096,
    buffer_lines: int = 4096,
    device: torch.device | str = "cpu",
    nbest: int = 1,
    advance: Callable[[int], object] = lambda more: None,
) -> Iterator[list[Translation]]:
    """Translate lines one by one, as they are asked for.

    Args:
        model: A model on ``device``, in eval mode.
        tokenizer: vocabulary of the model.
        lines: sentences; a line feed at the end is ignored. Lines without tokens are not given to the model: their
            translation is empty. Of lines longer than the model can read, the beginning is translated, with a
            warning.
        config: the search and its settings.
        max_tokens: bound of a batch: sentences times the longest source among them, in tokens with EOS. Memory also
            grows with the beam. A longer line is translated in a batch of its own.
        buffer_lines: lines that are read before the first of them is yielded; memory grows with it.
        nbest: translations wanted for each line, at most as many as the search keeps.
        device: device of the model.
        advance: called with the number of further lines that are done, which may be long before they are yielded.

    Returns:
        For each line, in order, at least one and at most ``nbest`` translations, best first.

    Raises:
        ConfigError: if numbers are out of range. All of them are reported at once, before anything is read.
    """
    problems = [
        f"{name} must be at least 1, but is {value}"
        for name, value in (("max_tokens", max_tokens), ("buffer_lines", buffer_lines), ("nbest", nbest))
        if value < 1
    ]
    if nbest > config.width:
        width = config.width_setting
        problems.append(
            f"nbest must be 1 with search.name={config.name}, but is {nbest}; use another search"
            if width is None
            else f"nbest must be at most {width}, which is {config.width}, but is {nbest}; raise {width} to {nbest}"
        )
    if problems:
        raise ConfigError(problems)
    search = SEARCHES[config.name].build(config, model, tokenizer.vocabulary)
    longest, on = model.longest_source, torch.device(device)
    return _translate(search, tokenizer, iter(lines), max_tokens, buffer_lines, on, nbest, longest, advance)


def _cut(source: list[int], longest: int, line: int) -> list[int]:
    """Cut a source to the length that a model can read: one line must not stop the translation of a million."""
    if len(source) > longest:
        logger.warning(
            "line %s has %s tokens, but the model reads %s at most: its end is not translated",
            f"{line:,}",
            f"{len(source):,}",
            f"{longest:,}",
        )
    return source[:longest]


def pad_sources(sources: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, bool]:
    """Collate source sentences.

    Returns:
        One tensor, padded on the right, and True if any position is padding. Shape: -> (B,S)
    """
    longest = max(map(len, sources))
    rows = [[*source, *[pad] * (longest - len(source))] for source in sources]
    padded = any(len(source) < longest for source in sources)
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True), padded


def length_buckets(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, the longest first.

    With the longest first, a batch that does not fit into memory fails at once and not after an hour.

    Args:
        lengths: length of each sentence in tokens.
        max_tokens: bound of sentences times the longest of a batch; a longer sentence gets a batch of its own.

    Yields:
        The sentences' numbers, each once.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size


def _translate(
    search: Search,
    tokenizer: Tokenizer,
    lines: Iterator[str],
    max_tokens: int,
    buffer_lines: int,
    device: torch.device,
    nbest: int,
    longest: int | None,
    advance: Callable[[int], object],
) -> Iterator[list[Translation]]:
    before, pad, eos = 0, tokenizer.vocabulary.pad, tokenizer.vocabulary.source.eos
    while buffer := list(islice(lines, buffer_lines)):
        sources = [tokenizer.encode(line.rstrip("\r\n")) for line in buffer]
        if longest is not None:
            sources = [_cut(source, longest - 1, before + number) for number, source in enumerate(sources, start=1)]
        translations = [[Translation("", 0.0, [])] for _ in buffer]
        filled = [number for number, source in enumerate(sources) if source]
        lengths = [len(sources[number]) + 1 for number in filled]
        advance(len(buffer) - len(filled))
        for number, length in zip(filled, lengths, strict=True):
            if length > max_tokens:
                logger.warning(
                    "line %s has %s tokens, more than max_tokens (%s): it is translated in a batch of its own",
                    f"{before + number + 1:,}",
                    f"{length:,}",
                    f"{max_tokens:,}",
                )
        for bucket in length_buckets(lengths, max_tokens):
            numbers = [filled[place] for place in bucket]
            source_BS, padded = pad_sources([[*sources[number], eos] for number in numbers], pad, device)
            for number, hypotheses in zip(numbers, search.search(source_BS, padded), strict=True):
                translations[number] = [
                    Translation(tokenizer.decode(hypothesis.tokens), hypothesis.score, hypothesis.tokens)
                    for hypothesis in hypotheses[:nbest]
                ]
            advance(len(numbers))
        yield from translations
        before += len(buffer)
