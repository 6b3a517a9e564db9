"""Forced decoding: scores of given translations, token by token, in order and in bounded memory.

Several models are scored as the ensemble that they decode as: the probability of a token is the mean of theirs.

Legend: B sentences, S source length, T target length, D model width, V vocabulary, N translations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice, zip_longest

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import DataError, counted
from deepspeed_nmt.search.base import MisalignedError, check_finite
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.lines import (
    BUFFER_LINES,
    LineTokenizer,
    SourceCounts,
    SourceLines,
    length_buckets,
    refuse_damaged,
)
from deepspeed_nmt.search.models import mean_of, members_of, weights_of
from deepspeed_nmt.search.reliance import ScoredTranslation
from deepspeed_nmt.text import Tags

_POSITIONS_AT_ONCE = 512
"""Positions that are decoded at once, or more if their logits are few."""
_LOGITS_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Logits that are computed at once; on a CPU so many that they stay in its caches."""


def pad_sources(sources: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> tuple[Tensor, bool]:
    """Return sources as one tensor, padded on the right, and True if any position is padding. Shape: -> (B,S)."""
    longest = max(map(len, sources))
    rows = [[*source, *[pad] * (longest - len(source))] for source in sources]
    padded = any(len(source) < longest for source in sources)
    return torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True), padded


