"""The interface of tokenizers, which turn text of both sides into token numbers and back.

Implementations are :mod:`deepspeed_nmt.data.sentencepiece`, and for models of other programs
:mod:`deepspeed_nmt.data.bert_tokenizer`, :mod:`deepspeed_nmt.data.marian_tokenizer` and
:mod:`deepspeed_nmt.data.fairseq`; :func:`deepspeed_nmt.data.data_directory.open_tokenizer` opens the one that a
directory holds.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.errors import DataError, did_you_mean, shown
from deepspeed_nmt.files import atomic_write_bytes
from deepspeed_nmt.randomness import Purpose, keys
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import one_line

ALPHA = {"bpe": 0.1, "unigram": 0.2}
"""Default of :attr:`SampledSegmentations.alpha` by type of vocabulary; sentences become up to a third longer."""


@dataclass(frozen=True)
class SampledSegmentations:
    """Sampled segmentations of a text, independent of the processes that encode it.

    Each sentence has ``count``. ``alpha`` is of BPE the probability that a merge is skipped (Provilkov, Emelianenko
    and Voita 2020: BPE-Dropout); of a unigram model the exponent of the segmentations' probabilities (Kudo 2018:
    Subword Regularization). ``seed`` is that of all of them.
    """

    count: int
    alpha: float
    seed: int

    def seeds(self, number: int, side: Side, first: int, pairs: int) -> list[int]:
        """Return the seeds (64 bits) of successive sentences of one side.

        ``number`` is that of the segmentation, ``first`` that of the first pair in the clean text, both from 0.
        """
        seeds = keys(pairs, self.seed, Purpose.SEGMENTATION, number, SIDES.index(side), start=first)
        return list(map(int, seeds))


def split_name(number: int) -> str:
    """Return the name of the training split with a segmentation: ``train``, ``train.1``, ``train.2`` and so on."""
    return f"train.{number}" if number else "train"


INFO_FILE = "vocabulary.json"
"""Description of a vocabulary: SentencePiece's ``segmented``, or ``kind`` and special tokens of BERTs."""

Count = Annotated[int, Field(ge=0, lt=1 << 53, strict=True)]
"""A count in a JSON file."""


class VocabularyInfo(Config):
    """The content of :data:`INFO_FILE`.

    ``segmented`` and ``symbols`` are as of :class:`Tokenizer`. Sizes are those of the target, and of a source with a
    vocabulary of its own. Numbers of special tokens by name are ``special`` of a MarianMT model, and ``source`` and
    ``target`` of BERTs.
    """

    kind: Literal["sentencepiece", "bert", "marian", "fairseq"] = "sentencepiece"
    segmented: bool = False
    size: Count = 0
    source_size: Count = 0
    symbols: tuple[str, ...] = ()
    special: dict[str, Count] = Field(default_factory=dict)
    source: dict[str, Count] = Field(default_factory=dict)
    target: dict[str, Count] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_keys(self) -> VocabularyInfo:
        keys = {"marian": {"special"}, "bert": {"source", "target"}}.get(self.kind, {"segmented"})
        if lacking := sorted(keys - self.model_fields_set):
            raise ValueError(f"the key {shown(lacking[0])} is missing")
        return self


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
    _pieces: dict[Side, list[str]]
    """Text of each token of a side, by number."""
    _numbers: dict[Side, dict[str, int]]
    _models: tuple[bytes, bytes] | None = None

    def save(self, directory: Path) -> None:
        """Write the files of the vocabulary into a directory."""
        for name, content in self.files().items():
            atomic_write_bytes(directory / name, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Serialise the vocabulary as files by name; each name begins with ``vocabulary.``."""

    @property
    def digest(self) -> str:
        """A SHA-256 that equal vocabularies share."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    @property
    def size(self) -> int:
        """Number of tokens of the target's vocabulary."""
        return self.vocabulary.size

    def encode(self, text: str) -> list[int]:
        """Encode one line of the source, without EOS."""
        return self.encode_batch([text], "source")[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        """Encode many lines of one side, without EOS; a line without tokens gives none."""

    def sample_batch(
        self, texts: Sequence[str], side: Side, sampling: SampledSegmentations, number: int, first: int
    ) -> TokenLists:
        """Draw a segmentation of many lines of one side, without EOS, in this thread.

        ``first`` is the number of the lines' first pair in the clean text, from 0. A vocabulary that segments a text
        in one way only is an error.
        """
        raise DataError(
            "segmentations can be drawn from a SentencePiece vocabulary of raw text only; give another one"
        )

    def symbol(self, side: Side, symbol: str) -> int:
        """Return the number of one of :attr:`symbols` in the vocabulary of a side, or raise a DataError."""
        number = self.number(symbol, side) if symbol in self.symbols else None
        if number is None:
            known = did_you_mean(symbol, self.symbols) or "; it has no symbols, see prepare --symbols"
            raise DataError(f"the tag {shown(symbol)} is no symbol of the {side}'s vocabulary{known}")
        return number

    def decode(self, tokens: Iterable[int], side: Side = "target") -> str:
        """Decode tokens of one side: special ones are dropped, unknown ones become :data:`UNKNOWN_TEXT`.

        The text is one line: line breaks, such as the piece ``<0x0A>`` of byte fallback, become spaces.
        """
        return one_line(self._decoded(tokens, side))

    @abstractmethod
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        """Decode tokens as :meth:`decode`, but with any line breaks that they stand for."""

    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        """Return tokens of one side as the vocabulary spells them, each by itself."""
        return [self._pieces[side][int(token)] for token in tokens]

    def number(self, piece: str, side: Side = "target") -> int | None:
        """Return the number of a token that the vocabulary spells as ``piece``; None if there is none."""
        return self._numbers[side].get(piece)

    def all_pieces(self, side: Side = "target") -> list[str]:
        """Return the text of each token of one side, special ones included, by number; all texts differ."""
        return list(self._pieces[side])

    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        """Return True if a side's tokens are those of a BERT's tokenizer, in JSON, with special tokens by name."""
        return False

    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        """Return the SentencePiece models that encode raw text of both sides; None if there are none."""
        return self._models

    def reference(self, text: str) -> str:
        """Convert a reference line to the form of :meth:`decode`, so that the two can be compared."""
        return text
