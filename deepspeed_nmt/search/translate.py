"""Translation of a stream of lines of any length, in its order and in bounded memory.

Lines are read a buffer at a time. The sentences of a buffer are batched by length and put back into order.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.search.alignment import without_tags
from deepspeed_nmt.search.base import Hypothesis, RanksTexts, Request, RequestSearch, Search, Translation
from deepspeed_nmt.search.buckets import length_buckets
from deepspeed_nmt.search.buffers import Found, check_numbers, translated
from deepspeed_nmt.search.details import Details, DetailsReader
from deepspeed_nmt.search.requests import LineInputs, RequestedLines
from deepspeed_nmt.search.searches import KeptSearch
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS, SourceCounts, SourceLines, SourceTokenizer
from deepspeed_nmt.text import Tags


@dataclass(frozen=True)
class Wanted:
    """Details that a translation returns beside the text.

    Attributes:
        token_scores: True for the scores of tokens.
        alignment_layers: for each model of an ensemble, the number of the decoder layer whose cross-attention aligns;
            None for no alignment.
    """

    token_scores: bool = False
    alignment_layers: Sequence[int] | None = None

    @property
    def of_nothing(self) -> Details:
        """The details of an empty line."""
        return Details(() if self.token_scores else None, None if self.alignment_layers is None else ())


def translate_lines(
    model: DecodableModel,
    tokenizer: SourceTokenizer,
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
    inputs: LineInputs | None = None,
    wanted: Wanted | None = None,
    lock: AbstractContextManager[object] | None = None,
    kept: KeptSearch | None = None,
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
        inputs: prefixes, constraints and tags of the lines, and their numbers in the text.
        wanted: what to return beside the text.
        lock: held while the model is used, and at no other time; a lock of all users of the model in several threads.
        kept: keeps the search with its caches and CUDA graphs for later texts; None to build it for this text.

    Returns:
        For each line, in order, at least one and at most ``nbest`` translations, best first.

    Raises:
        ConfigError: if numbers are out of range. All of them are reported at once, before anything is read. Or if the
            search does not respect ``inputs``, or a layer does not exist.
        DataError: if a line is too long, and ``strict`` is True.
        MisalignedError: if there are more or fewer prefixes or constraints than lines, after those that have them.
    """
    inputs, wanted = inputs or LineInputs(), wanted or Wanted()
    numbers = {
        "max_tokens": max_tokens,
        "buffer_lines": buffer_lines,
        "nbest": nbest,
        "max_source_tokens": max_source_tokens,
    }
    check_numbers(numbers, nbest, config)
    inputs.check(config, tokenizer)
    lock = nullcontext() if lock is None else lock
    with lock:
        search = (kept or KeptSearch()).of(config, model, tokenizer.vocabulary)
    reader = SourceLines(tokenizer, max_source_tokens, model.longest_source, strict, warn, counts, inputs.first)
    job = _Job(
        search=search,
        takes_requests=bool(config.takes),
        tokenizer=tokenizer,
        reader=reader,
        details=DetailsReader(model, tokenizer, wanted.token_scores, wanted.alignment_layers),
        of_nothing=wanted.of_nothing,
        device=torch.device(device),
        nbest=nbest,
        width=config.width,
        lock=lock,
        tags=inputs.tags,
    )
    requested = RequestedLines(inputs.tags.tagged(lines), inputs, tokenizer, model.longest_target, counts)
    return _translate(job, requested, max_tokens, buffer_lines, advance)


def pad_sources(sources: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, bool]:
    """Collate source sentences.

    Returns:
        One tensor, padded on the right, and True if any position is padding. Shape: -> (B,S)
    """
    longest = max(map(len, sources))
    rows = [[*source, *[pad] * (longest - len(source))] for source in sources]
    padded = any(len(source) < longest for source in sources)
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True), padded


@dataclass(frozen=True)
class _Job:
    """Properties that all batches of a translation share; see :func:`translate_lines`."""

    search: Search | RequestSearch
    takes_requests: bool
    tokenizer: SourceTokenizer
    reader: SourceLines
    details: DetailsReader
    of_nothing: Details
    device: torch.device
    nbest: int
    width: int
    lock: AbstractContextManager[object]
    tags: Tags

    def translate(
        self, lines: Sequence[str], sources: Sequence[list[int]], requests: Sequence[Request]
    ) -> list[list[Translation]]:
        """Translate a batch.

        Args:
            lines: text of each sentence.
            sources: its tokens.
            requests: its request.
        """
        vocabulary = self.tokenizer.vocabulary
        rows = [[*source, vocabulary.source.eos] for source in sources]
        with self.lock:
            source_BS, padded = pad_sources(rows, vocabulary.pad, self.device)
            if self.takes_requests:
                lists = cast(RequestSearch, self.search).search(source_BS, padded, requests)
            else:
                lists = self.search.search(source_BS, padded)
            best = [self._best(hypotheses) for hypotheses in lists]
            tokens = [[hypothesis.tokens for hypothesis, _ in each] for each in best]
            details = self.details.read(source_BS, padded, list(zip(lines, sources, strict=True)), tokens)
        return [
            [
                Translation(
                    self.tags.untagged(text),
                    found.score,
                    found.tokens,
                    found.log_prob,
                    found.features,
                    detail.token_scores,
                    without_tags(detail.alignment, self.tags, text),
                )
                for (found, text), detail in zip(each, more, strict=True)
            ]
            for each, more in zip(best, details, strict=True)
        ]

    def _best(self, hypotheses: list[Hypothesis]) -> list[tuple[Hypothesis, str]]:
        """Return the best hypotheses of a sentence and their texts."""
        if not isinstance(self.search, RanksTexts):
            return [(each, self.tokenizer.decode(each.tokens)) for each in hypotheses[: self.nbest]]
        return self.search.rank(hypotheses, [self.tokenizer.decode(each.tokens) for each in hypotheses])[: self.nbest]


def _translate(
    job: _Job, requested: RequestedLines, max_tokens: int, buffer_lines: int, advance: Callable[[int], object]
) -> Iterator[list[Translation]]:
    def encode(buffer: Sequence[tuple[str, Request]]) -> list[list[int]]:
        with job.lock:
            return [job.reader.encode(line) for line, _ in buffer]

    def search(buffer: list[tuple[str, Request]], sources: list[list[int]]) -> Iterator[list[Found]]:
        for numbers in length_buckets([len(source) + 1 for source in sources], max_tokens, job.width):
            found = job.translate(
                [buffer[number][0] for number in numbers],
                [sources[number] for number in numbers],
                [buffer[number][1] for number in numbers],
            )
            yield list(zip(numbers, found, strict=True))

    details = job.of_nothing
    nothing = Translation("", 0.0, [], token_scores=details.token_scores, alignment=details.alignment)
    yield from translated(requested.read, encode, search, job.reader, nothing, max_tokens, buffer_lines, advance)
    if requested.problem is not None:
        raise requested.problem
