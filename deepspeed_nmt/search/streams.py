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
from deepspeed_nmt.search.forced import pad_sources, token_log_probs
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
from deepspeed_nmt.search.searches import SEARCHES


class DetailsReader:
    """Reader of the details of translations, by forced decoding after the search.

    Args:
        model: A model or an ensemble, in eval mode.
        tokenizer: vocabulary of the model.
        token_scores: True to return scores of tokens.
        layers: for each model of the ensemble, the number of the decoder layer whose cross-attention aligns; None to
            align nothing.

    Attributes:
        of_nothing: translation of an empty line.

    Raises:
        ConfigError: if a layer has no cross-attention.
    """

    def __init__(
        self, model: DecodableModel, tokenizer: LineTokenizer, token_scores: bool, layers: Sequence[int] | None
    ) -> None:
        self._members, self._weights = members_of(model), weights_of(model)
        self._tokenizer = tokenizer
        self._token_scores = token_scores
        self._aligning: list[tuple[MultiHeadAttention, float]] | None = None
        links = None if layers is None else ()
        self.of_nothing = Translation("", 0.0, [], token_scores=() if token_scores else None, alignment=links)
        if layers is not None:
            weights = self._weights or [1.0] * len(self._members)
            self._aligning = [
                (cross_attention(member.cross_attentions(), layer), weight)
                for member, layer, weight in zip(self._members, layers, weights, strict=True)
            ]

    def add(
        self,
        source_BS: Tensor,
        padded: bool,
        sources: Sequence[tuple[str, Sequence[int]]],
        translations: list[list[Translation]],
    ) -> list[list[Translation]]:
        """Return the translations of a batch with their details.

        Args:
            source_BS: source tokens.
            padded: False promises that no position is padding.
            sources: text and tokens of each sentence.
            translations: of each sentence, tags included.
        """
        if not self._token_scores and self._aligning is None:
            return translations
        tokenizer, vocabulary = self._tokenizer, self._tokenizer.vocabulary
        tokens = [[one.tokens for one in best] for best in translations]
        watch = None if self._aligning is None else AttentionWatch([self._aligning], source_BS, vocabulary)
        with nullcontext() if watch is None else watch.watching():
            decoded = [] if watch is None else [watch.decoded]
            scores = token_log_probs(self._members, vocabulary, source_BS, padded, tokens, self._weights, *decoded)
        numbers = count()

        def detailed(one: Translation, log_probs: list[float], words: Sequence[int]) -> Translation:
            links, number = None, next(numbers)
            if watch is not None:
                own = watch.links(0, number, len(one.tokens))
                links = word_links(own, words, target_words(one.tokens, tokenizer))
            return replace(one, token_scores=tuple(log_probs) if self._token_scores else None, alignment=links)

        result = []
        for (line, source), best, of_best in zip(sources, translations, scores, strict=True):
            words = source_words(line, source, tokenizer) if watch is not None else []
            result.append([detailed(*pair, words) for pair in zip(best, of_best, strict=True)])
        return result


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
    inputs.check(config)
    lock = nullcontext() if lock is None else lock
    with lock:
        search = SEARCHES[config.name].build(config, model, tokenizer.vocabulary)
    longest, tags, vocabulary = options.longest_line(), inputs.tags, tokenizer.vocabulary
    reader = SourceLines(tokenizer, longest, model.longest_source, options.strict, counts, inputs.first)
    details = DetailsReader(model, tokenizer, options.token_scores, alignment_layers)

    def best_of(hypotheses: list[Hypothesis]) -> list[Translation]:
        kept = hypotheses if isinstance(search, RanksTexts) else hypotheses[: options.nbest]
        texts = [tokenizer.decode(hypothesis.tokens) for hypothesis in kept]
        ranked = search.rank(kept, texts) if isinstance(search, RanksTexts) else list(zip(kept, texts, strict=True))
        return [
            Translation(text, one.score, one.tokens, one.log_prob, one.features)
            for one, text in ranked[: options.nbest]
        ]

    def translate(lines: Sequence[Line], sources: Sequence[list[int]]) -> list[list[Translation]]:
        """Translate a batch of sentences with their tokens."""
        rows = [[*source, vocabulary.source.eos] for source in sources]
        with lock:
            source_BS, padded = pad_sources(rows, vocabulary.pad, device)
            if config.takes:
                lists = cast(RequestSearch, search).search(source_BS, padded, [request for _, request in lines])
            else:
                lists = search.search(source_BS, padded)
            texts = [(line, source) for (line, _), source in zip(lines, sources, strict=True)]
            translations = details.add(source_BS, padded, texts, [best_of(hypotheses) for hypotheses in lists])
        return [
            [
                replace(one, text=tags.untagged(one.text), alignment=without_tags(one.alignment, tags, one.text))
                for one in best
            ]
            for best in translations
        ]

    def batches(buffer: list[Line], sources: list[list[int]]) -> Iterator[list[Found]]:
        for numbers in length_buckets([len(source) + 1 for source in sources], options.max_tokens, config.width):
            best = translate([buffer[number] for number in numbers], [sources[number] for number in numbers])
            yield list(zip(numbers, best, strict=True))

    requests = inputs.requests(lines, reader, model.longest_target)
    return translated(requests, batches, reader, details.of_nothing, options, advance, lock)
