"""Scores of a stream of translations, token by token, in its order and in bounded memory.

Legend: B sentences, S source length, T target length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice, zip_longest

import torch

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.errors import ConfigError, DataError, counted
from deepspeed_nmt.search.base import MisalignedError
from deepspeed_nmt.search.buckets import length_buckets
from deepspeed_nmt.search.buffers import out_of_bounds
from deepspeed_nmt.search.ensemble import members_of, weights_of
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS, PairTokenizer, SourceLines
from deepspeed_nmt.search.translate import pad_sources
from deepspeed_nmt.text import Tags

_BUFFER = 4096
"""Lines of a text in memory."""


@dataclass(frozen=True)
class ScoredTranslation:
    """A translation with the log-probability of each of its tokens.

    Attributes:
        tokens: tokens without BOS and EOS; none for an empty translation.
        log_probs: log-probability (nats) of each token, given the source and the tokens before it, and of the EOS
            after them. Shape: (T + 1,)
    """

    tokens: list[int]
    log_probs: list[float]

    @property
    def log_prob(self) -> float:
        """Log-probability (nats) of the translation, EOS included."""
        return math.fsum(self.log_probs)

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability (nats) of a token, EOS included; minus it is the log of the perplexity."""
        return self.log_prob / len(self.log_probs)


def check_targets(model: DecodableModel, tokenizer: PairTokenizer, tags: Tags, lines: Iterable[str]) -> None:
    """Check that a model can read all translations of a text, before any is scored.

    Args:
        model: A model or an ensemble.
        tokenizer: vocabulary of the model.
        tags: the target's tag is put in front of each translation.
        lines: the text, which is read only if the model has a bound.

    Raises:
        DataError: if one is too long, with the number of its line.
    """
    if model.longest_target is None:
        return
    before, texts = 0, iter(lines)
    while buffer := [line if tags.target is None else f"{tags.target} {line}" for line in islice(texts, _BUFFER)]:
        _check_lengths(tokenizer.encode_batch(buffer, "target"), model.longest_target, before)
        before += len(buffer)


def _check_lengths(targets: Sequence[Sequence[int]], longest: int | None, before: int) -> None:
    for line, tokens in enumerate(targets, before + 1):
        if longest is not None and len(tokens) >= longest:
            raise DataError(
                f"translations must have {longest - 1:,} tokens at most, which is all that the model reads, but line "
                f"{line:,} has {len(tokens):,}; split it"
            )


def score_lines(
    model: DecodableModel,
    tokenizer: PairTokenizer,
    sources: Iterable[str],
    translations: Iterable[str],
    max_tokens: int = 4096,
    buffer_lines: int = 4096,
    device: torch.device | str = "cpu",
    advance: Callable[[int], object] = lambda more: None,
    max_source_tokens: int = MAX_SOURCE_TOKENS,
    strict: bool = False,
    warn: bool = True,
    lock: AbstractContextManager[object] | None = None,
) -> Iterator[ScoredTranslation]:
    """Score translations of lines one by one, as they are asked for.

    An empty source is scored as a source without tokens. Adjacent lines with the same source, such as those of an
    n-best list, are encoded once.

    Args:
        model: A model or an ensemble on ``device``, in eval mode.
        tokenizer: vocabulary of the model.
        sources: source sentences; a line feed at the end is ignored.
        translations: a translation of each.
        max_tokens: bound of a batch: pairs times the longest side among them, in tokens with EOS.
        buffer_lines: pairs that are read before the first of them is yielded.
        device: device of the model.
        advance: called with the number of further pairs that are done.
        max_source_tokens: bound of a source, in tokens without EOS; the model may have a lower one.
        strict: True to refuse longer sources. Otherwise their beginning is read, with a warning.
        warn: False to log no warnings of lines, for text that is scored again.
        lock: held while the model is used, and at no other time.

    Yields:
        Each translation with the log-probabilities of its tokens, in order.

    Raises:
        ConfigError: if numbers are out of range. All of them are reported at once, before anything is read.
        DataError: if a translation is longer than the model can read, or ``strict`` is True and a source is too
            long or a line was not UTF-8.
        MisalignedError: if there are more sources than translations or fewer, after all pairs.
    """
    numbers = {"max_tokens": max_tokens, "buffer_lines": buffer_lines, "max_source_tokens": max_source_tokens}
    if problems := out_of_bounds(numbers):
        raise ConfigError(problems)
    reader = SourceLines(tokenizer, max_source_tokens, model.longest_source, strict, warn)
    pairs = zip_longest(sources, translations)
    held = nullcontext() if lock is None else lock
    return _score(model, tokenizer, reader, pairs, max_tokens, buffer_lines, torch.device(device), advance, held)


def _score(
    model: DecodableModel,
    tokenizer: PairTokenizer,
    reader: SourceLines,
    pairs: Iterator[tuple[str | None, str | None]],
    max_tokens: int,
    buffer_lines: int,
    device: torch.device,
    advance: Callable[[int], object],
    lock: AbstractContextManager[object],
) -> Iterator[ScoredTranslation]:
    vocabulary, before = tokenizer.vocabulary, 0
    problem: MisalignedError | None = None
    while problem is None and (buffer := list(islice(pairs, buffer_lines))):
        sources, texts = [], []
        for line, (source, text) in enumerate(buffer, before + 1):
            if source is None or text is None:
                more, fewer = ("translations", "sources") if source is None else ("sources", "translations")
                problem = MisalignedError(
                    "sources and translations must be aligned line by line, but the texts have "
                    f"{counted(line - 1, fewer)} and more {more}; give texts of the same sentences"
                )
                break
            sources.append((*reader.encode(source), vocabulary.source.eos))
            reader.check_beside(text, line, "translation")
            texts.append(text.rstrip("\r\n"))
        targets = tokenizer.encode_batch(texts, "target")
        _check_lengths(targets, model.longest_target, before)
        reader.warn_of_unknown()
        scored: list[ScoredTranslation | None] = [None] * len(texts)
        lengths = [max(len(source), len(tokens) + 1) for source, tokens in zip(sources, targets, strict=True)]
        for bucket in length_buckets(lengths, max_tokens):
            numbers_of: dict[tuple[int, ...], list[int]] = {}
            for number in bucket:
                numbers_of.setdefault(sources[number], []).append(number)
            asked = [[targets[number] for number in numbers] for numbers in numbers_of.values()]
            with lock:
                source_BS, padded = pad_sources(list(numbers_of), vocabulary.pad, device)
                found = token_log_probs(members_of(model), vocabulary, source_BS, padded, asked, weights_of(model))
            for numbers, each in zip(numbers_of.values(), found, strict=True):
                for number, log_probs in zip(numbers, each, strict=True):
                    scored[number] = ScoredTranslation(targets[number], log_probs)
            advance(len(bucket))
        yield from (each for each in scored if each is not None)
        before += len(buffer)
    reader.warn_at_end()
    if problem is not None:
        raise problem
