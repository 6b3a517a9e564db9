"""Sampled segmentations of sentences that SentencePiece has encoded, the same in every process.

SentencePiece samples, too, but version 0.2.3 mixes into every seed a number that the process has drawn from the
operating system. So a sentence that is seeded anew has the same sample within one process only, and batches in
several threads never repeat. Here SentencePiece encodes, gives the scores of merges, and lists the best segmentations
of a unigram model; only the choice is made in this module.

A sentence is a sequence of words, runs of ordinary tokens of which the first has SentencePiece's mark of a space. No
token of a vocabulary spans two of them, so words are sampled independently. Unknown tokens, bytes and symbols stay.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import add
from random import Random
from typing import Any, Generic, TypeVar

from deepspeed_nmt.data.tokenizer import SPACE
from deepspeed_nmt.errors import DataError

_CACHED_WORDS = 1 << 18
"""Words that are remembered, so that memory is bounded."""
_BEST = 64
"""Segmentations of a word that a unigram model chooses from."""

W = TypeVar("W")
Word = tuple[int, ...]
"""A word as the vocabulary segments it."""


class SegmentationSampler(ABC, Generic[W]):
    """A sampler of segmentations.

    Args:
        processor: SentencePiece's, with the model.
        pieces: texts of ordinary tokens with their numbers.
    """

    def __init__(self, processor: Any, pieces: dict[str, int]) -> None:
        self._processor = processor
        self._numbers = pieces
        self._texts = {number: text for text, number in pieces.items()}
        self._begins = frozenset(number for text, number in pieces.items() if text.startswith(SPACE))
        self._words: dict[Word, W] = {}

    def sample(self, tokens: Sequence[int], seed: int) -> list[int]:
        """Draw a segmentation of a sentence.

        Args:
            tokens: the sentence as the vocabulary segments it.
            seed: any number; equal seeds give equal segmentations.
        """
        random = Random(seed)  # its numbers are the same on every machine and in every version
        found: list[int] = []
        word: list[int] = []
        texts, begins = self._texts, self._begins
        for token in tokens:
            if token not in texts or token in begins:
                if word:
                    found += self._drawn(tuple(word), random)
                    word = []
                if token not in texts:
                    found.append(token)
                    continue
            word.append(token)
        if word:
            found += self._drawn(tuple(word), random)
        return found

    def _drawn(self, word: Word, random: Random) -> Sequence[int]:
        known = self._words.get(word)
        if known is None:
            if len(self._words) >= _CACHED_WORDS:
                self._words.clear()
            known = self._words[word] = self.learn(word)
        return self.draw(word, known, random)

    @abstractmethod
    def learn(self, word: Word) -> W:
        """Return what is to be remembered of a word."""

    @abstractmethod
    def draw(self, word: Word, known: W, random: Random) -> Sequence[int]:
        """Draw a segmentation of a word, of which ``known`` is remembered."""


class BpeSampler(SegmentationSampler[tuple[tuple[float, ...], tuple[int, ...]]]):
    """BPE-Dropout (Provilkov, Emelianenko and Voita 2020): at each step every possible merge is skipped at random.

    Args:
        processor: SentencePiece's, with the model.
        pieces: texts of ordinary tokens with their numbers.
        scores: their scores: the merge with the highest one comes first, of equal ones the first in the word.
        dropout: probability that a merge is skipped.
    """

    def __init__(self, processor: Any, pieces: dict[str, int], scores: dict[str, float], dropout: float) -> None:
        super().__init__(processor, pieces)
        self._scores, self._dropout = scores, dropout
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def learn(self, word: Word) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the places of all merges, and the probabilities that the first k are made, in ascending order."""
        parts, places = tuple(self._text(word)), []
        while possible := self._possible(parts):
            places.append(possible[0])
            parts = _merged(parts, possible[0])
        kept = tuple(accumulate([1.0 - self._dropout] * len(places), lambda product, factor: product * factor))
        return kept[::-1], tuple(places)

    def draw(self, word: Word, known: tuple[tuple[float, ...], tuple[int, ...]], random: Random) -> Sequence[int]:
        """Draw a segmentation; one number decides how many merges come before the first that is skipped."""
        kept, places = known
        number = random.random()
        if not kept or number < kept[0]:
            return word
        parts = tuple(self._text(word))
        for place in places[: len(kept) - bisect_right(kept, number)]:
            parts = _merged(parts, place)
        possible = self._possible(parts)[1:]
        while True:
            chosen = next((place for place in possible if random.random() >= self._dropout), None)
            if chosen is None:
                break
            parts = _merged(parts, chosen)
            possible = self._possible(parts)
        numbers = [self._numbers.get(part, -1) for part in parts]
        return word if -1 in numbers else numbers

    def _text(self, word: Word) -> str:
        return "".join(map(self._texts.__getitem__, word))

    def _possible(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the places of the possible merges of a word, that of the first one first."""
        found = self._known.get(parts)
        if found is None:
            if len(self._known) >= _CACHED_WORDS:
                self._known.clear()
            scored = enumerate(map(self._scores.get, map(add, parts, parts[1:])))
            ordered = sorted((-score, place) for place, score in scored if score is not None)
            found = self._known[parts] = tuple(place for _, place in ordered)
        return found


def _merged(parts: tuple[str, ...], place: int) -> tuple[str, ...]:
    return (*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :])


class UnigramSampler(SegmentationSampler[tuple[list[float], list[Word]]]):
    """Subword regularization (Kudo 2018): a segmentation of each word is drawn from its best ones.

    Args:
        processor: SentencePiece's, with the model.
        pieces: texts of ordinary tokens with their numbers.
        alpha: exponent of the segmentations' probabilities.
    """

    def __init__(self, processor: Any, pieces: dict[str, int], alpha: float) -> None:
        super().__init__(processor, pieces)
        self._alpha = alpha

    def learn(self, word: Word) -> tuple[list[float], list[Word]]:
        """Return the best segmentations of a word with the sums of their weights."""
        if word[0] not in self._begins:  # SentencePiece would begin it with a space
            return [1.0], [word]
        text = "".join(map(self._texts.__getitem__, word)).replace(SPACE, " ").strip()
        best = self._processor.nbest_encode(text, nbest_size=_BEST, return_type="proto").nbests if text else []
        lists = [tuple(piece.id for piece in each.pieces) for each in best]
        if word not in lists:
            return [1.0], [word]
        weights = [math.exp(self._alpha * (each.score - best[0].score)) for each in best]
        return list(accumulate(weights)), lists

    def draw(self, word: Word, known: tuple[list[float], list[Word]], random: Random) -> Sequence[int]:
        """Draw one of the best segmentations."""
        sums, lists = known
        if len(lists) == 1:
            return word
        return lists[min(bisect_right(sums, random.random() * sums[-1]), len(lists) - 1)]


def sampler_of(model: bytes, processor: Any, alpha: float) -> SegmentationSampler[Any]:
    """Return a sampler of a SentencePiece model.

    Args:
        model: serialised.
        processor: SentencePiece's, with the model.
        alpha: of BPE the probability that a merge is skipped; of a unigram model the exponent of probabilities.

    Raises:
        DataError: if the model is of another type.
    """
    import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model  # needs protobuf, which the rest does not

    content = sentencepiece_model.ModelProto.FromString(model)
    spec, normal = content.trainer_spec, sentencepiece_model.ModelProto.SentencePiece.NORMAL
    pieces = {each.piece: number for number, each in enumerate(content.pieces) if each.type == normal}
    if spec.model_type == spec.BPE:
        scores = {each.piece: each.score for each in content.pieces if each.type == normal}
        return BpeSampler(processor, pieces, scores, alpha)
    if spec.model_type == spec.UNIGRAM:
        return UnigramSampler(processor, pieces, alpha)
    kind = spec.ModelType.Name(spec.model_type).lower()
    raise DataError(
        f"--segmentations above 1 need a vocabulary of type bpe or unigram, but its type is {kind}; leave them out"
    )
