"""SentencePiece vocabularies: one for both sides, or one a side.

A vocabulary is of raw text (BPE, or a unigram model), or of the words of text that is already segmented in the
``@@ `` style of subword-nmt, whose tokens are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, takewhile
from operator import add
from pathlib import Path
from random import Random
from typing import Any

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
from deepspeed_nmt.text import join_segments, normalise_whitespace, segmented_words

_CACHED_WORDS, _CACHED_CHARACTERS = 1 << 18, 32
"""Words that are remembered, and their most characters, so that memory is bounded. Without spaces a line is a word,
which does not come again."""
_MOST_CHARACTERS = 200
"""Characters of the longest word that is sampled: the time grows with their square."""
_BEST = 64
"""Segmentations of a word that a unigram model chooses from."""

Word = tuple[int, ...]
"""A word as the vocabulary segments it."""


class SegmentationSampler(ABC):
    """A sampler of segmentations, by SentencePiece's processor and the numbers of ordinary tokens' texts."""

    def __init__(self, processor: Any, pieces: dict[str, int]) -> None:
        self._processor = processor
        self._numbers = pieces
        self._texts = {number: text for text, number in pieces.items()}
        self._begins = frozenset(number for text, number in pieces.items() if text.startswith(SPACE))

    def sample(self, tokens: Sequence[int], seed: int) -> list[int]:
        """Draw a segmentation of a sentence from the one that the vocabulary gives; equal seeds give equal ones."""
        random = Random(seed)  # its numbers are the same on every machine and in every version
        drawn: list[int] = []
        word: list[int] = []
        texts, begins = self._texts, self._begins
        for token in tokens:
            if token not in texts or token in begins:
                if word:
                    drawn += self._sampled(word, random)
                    word = []
                if token not in texts:
                    drawn.append(token)
                    continue
            word.append(token)
        return [*drawn, *self._sampled(word, random)] if word else drawn

    def _sampled(self, word: list[int], random: Random) -> Sequence[int]:
        is_long = sum(len(self._texts[token]) for token in word) > _MOST_CHARACTERS
        return word if is_long else self._draw(tuple(word), random)

    @abstractmethod
    def _draw(self, word: Word, random: Random) -> Sequence[int]:
        """Draw a segmentation of a word."""


class BpeSampler(SegmentationSampler):
    """BPE-Dropout (Provilkov, Emelianenko and Voita 2020): at each step every possible merge is skipped at random.

    The merge with the highest of ``scores`` comes first, of equal ones the first in the word; ``dropout`` is the
    probability that one is skipped.
    """

    def __init__(self, processor: Any, pieces: dict[str, int], scores: dict[str, float], dropout: float) -> None:
        super().__init__(processor, pieces)
        self._scores, self._dropout = scores, dropout
        self._possible = lru_cache(_CACHED_WORDS)(self._find_possible)
        self._merges = lru_cache(_CACHED_WORDS)(self._find_merges)

    def _find_merges(self, word: Word) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Return the places of all merges, and the probabilities that the first k are made, in ascending order."""
        parts, places = tuple(self._text(word)), []
        find = self._possible if len(parts) <= _CACHED_CHARACTERS else self._find_possible
        while possible := find(parts):
            places.append(possible[0])
            parts = _merged(parts, possible[0])
        kept = tuple(accumulate([1.0 - self._dropout] * len(places), lambda product, factor: product * factor))
        return kept[::-1], tuple(places)

    def _draw(self, word: Word, random: Random) -> Sequence[int]:
        parts = tuple(self._text(word))
        is_short = len(parts) <= _CACHED_CHARACTERS
        find = self._possible if is_short else self._find_possible
        kept, places = (self._merges if is_short else self._find_merges)(word)
        number = random.random()  # decides how many merges come before the first that is skipped
        if not kept or number < kept[0]:
            return word
        for place in places[: len(kept) - bisect_right(kept, number)]:
            parts = _merged(parts, place)
        possible = find(parts)[1:]
        while True:
            chosen = next((place for place in possible if random.random() >= self._dropout), None)
            if chosen is None:
                break
            parts = _merged(parts, chosen)
            possible = find(parts)
        numbers = [self._numbers.get(part, -1) for part in parts]
        return word if -1 in numbers else numbers

    def _text(self, word: Word) -> str:
        return "".join(map(self._texts.__getitem__, word))

    def _find_possible(self, parts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the places of the possible merges of a word, that of the first one first."""
        scored = enumerate(map(self._scores.get, map(add, parts, parts[1:])))
        ordered = sorted((-score, place) for place, score in scored if score is not None)
        return tuple(place for _, place in ordered)


def _merged(parts: tuple[str, ...], place: int) -> tuple[str, ...]:
    return (*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :])


class UnigramSampler(SegmentationSampler):
    """Subword regularization (Kudo 2018): a segmentation of each word is drawn from its best ones.

    ``alpha`` is the exponent of their probabilities.
    """

    def __init__(self, processor: Any, pieces: dict[str, int], alpha: float) -> None:
        super().__init__(processor, pieces)
        self._alpha = alpha
        self._best = lru_cache(_CACHED_WORDS)(self._find_best)

    def _find_best(self, word: Word) -> tuple[list[float], list[Word]]:
        """Return the best segmentations of a word with the sums of their weights."""
        if word[0] not in self._begins:  # SentencePiece would begin it with a space
            return [1.0], [word]
        text = "".join(map(self._texts.__getitem__, word)).replace(SPACE, " ").strip()
        best = self._processor.nbest_encode(text, nbest_size=_BEST, return_type="proto").nbests if text else []
        lists = [tuple(piece.id for piece in pieces.pieces) for pieces in best]
        if word not in lists:
            return [1.0], [word]
        weights = [math.exp(self._alpha * (pieces.score - best[0].score)) for pieces in best]
        return list(accumulate(weights)), lists

    def _draw(self, word: Word, random: Random) -> Sequence[int]:
        is_short = len(word) <= _CACHED_CHARACTERS
        sums, lists = (self._best if is_short else self._find_best)(word)
        if len(lists) == 1:
            return word
        return lists[min(bisect_right(sums, random.random() * sums[-1]), len(lists) - 1)]


def parsed(model: bytes) -> Any:
    """Return a serialised SentencePiece model as its message of protobuf, which nothing else needs."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    return ModelProto.FromString(model)


def type_of(model: bytes) -> str:
    """Return the type of a serialised SentencePiece model: unigram, bpe, word or char."""
    spec = parsed(model).trainer_spec
    name: str = spec.ModelType.Name(spec.model_type).lower()
    return name


def sampler_of(model: bytes, processor: Any, alpha: float) -> SegmentationSampler:
    """Return a sampler of a serialised SentencePiece model, ``alpha`` as of :class:`SampledSegmentations`."""
    content = parsed(model)
    spec, normal = content.trainer_spec, content.SentencePiece.NORMAL
    pieces = {piece.piece: number for number, piece in enumerate(content.pieces) if piece.type == normal}
    if spec.model_type == spec.BPE:
        scores = {piece.piece: piece.score for piece in content.pieces if piece.type == normal}
        return BpeSampler(processor, pieces, scores, alpha)
    if spec.model_type == spec.UNIGRAM:
        if spec.treat_whitespace_as_suffix or not content.normalizer_spec.add_dummy_prefix:
            raise DataError(
                "--segmentations above 1 need a unigram model that sets its mark of a space before each word (by its "
                "settings add_dummy_prefix and treat_whitespace_as_suffix); leave them out"
            )
        return UnigramSampler(processor, pieces, alpha)
    raise DataError(
        f"--segmentations above 1 need a vocabulary of type bpe or unigram, but its type is {type_of(model)}; leave "
        "them out"
    )


def open_model(model: bytes, name: str) -> Any:
    """Open a serialised SentencePiece model; one that cannot be read is a DataError."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{name} could not be read: {error}") from error


class SentencePieceModel:
    """The vocabulary of one side; arguments and errors as of :class:`SentencePieceTokenizer`.

    A symbol at the beginning of a line is its token alone. Before others SentencePiece sets its mark of a space.
    """

    def __init__(self, model: bytes, segmented: bool = False, symbols: Sequence[str] = ()) -> None:
        self.model = model
        self._processor = processor = open_model(model, "the SentencePiece model of the vocabulary")
        self.size: int = processor.get_piece_size()
        special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD, BOS, EOS, UNK):
            raise DataError(
                f"the vocabulary's pad, begin, end and unknown tokens are {', '.join(map(str, special))} instead "
                f"of {PAD}, {BOS}, {EOS}, {UNK}; let `prepare` make the vocabulary, or give it the model by "
                "--sentencepiece"
            )
        self._segmented = segmented
        self.all_pieces: list[str] = processor.id_to_piece(list(range(self.size)))
        if segmented:
            self.all_pieces = [piece.removeprefix(SPACE) for piece in self.all_pieces]
        special_numbers = (UNK,) if not segmented else (PAD, BOS, EOS, UNK)
        self.numbers = {piece: n for n, piece in enumerate(self.all_pieces) if n not in special_numbers}
        if lacking := [symbol for symbol in symbols if symbol not in self.numbers]:
            raise DataError(f"the vocabulary lacks its symbols {', '.join(lacking)}; restore its files")
        self._symbols = {symbol: self.numbers[symbol] for symbol in symbols}
        self._sampler: tuple[float, SegmentationSampler] | None = None
        self._begins, self._symbol_numbers = tuple(self._symbols), frozenset(self._symbols.values())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode lines, raw ones with single spaces between words."""
        if self._segmented:
            number_of = self.numbers.get
            return [[number_of(word, UNK) for word in segmented_words(text)] for text in texts]
        # Some models keep white space that training text does not have.
        fronts, rests = self._split([normalise_whitespace(text) for text in texts])
        # Line by line: for a list the library starts threads, which takes longer than a sentence.
        encoded: list[list[int]] = [self._processor.encode(rest) for rest in rests]
        for place, front in fronts.items():
            encoded[place] = front + encoded[place]
        return encoded

    def sample(self, texts: Sequence[str], seeds: Sequence[int], alpha: float) -> list[list[int]]:
        """Draw a segmentation of each line by its seed, in this thread."""
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
            rest = text
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
            return join_segments(" ".join(self.pieces(numbers)))
        symbols = list(takewhile(self._symbol_numbers.__contains__, numbers))
        rest = numbers[len(symbols) :]
        return " ".join([*self.pieces(symbols), *([self._processor.decode(rest)] if rest else [])])

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return tokens as the vocabulary spells them, unknown words of segmented text as UNKNOWN_TEXT."""
        unknown = UNKNOWN_TEXT if self._segmented else self.all_pieces[UNK]
        return [unknown if int(token) == UNK else self.all_pieces[int(token)] for token in tokens]


MODEL_FILE = "vocabulary.model"
"""The SentencePiece model of both sides."""
SIDE_MODEL_FILES: Mapping[Side, str] = {"source": "vocabulary.source.model", "target": "vocabulary.target.model"}
"""The SentencePiece models of vocabularies of one side each."""


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of one vocabulary for both sides, or of one a side, with the special tokens PAD, BOS, EOS and UNK.

    Models are serialised; without a ``source_model`` both sides share one. A model that cannot be read, has other
    special tokens, or lacks one of the symbols, is a DataError.
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
        self._pieces = {side: model.all_pieces for side, model in self._sides.items()}
        self._numbers = {side: model.numbers for side, model in self._sides.items()}
        self._models = None if segmented else (source.model, model)

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
    def encode_batch(self, texts: Sequence[str], side: Side = "source") -> list[list[int]]:
        return self._sides[side].encode(texts)

    @override
    def sample_batch(
        self, texts: Sequence[str], side: Side, sampling: SampledSegmentations, number: int, first: int
    ) -> TokenLists:
        return self._sides[side].sample(texts, sampling.seeds(number, side, first, len(texts)), sampling.alpha)

    @override
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        return self._sides[side].decode(tokens)

    @override
    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        return self._sides[side].pieces(tokens)

    @override
    def reference(self, text: str) -> str:
        return join_segments(text) if self.segmented else text