@torch.inference_mode()
def token_log_probs(
    model: DecodableModel,
    vocabulary: Vocabulary,
    source_BS: Tensor,
    padded: bool,
    translations: Sequence[Sequence[Sequence[int]]],
    decoded: Callable[[list[int], Tensor, Tensor], None] = lambda numbers, rows_N, real_NT: None,
) -> list[list[list[float]]]:
    """Compute the log-probabilities (nats) of the tokens of translations and of the EOS after them.

    Args:
        model: a model at the exit that is to score, or an ensemble, in eval mode.
        source_BS: source tokens, as in :meth:`~deepspeed_nmt.search.base.Search.search`.
        padded: False promises that no position is padding.
        translations: for each sentence any number of translations, without BOS and EOS.
        decoded: called after the model has read some of the translations at once, with their numbers, counted over
            all sentences, their rows in ``source_BS``, and True for the positions that are not padding.

    Returns:
        In the shape of ``translations``, one number for each token and one for the EOS.
    """
    members, weights = members_of(model), weights_of(model)
    assert not any(member.training for member in members), "call model.eval() first: dropout would change the scores"
    bos, eos, pad = vocabulary.bos, vocabulary.eos, vocabulary.pad
    memories = [member.encode(source_BS, padded) for member in members]
    flat = [(row, tokens) for row, of_source in enumerate(translations) for tokens in of_source]
    # Translations of similar length are scored together, so that there is little padding.
    order = sorted(range(len(flat)), key=lambda number: -len(flat[number][1]))
    scores: list[list[float]] = [[] for _ in flat]
    start, at_once = 0, max(1, _LOGITS_AT_ONCE[source_BS.device.type] // model.vocab_size)
    while start < len(order):
        length = len(flat[order[start]][1]) + 1
        numbers = order[start : start + max(1, max(_POSITIONS_AT_ONCE, at_once) // length)]
        start += len(numbers)
        inputs_NT, outputs_NT = torch.full((2, len(numbers), length), pad).unbind()
        for place, number in enumerate(numbers):
            tokens = flat[number][1]
            inputs_NT[place, : len(tokens) + 1] = torch.tensor([bos, *tokens])
            outputs_NT[place, : len(tokens) + 1] = torch.tensor([*tokens, eos])
        rows_N = torch.tensor([flat[number][0] for number in numbers], device=source_BS.device)
        inputs_NT, outputs_NT = inputs_NT.to(source_BS.device), outputs_NT.to(source_BS.device)
        by_model = []
        for member, memory in zip(members, memories, strict=True):
            states_NTD = member.decode(inputs_NT, memory.select(rows_N))[0]
            parts = (torch.split(x, at_once) for x in (states_NTD.flatten(0, 1), outputs_NT.view(-1, 1)))
            log_p = [
                member.projection(states_ND).float().log_softmax(1).gather(1, outputs_N1)
                for states_ND, outputs_N1 in zip(*parts, strict=True)
            ]
            by_model.append(torch.cat(log_p).view_as(outputs_NT))
        for number, values in zip(numbers, mean_of(by_model, weights).tolist(), strict=True):
            scores[number] = values[: len(flat[number][1]) + 1]
        decoded(numbers, rows_N, outputs_NT != pad)
    results = iter(scores)
    return [[next(results) for _ in of_source] for of_source in translations]


def blind_log_probs(
    model: DecodableModel,
    tokenizer: LineTokenizer,
    blind: str,
    translations: Sequence[Sequence[int]],
    device: torch.device | str,
) -> list[list[float]]:
    """Compute the log-probabilities (nats) of translations given a source without words, as :func:`token_log_probs`.

    Args:
        blind: that source: empty, or the tag of all sources.
    """
    vocabulary, begin = tokenizer.vocabulary, tokenizer.vocabulary.source.bos
    tokens = tokenizer.encode(blind) or [begin] * (tokenizer.encode("a")[:1] == [begin])  # as every source of a BERT
    nothing_1S, _ = pad_sources([[*tokens, vocabulary.source.eos]], vocabulary.pad, device)
    return token_log_probs(model, vocabulary, nothing_1S, False, [translations])[0]


def check_targets(
    model: DecodableModel, tokenizer: LineTokenizer, tags: Tags, lines: Iterable[str], strict: bool = False
) -> None:
    """Check that a model can read all translations of a text, with the target's tag, before any is scored.

    Raises:
        DataError: if one is too long, or ``strict`` is True and one was not UTF-8, with the number of its line.
    """
    if model.longest_target is None and not strict:
        return
    before, texts, tag = 0, iter(lines), "" if tags.target is None else f"{tags.target} "
    while buffer := list(islice(texts, BUFFER_LINES)):
        for number, line in enumerate(buffer if strict else (), before + 1):
            refuse_damaged(number, "translations", line)
        if model.longest_target is not None:
            tagged = [f"{tag}{line}" for line in buffer]
            _check_lengths(tokenizer.encode_batch(tagged, "target"), model.longest_target, before)
        before += len(buffer)


def _check_lengths(targets: Sequence[Sequence[int]], longest: int | None, before: int) -> None:
    for line, tokens in enumerate(targets, before + 1):
        if longest is not None and len(tokens) >= longest:
            raise DataError(
                f"line {line:,} of the translations has {len(tokens):,} tokens, more than {longest - 1:,}, which is "
                "all that the model reads; split it"
            )


def score_lines(
    model: DecodableModel,
    tokenizer: LineTokenizer,
    sources: Iterable[str],
    translations: Iterable[str],
    options: DecodeOptions | None = None,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int], object] = lambda more: None,
    warn: bool = True,
    blind: str | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> Iterator[ScoredTranslation]:
    """Score translations of lines one by one, as they are asked for.

    An empty source is scored as a source without tokens. Adjacent lines with the same source, such as those of an
    n-best list, are encoded once.

    Args:
        model: on ``device``, in eval mode.
        advance: called with the number of further pairs that are done.
        warn: False to log no warnings of lines, for text that is scored again.
        blind: source given which all translations are scored, too, such as an empty one; None for none.
        lock: held while the model is used, and at no other time.

    Raises:
        CheckpointError: if the model predicts NaN.
        DataError: if a translation is longer than the model can read, or ``strict`` is True and a source is too
            long or a line was not UTF-8.
        MisalignedError: if there are more sources than translations or fewer, after all pairs.
    """
    options = options or DecodeOptions()
    counts = None if warn else SourceCounts()
    reader = SourceLines(tokenizer, options.longest_line(), model.longest_source, options.strict, counts)
    pairs = zip_longest(sources, translations)
    lock, vocabulary, before = lock or nullcontext(), tokenizer.vocabulary, 0
    problem: MisalignedError | None = None
    while problem is None and (buffer := list(islice(pairs, options.buffer_lines or BUFFER_LINES))):
        rows, texts = [], []
        for line, (source, text) in enumerate(buffer, before + 1):
            if source is None or text is None:
                more, fewer = ("translations", "sources") if source is None else ("sources", "translations")
                problem = MisalignedError(
                    f"the texts have {counted(line - 1, fewer)} and more {more}; give texts of the same sentences, "
                    "aligned line by line"
                )
                break
            rows.append((*reader.encode(source), vocabulary.source.eos))
            reader.check_utf8(line, "translations", text)
            texts.append(text.rstrip("\r\n"))
        targets = tokenizer.encode_batch(texts, "target")
        _check_lengths(targets, model.longest_target, before)
        reader.warn()
        scored: dict[int, ScoredTranslation] = {}
        lengths = [max(len(source), len(tokens) + 1) for source, tokens in zip(rows, targets, strict=True)]
        for bucket in length_buckets(lengths, options.max_tokens):
            numbers_of: dict[tuple[int, ...], list[int]] = {}
            for number in bucket:
                numbers_of.setdefault(rows[number], []).append(number)
            texts_of = [[targets[number] for number in numbers] for numbers in numbers_of.values()]
            with lock:
                source_BS, padded = pad_sources(list(numbers_of), vocabulary.pad, device)
                scores = token_log_probs(model, vocabulary, source_BS, padded, texts_of)
                unseen: dict[int, list[float]] = {}
                if blind is not None:
                    of_bucket = [targets[number] for number in bucket]
                    values = blind_log_probs(model, tokenizer, blind, of_bucket, device)
                    unseen = dict(zip(bucket, values, strict=True))
            for numbers, of_source in zip(numbers_of.values(), scores, strict=True):
                for number, log_probs in zip(numbers, of_source, strict=True):
                    check_finite(sum(log_probs) + sum(unseen.get(number, ())))
                    scored[number] = ScoredTranslation(targets[number], log_probs, unseen.get(number))
            advance(len(bucket))
        yield from (scored[number] for number in range(len(texts)))
        before += len(buffer)
    reader.warn_at_end()
    if problem is not None:
        raise problem
