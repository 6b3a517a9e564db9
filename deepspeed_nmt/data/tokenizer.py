"""The interface of tokenizers, which turn text of both sides into token numbers and back.

Implementations are :mod:`deepspeed_nmt.data.sentencepiece` and :mod:`deepspeed_nmt.data.bert_tokenizer`;
:func:`deepspeed_nmt.data.directory.open_tokenizer` opens the one that a directory holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.data.segmentation import SampledSegmentations
from deepspeed_nmt.errors import DataError, did_you_mean, shown
from deepspeed_nmt.files import atomic_write_bytes
from deepspeed_nmt.text import one_line

INFO_FILE = "vocabulary.json"
"""Description of a vocabulary: SentencePiece's ``segmented``, or ``kind`` and special tokens of BERTs."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Special tokens of vocabularies that `prepare` trains; the defaults of :class:`Vocabulary`."""
TokenLists = list[list[int]]
"""Tokens of each of several lines."""
SPACE = "\u2581"
"""SentencePiece's mark for the space before a word."""
UNKNOWN_TEXT = "⁇"
"""Text of an unknown token, visible to readers and an error in every metric."""


class Tokenizer(ABC):
    """Vocabularies of both sides, and the conversion between text and their tokens.

    Attributes:
        vocabulary: sizes and special tokens.
        segmented: True if text is already segmented in the ``@@ `` style, so that tokens are its words.
        symbols: user-supplied texts that are single tokens, such as tags of languages.
    """

    vocabulary: Vocabulary
    segmented: bool = False
    symbols: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        """Write the files of the vocabulary into a directory."""
        for name, content in self.files().items():
            atomic_write_bytes(directory / name, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Serialise the vocabulary as files by name; each name begins with ``vocabulary.``."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A SHA-256 that equal vocabularies share."""

    @property
    def size(self) -> int:
        """Number of tokens of the target's vocabulary."""
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        """Encode one line of the source, without EOS."""
        return self.encode_batch([text], "source")[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], side: Side, threads: int = 1) -> list[list[int]]:
        """Encode many lines of one side, without EOS.

        Returns:
            Tokens of each line; none for a line without tokens.
        """

    def sample_batch(
        self, texts: Sequence[str], side: Side, sampling: SampledSegmentations, number: int, first: int
    ) -> TokenLists:
        """Draw a segmentation of many lines of one side, without EOS, in this thread.

        Args:
            texts: lines of the side, of successive pairs.
            side: of the lines.
            sampling: of the text.
            number: of the segmentation.
            first: number of the first pair in the clean text, from 0.

        Raises:
            DataError: if the vocabulary segments a text in one way only.
        """
        raise DataError(
            "segmentations can be drawn from a SentencePiece vocabulary of raw text only; give another one"
        )

    def symbol(self, side: Side, symbol: str) -> int:
        """Return the number of one of :attr:`symbols` in the vocabulary of a side.

        Raises:
            DataError: if the vocabulary has no such symbol; it names those that it has.
        """
        number = self.number(symbol, side) if symbol in self.symbols else None
        if number is None:
            known = (
                did_you_mean(symbol, self.symbols) if self.symbols else "; it has no symbols, see prepare --symbols"
            )
            raise DataError(
                f"a tag must be a symbol of the {side}'s vocabulary, but {shown(symbol)} is not one{known}"
            )
        return number

    def decode(self, tokens: Iterable[int], side: Side = "target") -> str:
        """Decode tokens of one side: special ones are dropped, unknown ones become :data:`UNKNOWN_TEXT`.

        The text is one line: line breaks, such as the piece ``<0x0A>`` of byte fallback, become spaces.
        """
        return one_line(self._decoded(tokens, side))

    @abstractmethod
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        """Decode tokens as :meth:`decode`, but with any line breaks that they stand for."""

    @abstractmethod
    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        """Return tokens of one side as the vocabulary spells them, each by itself."""

    @abstractmethod
    def number(self, piece: str, side: Side = "target") -> int | None:
        """Return the number of a token that the vocabulary spells as ``piece``; None if there is none."""

    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        """Return True if a side's tokens are those of a BERT's tokenizer.

        Args:
            tokenizer_json: the BERT's tokenizer, serialised.
            special: numbers of its special tokens by name.
            side: the side to compare.
        """
        return False

    @abstractmethod
    def all_pieces(self, side: Side) -> list[str]:
        """Return the text of each token of one side, special ones included, by number; all texts differ."""

    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        """Return the SentencePiece models that encode raw text of both sides; None if there are none."""
        return None

    @abstractmethod
    def reference(self, text: str) -> str:
        """Convert a reference line to the form of :meth:`decode`, so that the two can be compared."""
