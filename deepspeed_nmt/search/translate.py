"""Translation of a stream of lines of any length, in its order and in bounded memory.

Lines are read a buffer at a time. The sentences of a buffer are batched by length and put back into order.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.search import SEARCHES, Search, SearchConfig
from deepspeed_nmt.search.base import Translation as Translation
from deepspeed_nmt.search.buckets import length_buckets
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS, SourceCounts, SourceLines, Tokenizer


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
    max_source_tokens: int = MAX_SOURCE_TOKENS,
    strict: bool = False,
    warn: bool = True,
    counts: SourceCounts | None = None,
    before: int = 0,
) -> Iterator[list[Translation]]:
    """Translate lines one by one, as they are asked for.

    Args:
        model: A model on ``device``, in eval mode.
        tokenizer: vocabulary of the model.
        lines: sentences; a line feed at the end is ignored. Lines without tokens are not given to the model: their
            translation is empty.
        config: the search and its settings.
        max_tokens: bound of a batch: sentences times the longest source among them, in tokens with EOS. Memory also
            grows with the beam. A longer line is translated in a batch of its own.
        buffer_lines: lines that are read before the first of them is yielded; memory grows with it.
        nbest: translations wanted for each line, at most as many as the search keeps.
        device: device of the model.
        advance: called with the number of further lines that are done, which may be long before they are yielded.
        max_source_tokens: bound of a line, in tokens without EOS; the model may have a lower one.
        strict: True to refuse longer lines when they are read. Otherwise their beginning is translated, with a
            warning.
        warn: False to log no warnings of lines, for text that is translated again.
        counts: record of what there is to warn of; see :class:`SourceLines`.
        before: number of lines of the text before these.

    Returns:
        For each line, in order, at least one and at most ``nbest`` translations, best first.

    Raises:
        ConfigError: if numbers are out of range. All of them are reported at once, before anything is read.
        DataError: if a line is too long, and ``strict`` is True.
    """
    numbers = {
        "max_tokens": max_tokens,
        "buffer_lines": buffer_lines,
        "nbest": nbest,
        "max_source_tokens": max_source_tokens,
    }
    problems = out_of_bounds(numbers)
    if isinstance(nbest, int) and nbest > config.width:
        problems.append(_too_many(nbest, config))
    if problems:
        raise ConfigError(problems)
    search = SEARCHES[config.name].build(config, model, tokenizer.vocabulary)
    reader = SourceLines(tokenizer, max_source_tokens, model.longest_source, strict, warn, counts, before)
    on = torch.device(device)
    return _translate(search, tokenizer, reader, iter(lines), max_tokens, buffer_lines, on, nbest, advance)


def out_of_bounds(numbers: Mapping[str, object]) -> list[str]:
    """Return one sentence for each option that is not a whole number of at least 1."""
    return [
        f"{option(name)} must be a whole number of at least 1, but is {shown(value)}"
        for name, value in numbers.items()
        if not isinstance(value, int) or value < 1
    ]


def _too_many(nbest: int, config: SearchConfig) -> str:
    """Return the message that a search does not keep ``nbest`` translations."""
    if config.width_setting is None:
        return f"{option('nbest')} must be 1 with search.name={config.name}, but is {nbest}; use another search"
    width = option(config.width_setting)
    bound = width if config.lists == 1 else f"{config.lists} x {width}"
    return (
        f"{option('nbest')} must be at most {bound}, which is {config.width}, but is {nbest}; "
        f"raise {width} to {-(-nbest // config.lists)}"
    )


def pad_sources(sources: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, bool]:
    """Collate source sentences.

    Returns:
        One tensor, padded on the right, and True if any position is padding. Shape: -> (B,S)
    """
    longest = max(map(len, sources))
    rows = [[*source, *[pad] * (longest - len(source))] for source in sources]
    padded = any(len(source) < longest for source in sources)
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True), padded


def _translate(
    search: Search,
    tokenizer: Tokenizer,
    reader: SourceLines,
    lines: Iterator[str],
    max_tokens: int,
    buffer_lines: int,
    device: torch.device,
    nbest: int,
    advance: Callable[[int], object],
) -> Iterator[list[Translation]]:
    before, pad, eos = 0, tokenizer.vocabulary.pad, tokenizer.vocabulary.source.eos
    while buffer := list(islice(lines, buffer_lines)):
        sources = [reader.encode(line) for line in buffer]
        reader.warn_of_unknown()
        translations = [[Translation("", 0.0, [])] for _ in buffer]
        filled = [number for number, source in enumerate(sources) if source]
        lengths = [len(sources[number]) + 1 for number in filled]
        advance(len(buffer) - len(filled))
        for number, length in zip(filled, lengths, strict=True):
            if length > max_tokens:
                reader.note_batch(before + number + 1, length, max_tokens)
        for bucket in length_buckets(lengths, max_tokens):
            numbers = [filled[place] for place in bucket]
            source_BS, padded = pad_sources([[*sources[number], eos] for number in numbers], pad, device)
            for number, hypotheses in zip(numbers, search.search(source_BS, padded), strict=True):
                translations[number] = [
                    Translation(tokenizer.decode(each.tokens), each.score, each.tokens, each.log_prob, each.features)
                    for each in hypotheses[:nbest]
                ]
            advance(len(numbers))
        yield from translations
        before += len(buffer)
    reader.warn_of_cuts()
