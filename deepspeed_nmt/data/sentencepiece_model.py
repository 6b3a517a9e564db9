"""One SentencePiece model as the vocabulary of one side: encoding, sampled segmentations, decoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import sentencepiece

from deepspeed_nmt.data.clean import segmented_words
from deepspeed_nmt.data.subword_regularization import SegmentationSampler, sampler_of
from deepspeed_nmt.data.tokenizer import BOS, EOS, PAD, SPACE, UNK, UNKNOWN_TEXT
from deepspeed_nmt.errors import DataError

_CONTINUATION = re.compile(r"@@( |$)")


class SentencePieceModel:
    """The vocabulary of one side, with the special tokens PAD, BOS, EOS and UNK.

    A symbol at the beginning of a line is its token alone. Before others SentencePiece sets its mark of a space.

    Args:
        model: A serialised SentencePiece model.
        segmented: True if text is already segmented in the ``@@ `` style, so that tokens are its words.
        symbols: texts that are single tokens, which the model must have.

    Raises:
        DataError: if the model cannot be read, has other special tokens, or lacks a symbol.
    """

    def __init__(self, model: bytes, segmented: bool = False, symbols: Sequence[str] = ()) -> None:
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"the vocabulary must be a SentencePiece model, but could not be read: {error}"
            ) from error
        processor = self._processor
        self.size: int = processor.get_piece_size()
        special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD, BOS, EOS, UNK):
            raise DataError(
                f"the vocabulary's pad, begin, end and unknown tokens must be {PAD}, {BOS}, {EOS}, {UNK}, but are "
                f"{', '.join(map(str, special))}; let `prepare` make the vocabulary, or give it the model by "
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
            raise DataError(
                f"the vocabulary must have the symbols that it names, but lacks {', '.join(lacking)}; "
                "restore its files"
            )
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
        """Draw a segmentation of each line, in this thread; see :mod:`deepspeed_nmt.data.subword_regularization`.

        Args:
            texts: the lines.
            seeds: a number for each of them.
            alpha: of BPE the probability that a merge is skipped; of a unigram model the exponent of probabilities.

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
