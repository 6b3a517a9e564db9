"""Translation of a stream of lines of any length, in its order and in bounded memory.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
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
from deepspeed_nmt.search.base import Hypothesis, RanksTexts, RequestSearch, Translation
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.forced import blind_log_probs, pad_sources, token_log_probs
from deepspeed_nmt.search.lines import (
    Found,
    Line,
    LineInputs,
    LineTokenizer,
    SourceCounts,
    SourceLines,
    check_nbest,
    length_buckets,
    translated,
)
from deepspeed_nmt.search.models import members_of, weights_of
from deepspeed_nmt.search.reliance import Reliance, ScoredTranslation
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.search.speculative import Speculative
from deepspeed_nmt.text import Tags

_Best = list[Translation]
"""Translations of a sentence, best first."""


class DetailsReader:
    """Reader of the details of translations after the search.

    Scores of tokens are those of the search, if it keeps them. Links, and other scores, come from one pass of forced
    decoding; reliance takes another one, without the source.

    Args:
        options: the details that are requested.
        layers: for each model of the ensemble, the number of the decoder layer whose cross-attention aligns; None to
            align nothing.
        tags: symbols in front of the lines and translations.

    Raises:
        ConfigError: if a layer has no cross-attention.
    """

    def __init__(
        self,
        model: DecodableModel,
        tokenizer: LineTokenizer,
        options: DecodeOptions,
        layers: Sequence[int] | None,
        tags: Tags,
    ) -> None:
        self._model, self._tokenizer, self._tags = model, tokenizer, tags
        self._token_scores, self._reliance = options.token_scores, bool(options.reliance)
        self._aligning: list[tuple[MultiHeadAttention, float]] | None = None
        if layers is not None:
            members = members_of(model)
            weights = weights_of(model) or [1.0] * len(members)
            self._aligning = [
                (cross_attention(member.cross_attentions(), layer), weight)
                for member, layer, weight in zip(members, layers, weights, strict=True)
            ]
        links = None if layers is None else ()
        self.nothing = Translation(
            "", 0.0, [], token_scores=() if self._token_scores else None, alignment=links,
            reliance=Reliance([], [], []) if self._reliance else None,
        )  # fmt: skip
        """The translation of a line without tokens."""

    def add(
        self, source_BS: Tensor, padded: bool, lines: Sequence[tuple[str, Sequence[int]]], found: Sequence[_Best]
    ) -> Sequence[_Best]:
        """Return the translations of a batch, tags included, with their details; ``lines`` are texts and tokens.

        Translations come with the scores of their tokens, as far as the search keeps them.
        """
        tokens = [[one.tokens for one in best] for best in found]
        scores: list[list[Sequence[float] | None]] = [[one.token_scores for one in best] for best in found]
        is_scored = all(of_one is not None for of_best in scores for of_one in of_best)
        vocabulary = self._tokenizer.vocabulary
        first = int(self._tags.target is not None)  # the tag is given: it relies on nothing, and covers nothing
        watch = AttentionWatch([] if self._aligning is None else [self._aligning], source_BS, vocabulary)
        if self._aligning is not None or ((self._token_scores or self._reliance) and not is_scored):

            def decoded(numbers: list[int], rows_N: Tensor, real_NT: Tensor) -> None:
                real_NT[:, :first] = False
                watch.decoded(numbers, rows_N, real_NT)

            with watch.watching():
                forced = token_log_probs(self._model, vocabulary, source_BS, padded, tokens, decoded)
            scores = [list(of_best) for of_best in forced]
        unseen: list[list[float]] = []
        if self._reliance:
            flat, blind = [of_one for of_best in tokens for of_one in of_best], self._tags.source or ""
            unseen = blind_log_probs(self._model, self._tokenizer, blind, flat, source_BS.device)
        numbers = count()
        detailed: list[_Best] = []
        for (line, source), best, of_best in zip(lines, found, scores, strict=True):
            words = [] if self._aligning is None else source_words(line, source, self._tokenizer)
            detailed.append([])
            for one, log_probs, number in zip(best, of_best, numbers, strict=False):
                links = coverage = reliance = None
                if self._aligning is not None:
                    own = watch.links(0, number, len(one.tokens))
                    links = word_links(own, words, target_words(one.tokens, self._tokenizer))
                    coverage = watch.coverage(0, number)
                if self._reliance:
                    values = one.tokens[first:], list(log_probs or ())[first:], unseen[number][first:]
                    text = self._tags.untagged(one.text)
                    whole_words = self._tokenizer.reference(self._tags.untagged(line, "source"))
                    reliance = Reliance.of(ScoredTranslation(*values), text, (whole_words, source), coverage)
                token_scores = tuple(log_probs or ()) if self._token_scores else None
                detailed[-1].append(replace(one, token_scores=token_scores, alignment=links, reliance=reliance))
        return detailed


def translate_lines(
    model: DecodableModel,
    tokenizer: LineTokenizer,
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
        model: on ``device``, in eval mode.
        lines: sentences; a line feed at the end is ignored. Lines without tokens are not given to the model: their
            translation is empty.
        options: sizes of batches and buffers, bound of a line, number of translations, scores of tokens and reliance.
            Memory grows with all of them.
        advance: called with the number of further lines that are done, which may be long before they are yielded.
        counts: record of what there is to warn of; see :class:`SourceLines`.
        inputs: prefixes, constraints and tags of the lines, and their numbers in the text.
        alignment_layers: for each model of an ensemble, the number of the decoder layer whose cross-attention aligns;
            None for no alignment.
        lock: held while the model is used, and at no other time; a lock of all users of the model in several threads.

    Returns:
        For each line, in order, at least one and at most ``nbest`` translations, best first.

    Raises:
        ConfigError: if numbers are out of range, before anything is read; or if the search does not respect
            ``inputs``, or a layer does not exist.
        DataError: if a line is too long, and ``strict`` is True.
        MisalignedError: if there are more or fewer prefixes or constraints than lines, after those that have them.
    """
    options, inputs = options or DecodeOptions(), inputs or LineInputs()
    check_nbest(options.nbest, config)
    inputs.check(config)
    lock = nullcontext() if lock is None else lock
    with lock:
        search = SEARCHES[config.name].build(config, model, tokenizer.vocabulary)
    tags, vocabulary = inputs.tags, tokenizer.vocabulary
    reader = SourceLines(
        tokenizer, options.longest_line(), model.longest_source, options.strict, counts, inputs.first
    )
    details = DetailsReader(model, tokenizer, options, alignment_layers, tags)

    def best_of(hypotheses: list[Hypothesis]) -> _Best:
        if isinstance(search, RanksTexts):
            texts = [tags.untagged(tokenizer.decode(one.tokens)) for one in hypotheses]  # all have the tag in common
            hypotheses = search.rank(hypotheses, texts)
        return [
            Translation(
                tokenizer.decode(one.tokens), one.score, one.tokens, one.log_prob, one.features, one.token_log_probs
            )
            for one in hypotheses[: options.nbest]
        ]

    def untagged(one: Translation) -> Translation:
        return replace(one, text=tags.untagged(one.text), alignment=without_tags(one.alignment, tags, one.text))

    def batches(buffer: list[Line], sources: list[list[int]]) -> Iterator[list[Found]]:
        for numbers in length_buckets([len(source) + 1 for source in sources], options.max_tokens, config.width):
            rows = [[*sources[number], vocabulary.source.eos] for number in numbers]
            with lock:
                source_BS, padded = pad_sources(rows, vocabulary.pad, device)
                if config.takes:
                    requests = [buffer[number][1] for number in numbers]
                    lists = cast(RequestSearch, search).search(source_BS, padded, requests)
                else:
                    lists = search.search(source_BS, padded)
                if isinstance(search, Speculative):
                    reader.counts.add_drafts(search.counts)
                    search.counts.clear()
                texts = [(buffer[number][0], sources[number]) for number in numbers]
                translations = details.add(source_BS, padded, texts, [best_of(hypotheses) for hypotheses in lists])
            yield [
                (number, [untagged(one) for one in best]) for number, best in zip(numbers, translations, strict=True)
            ]

    requests = inputs.requests(lines, reader, model.longest_target)
    return translated(requests, batches, reader, details.nothing, options, advance, tags, lock)
