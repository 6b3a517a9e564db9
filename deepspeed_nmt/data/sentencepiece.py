"""SentencePiece vocabularies: one for both sides, or one a side.

A vocabulary is of raw text (BPE, or a unigram model), or of the words of text that is already segmented in the
``@@ `` style of subword-nmt, whose tokens are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import add
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

import sentencepiece
from typing_extensions import override

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.tokenizer import (
    BOS,
    EOS,
    INFO_FILE,
    PAD,
    SPACE,
    UNK,
    UNKNOWN_TEXT,
    SampledSegmentations,
    Tokenizer,
    TokenLists,
    VocabularyInfo,
)
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import read_regular
from deepspeed_nmt.text import segmented_words

_CACHED_WORDS = 1 << 18
"""Words that are remembered, so that memory is bounded."""
_BEST = 64
"""Segmentations of a word that a unigram model chooses from."""

W = TypeVar("W")
Word = tuple[int, ...]
"""A word as the vocabulary segments it."""


class SegmentationSampler(ABC, Generic[W]):
    """A sampler of segmentations, by SentencePiece's processor and the numbers of ordinary tokens' texts."""

    def __init__(self, processor: Any, pieces: dict[str, int]) -> None:
        self._processor = processor
        self._numbers = pieces
        self._texts = {number: text for text, number in pieces.items()}
        self._begins = frozenset(number for text, number in pieces.items() if text.startswith(SPACE))
        self._words: dict[Word, W] = {}

    def sample(self, tokens: Sequence[int], seed: int) -> list[int]:
        """Draw a segmentation of a sentence from the one that the vocabulary gives; equal seeds give equal ones."""
        random = Random(seed)  # its numbers are the same on every machine and in every version
        drawn: list[int] = []
        word: list[int] = []
        texts, begins = self._texts, self._begins
        for token in tokens:
            if token not in texts or token in begins:
                if word:
                    drawn += self._drawn(tuple(word), random)
                    word = []
                if token not in texts:
                    drawn.append(token)
                    continue
            word.append(token)
        return drawn + list(self._drawn(tuple(word), random)) if word else drawn

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

    The merge with the highest of ``scores`` comes first, of equal ones the first in the word; ``dropout`` is the
    probability that one is skipped.
    """

    def __init__(self, processor: Any, pieces: dict[str, int], scores: dict[str, float], dropout: float) -> None:
        super().__init__(processor, pieces)
        self._scores, self._dropout = scores, dropout
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    @override
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
        places = self._known.get(parts)
        if places is None:
            if len(self._known) >= _CACHED_WORDS:
                self._known.clear()
            scored = enumerate(map(self._scores.get, map(add, parts, parts[1:])))
            ordered = sorted((-score, place) for place, score in scored if score is not None)
            places = self._known[parts] = tuple(place for _, place in ordered)
        return places


def _merged(parts: tuple[str, ...], place: int) -> tuple[str, ...]:
    return (*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :])


class UnigramSampler(SegmentationSampler[tuple[list[float], list[Word]]]):
    """Subword regularization (Kudo 2018): a segmentation of each word is drawn from its best ones.

    ``alpha`` is the exponent of their probabilities.
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
    """Return a sampler of a serialised SentencePiece model, ``alpha`` as of :class:`SampledSegmentations`.

    Raises:
        DataError: if the model is of another type than BPE and unigram.
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


_CONTINUATION = re.compile(r"@@( |$)")


