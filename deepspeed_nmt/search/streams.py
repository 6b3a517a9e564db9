"""Translation of a stream of lines of any length, in its order and in bounded memory.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.search.alignment import (
    AttentionWatch,
    cross_attention,
    source_words,
    target_words,
    without_tags,
    word_links,
)
from deepspeed_nmt.search.base import Hypothesis, Links, RanksTexts, RequestSearch, Search, Translation
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.forced import pad_sources, token_log_probs
from deepspeed_nmt.search.lines import (
    Found,
    Line,
    LineInputs,
    SourceCounts,
    SourceLines,
    SourceTokenizer,
    check_nbest,
    length_buckets,
    translated,
)
from deepspeed_nmt.search.models import members_of, weights_of
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.text import Tags


@dataclass(frozen=True)
class Details:
    """Details of one translation.

    Attributes:
        token_scores: log-probability (nats) of each token and of the EOS; None if they were not asked for.
        alignment: links of words; None if it was not asked for.
    """

    token_scores: tuple[float, ...] | None = None
    alignment: Links | None = None


class DetailsReader:
    """Reader of the details of translations, by forced decoding after the search.

    Args:
        model: A model or an ensemble, in eval mode.
        tokenizer: vocabulary of the model.
        token_scores: True to return scores of tokens.
        layers: for each model of the ensemble, the number of the decoder layer whose cross-attention aligns; None to
            align nothing.

    Attributes:
        of_nothing: details of an empty line.

    Raises:
        ConfigError: if a layer has no cross-attention.
    """

    def __init__(
        self, model: DecodableModel, tokenizer: SourceTokenizer, token_scores: bool, layers: Sequence[int] | None
    ) -> None:
        self._members, self._weights = members_of(model), weights_of(model)
        self._tokenizer = tokenizer
        self._token_scores = token_scores
        self._aligning: list[tuple[MultiHeadAttention, float]] | None = None
        self.of_nothing = Details(() if token_scores else None, None if layers is None else ())
        if layers is not None:
            weights = self._weights or [1.0] * len(self._members)
            self._aligning = [
                (cross_attention(member.cross_attentions(), layer), weight)
                for member, layer, weight in zip(self._members, layers, weights, strict=True)
            ]

    def read(
        self,
        source_BS: Tensor,
        padded: bool,
        sources: Sequence[tuple[str, Sequence[int]]],
        translations: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[Details]]:
        """Return the details of the translations of a batch.

        Args:
            source_BS: source tokens.
            padded: False promises that no position is padding.
            sources: text and tokens of each sentence.
            translations: tokens of the translations of each sentence.
        """
        if not self._token_scores and self._aligning is None:
            return [[Details() for _ in each] for each in translations]
        vocabulary = self._tokenizer.vocabulary
        with ExitStack() as stack:
            watch = None
            if self._aligning is not None:
                watch = AttentionWatch([self._aligning], source_BS, vocabulary)
                stack.enter_context(watch.watching())
            scores = token_log_probs(
                self._members,
                vocabulary,
                source_BS,
                padded,
                translations,
                self._weights,
                *([] if watch is None else [watch.decoded]),
            )
        number, found = 0, []
        for (line, source), each, log_probs in zip(sources, translations, scores, strict=True):
            words = source_words(line, source, self._tokenizer) if watch is not None else []
            details = []
            for tokens, values in zip(each, log_probs, strict=True):
                links = None
                if watch is not None:
                    links = word_links(
                        watch.links(0, number, len(tokens)), words, target_words(tokens, self._tokenizer)
                    )
                details.append(Details(tuple(values) if self._token_scores else None, links))
                number += 1
            found.append(details)
        return found


def translate_lines(
    model: DecodableModel,
    tokenizer: SourceTokenizer,
    lines: Iterable[str],
    config: SearchConfig,
    options: DecodeOptions | None = None,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[int], object] = lambda more: None,
    counts: SourceCounts | None = None,
    inputs: LineInputs | None = None,
    alignment_layers: Sequence[int] | None = None,
    lock: AbstractContextManager[object] | None = None,
) -> Iterator[list[Translation]]:
    """Translate lines one by one, as they are asked for.

    Args:
        model: A model on ``device``, in eval mode.
        tokenizer: vocabulary of the model.
        lines: sentences; a line feed at the end is ignored. Lines without tokens are not given to the model: their
            translation is empty.
        config: the search and its settings.
        options: sizes of batches and buffers, bound of a line, number of translations, and scores of tokens. Memory
            grows with all of them.
        device: device of the model.
        advance: called with the number of further lines that are done, which may be long before they are yielded.
        counts: record of what there is to warn of; see :class:`SourceLines`.
        inputs: prefixes, constraints and tags of the lines, and their numbers in the text.
        alignment_layers: for each model of an ensemble, the number of the decoder layer whose cross-attention aligns;
            None for no alignment.
        lock: held while the model is used, and at no other time; a lock of all users of the model in several threads.

    Returns:
        For each line, in order, at least one and at most ``nbest`` translations, best first.

    Raises:
        ConfigError: if numbers are out of range. All of them are reported at once, before anything is read. Or if the
            search does not respect ``inputs``, or a layer does not exist.
        DataError: if a line is too long, and ``strict`` is True.
        MisalignedError: if there are more or fewer prefixes or constraints than lines, after those that have them.
    """
    options, inputs = options or DecodeOptions(), inputs or LineInputs()
    check_nbest(options.nbest, config)
    inputs.check(config, tokenizer)
    lock = nullcontext() if lock is None else lock
    with lock:
        search = SEARCHES[config.name].build(config, model, tokenizer.vocabulary)
    longest = options.longest_line()
    reader = SourceLines(tokenizer, longest, model.longest_source, options.strict, counts, inputs.first)
    details = DetailsReader(model, tokenizer, options.token_scores, alignment_layers)
    job = _Job(search, bool(config.takes), tokenizer, details, torch.device(device), options.nbest, lock, inputs.tags)

    def translate(buffer: list[Line], sources: list[list[int]]) -> Iterator[list[Found]]:
        for numbers in length_buckets([len(source) + 1 for source in sources], options.max_tokens, config.width):
            best = job.translate([buffer[number] for number in numbers], [sources[number] for number in numbers])
            yield list(zip(numbers, best, strict=True))

    nothing = Translation(
        "", 0.0, [], token_scores=details.of_nothing.token_scores, alignment=details.of_nothing.alignment
    )
    requests = inputs.requests(lines, reader, model.longest_target)
    return translated(requests, translate, reader, nothing, options, advance, lock)


@dataclass(frozen=True)
class _Job:
    """Properties that all batches of a translation share; see :func:`translate_lines`."""

    search: Search | RequestSearch
    takes_requests: bool
    tokenizer: SourceTokenizer
    details: DetailsReader
    device: torch.device
    nbest: int
    lock: AbstractContextManager[object]
    tags: Tags

    def translate(self, lines: Sequence[Line], sources: Sequence[list[int]]) -> list[list[Translation]]:
        """Translate a batch of sentences with their tokens."""
        vocabulary = self.tokenizer.vocabulary
        rows = [[*source, vocabulary.source.eos] for source in sources]
        with self.lock:
            source_BS, padded = pad_sources(rows, vocabulary.pad, self.device)
            if self.takes_requests:
                lists = cast(RequestSearch, self.search).search(source_BS, padded, [request for _, request in lines])
            else:
                lists = self.search.search(source_BS, padded)
            best = [self._best(hypotheses) for hypotheses in lists]
            tokens = [[hypothesis.tokens for hypothesis, _ in ranked] for ranked in best]
            texts = [(line, source) for (line, _), source in zip(lines, sources, strict=True)]
            details = self.details.read(source_BS, padded, texts, tokens)
        return [
            [
                Translation(
                    self.tags.untagged(text),
                    hypothesis.score,
                    hypothesis.tokens,
                    hypothesis.log_prob,
                    hypothesis.features,
                    detail.token_scores,
                    without_tags(detail.alignment, self.tags, text),
                )
                for (hypothesis, text), detail in zip(ranked, of_ranked, strict=True)
            ]
            for ranked, of_ranked in zip(best, details, strict=True)
        ]

    def _best(self, hypotheses: list[Hypothesis]) -> list[tuple[Hypothesis, str]]:
        """Return the best hypotheses of a sentence and their texts."""
        if not isinstance(self.search, RanksTexts):
            return [(each, self.tokenizer.decode(each.tokens)) for each in hypotheses[: self.nbest]]
        return self.search.rank(hypotheses, [self.tokenizer.decode(each.tokens) for each in hypotheses])[: self.nbest]
