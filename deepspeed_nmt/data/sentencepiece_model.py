"""One SentencePiece model as the vocabulary of one side: encoding, sampled segmentations, decoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import sentencepiece

from deepspeed_nmt.data.clean import segmented_words
from deepspeed_nmt.data.tokenizer import BOS, EOS, PAD, UNK, UNKNOWN_TEXT
from deepspeed_nmt.errors import DataError

SPACE = "\u2581"
"""SentencePiece's mark for the space before a word."""
_CONTINUATION = re.compile(r"@@( |$)")
_DRAWS = 32
"""Segmentations that are drawn for a sentence at most until one keeps its symbols whole."""


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
        self._symbols = {symbol: int(processor.piece_to_id(symbol)) for symbol in symbols}
        if lacking := [symbol for symbol, number in self._symbols.items() if number == UNK]:
            raise DataError(
                f"the vocabulary must have the symbols that it names, but lacks {', '.join(lacking)}; "
                "restore its files"
            )
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
        """Draw a segmentation of each line.

        SentencePiece has a generator for each thread, which goes on from line to line, and batches in several threads
        never repeat. So the generator is seeded anew for each line, and lines are encoded one by one.

        Args:
            texts: the lines.
            seeds: a number below 2**31 for each of them; SentencePiece ignores 2**32 - 1.
            alpha: of BPE the probability that a merge is skipped; of a unigram model the exponent of probabilities.

        Raises:
            DataError: if text is already segmented.
        """
        if self._segmented:
            raise DataError("segmented text has one segmentation, but others are to be drawn; prepare the raw text")
        fronts, rests = self._split(texts)
        encode, seed_generator = self._processor.encode, sentencepiece.set_random_generator_seed
        found: list[list[int]] = []
        for text, seed in zip(rests, seeds, strict=True):
            seed_generator(seed)
            tokens = encode(text, enable_sampling=True, nbest_size=-1, alpha=alpha)
            if self._symbols and any(symbol in text for symbol in self._begins):
                tokens = self._whole(text, tokens, alpha)
            found.append(tokens)
        for place, front in fronts.items():
            found[place] = front + found[place]
        return found

    def _whole(self, text: str, tokens: list[int], alpha: float) -> list[int]:
        """Return a segmentation that has the symbols of a text whole; a unigram model draws others, though rarely."""
        plain: list[int] = self._processor.encode(text)
        wanted = [token for token in plain if token in self._symbol_numbers]
        for _ in range(_DRAWS):
            if [token for token in tokens if token in self._symbol_numbers] == wanted:
                return tokens
            tokens = self._processor.encode(text, enable_sampling=True, nbest_size=-1, alpha=alpha)
        return plain

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