class SentencePieceModel:
    """The vocabulary of one side; arguments and errors as of :class:`SentencePieceTokenizer`.

    A symbol at the beginning of a line is its token alone. Before others SentencePiece sets its mark of a space.
    """

    def __init__(self, model: bytes, segmented: bool = False, symbols: Sequence[str] = ()) -> None:
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"the SentencePiece model of the vocabulary could not be read: {error}") from error
        processor = self._processor
        self.size: int = processor.get_piece_size()
        special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD, BOS, EOS, UNK):
            raise DataError(
                f"the vocabulary's pad, begin, end and unknown tokens are {', '.join(map(str, special))} instead "
                f"of {PAD}, {BOS}, {EOS}, {UNK}; let `prepare` make the vocabulary, or give it the model by "
                "--sentencepiece"
            )
        self._words: list[str] = []
        if segmented:
            self._words = [processor.id_to_piece(number).removeprefix(SPACE) for number in range(self.size)]
            self._words[UNK] = UNKNOWN_TEXT
        self._segmented = segmented
        self._numbers = {word: number for number, word in enumerate(self._words) if number > UNK}
        numbers = {symbol: self.number(symbol) for symbol in symbols}
        if lacking := [symbol for symbol, number in numbers.items() if number is None]:
            raise DataError(f"the vocabulary lacks its symbols {', '.join(lacking)}; restore its files")
        self._symbols = {symbol: number for symbol, number in numbers.items() if number is not None}
        self._sampler: tuple[float, SegmentationSampler[Any]] | None = None
        self._begins, self._symbol_numbers = tuple(self._symbols), frozenset(self._symbols.values())

    def encode(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Encode lines. Segmented text takes one thread."""
        if self._segmented:
            number_of = self._numbers.get
            return [[number_of(word, UNK) for word in segmented_words(text)] for text in texts]
        fronts, rests = self._split(texts)
        encoded: list[list[int]] = self._processor.encode(rests, num_threads=threads)
        for place, front in fronts.items():
            encoded[place] = front + encoded[place]
        return encoded

    def sample(self, texts: Sequence[str], seeds: Sequence[int], alpha: float) -> list[list[int]]:
        """Draw a segmentation of each line by its seed, in this thread.

        Raises:
            DataError: if the model segments a text in one way only.
        """
        if self._segmented:
            raise DataError("segmented text has one segmentation, but others are to be drawn; prepare the raw text")
        if self._sampler is None or self._sampler[0] != alpha:
            self._sampler = alpha, sampler_of(self.model, self._processor, alpha)
        sample = self._sampler[1].sample
        return [sample(tokens, seed) for tokens, seed in zip(self.encode(texts), seeds, strict=True)]

    def _split(self, texts: Sequence[str]) -> tuple[dict[int, list[int]], list[str]]:
        """Return the numbers of the symbols at the beginning of lines, by line, and the rests of all lines."""
        rests, fronts = list(texts), {}
        for place, text in enumerate(texts) if self._symbols else ():
            front: list[int] = []
            rest = text.lstrip()
            while rest.startswith(self._begins):
                word, *more = rest.split(maxsplit=1)
                if word not in self._symbols:
                    break
                front.append(self._symbols[word])
                rest = more[0] if more else ""
            if front:
                fronts[place], rests[place] = front, rest
        return fronts, rests

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode tokens without special ones. Segmented text is joined to words."""
        numbers = [int(token) for token in tokens if token > EOS]
        if self._segmented:
            return joined(" ".join(self._words[number] for number in numbers))
        front = next((place for place, each in enumerate(numbers) if each not in self._symbol_numbers), len(numbers))
        rest: str = self._processor.decode(numbers[front:])
        if not front:
            return rest
        return " ".join(
            [*map(self._processor.id_to_piece, numbers[:front]), *([rest] if front < len(numbers) else [])]
        )

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return tokens as the vocabulary spells them."""
        if self._segmented:
            return [self._words[int(token)] for token in tokens]
        return [self._processor.id_to_piece(int(token)) for token in tokens]

    def all_pieces(self) -> list[str]:
        """Return the text of each token, special ones included, by number; all texts differ."""
        if self._segmented:
            special = [self._processor.id_to_piece(number) for number in range(UNK + 1)]
            return [*special, *self._words[UNK + 1 :]]
        return [self._processor.id_to_piece(number) for number in range(self.size)]

    def number(self, piece: str) -> int | None:
        """Return the number of a token; None if there is none."""
        if self._segmented:
            return self._numbers.get(piece)
        number = int(self._processor.piece_to_id(piece))
        return None if number == UNK else number


def joined(text: str) -> str:
    """Remove the ``@@ `` marks of segmented text."""
    return _CONTINUATION.sub("", text)


MODEL_FILE = "vocabulary.model"
"""The SentencePiece model of both sides."""
SIDE_MODEL_FILES: Mapping[Side, str] = {"source": "vocabulary.source.model", "target": "vocabulary.target.model"}
"""The SentencePiece models of vocabularies of one side each."""


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of one vocabulary for both sides, or of one a side, with the special tokens PAD, BOS, EOS and UNK.

    Args:
        model: A serialised SentencePiece model, of the target or of both sides.
        segmented: True if text is already segmented in the ``@@ `` style, so that tokens are its words.
        source_model: model of the source; None if both sides share one.
        symbols: texts that are single tokens of the vocabularies.

    Raises:
        DataError: if a model cannot be read, has other special tokens, or lacks a symbol.
    """

    def __init__(
        self, model: bytes, segmented: bool = False, source_model: bytes | None = None, symbols: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.segmented = segmented
        self.symbols = tuple(symbols)
        self._shared = source_model in (None, model)
        target = SentencePieceModel(model, segmented, self.symbols)
        source = target if self._shared else SentencePieceModel(source_model or model, segmented, self.symbols)
        self._sides: dict[Side, SentencePieceModel] = {"source": source, "target": target}
        ours, theirs = (Vocabulary(s.size, pad=PAD, bos=BOS, eos=EOS, unk=UNK) for s in (source, target))
        self.vocabulary = theirs if self._shared else replace(theirs, own_source=ours)

    @classmethod
    def read(cls, path: Path, info: VocabularyInfo) -> SentencePieceTokenizer:
        """Read the vocabulary of a directory; raise a DataError or an OSError if it is damaged."""
        separate = [path / name for name in SIDE_MODEL_FILES.values()]
        models = separate if any(file.exists() for file in separate) else [path / MODEL_FILE]
        source, target = read_regular(models[0]), read_regular(models[-1])
        return cls(target, info.segmented, source, info.symbols)

    def files(self) -> dict[str, bytes]:
        """Serialise the models and their settings; see :meth:`Tokenizer.files`."""
        info: dict[str, Any] = {"segmented": self.segmented, "size": self.size}
        if self.symbols:  # not written by versions without symbols, as is what follows
            info["symbols"] = self.symbols
        if self._shared:
            files = {MODEL_FILE: self.model}
        else:
            info["source_size"] = self.vocabulary.source.size
            files = {SIDE_MODEL_FILES[side]: self._sides[side].model for side in SIDES}
        return {**files, INFO_FILE: (json.dumps(info, indent=2, ensure_ascii=False) + "\n").encode()}

    @property
    @override
    def digest(self) -> str:
        hashes = [hashlib.sha256(self._sides[side].model).hexdigest() for side in SIDES]
        return hashes[0] if self._shared else hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    @override
    def encode_batch(self, texts: Sequence[str], side: Side = "source", threads: int = 1) -> list[list[int]]:
        return self._sides[side].encode(texts, threads)

    @override
    def sample_batch(
        self, texts: Sequence[str], side: Side, sampling: SampledSegmentations, number: int, first: int
    ) -> TokenLists:
        return self._sides[side].sample(texts, sampling.seeds(number, side, first, len(texts)), sampling.alpha)

    @override
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        return self._sides[side].decode(tokens)

    @override
    def all_pieces(self, side: Side = "target") -> list[str]:
        return self._sides[side].all_pieces()

    @override
    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        return None if self.segmented else (self._sides["source"].model, self.model)

    @override
    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        return self._sides[side].pieces(tokens)

    @override
    def number(self, piece: str, side: Side = "target") -> int | None:
        return self._sides[side].number(piece)

    @override
    def reference(self, text: str) -> str:
        return joined(text) if self.segmented else text
