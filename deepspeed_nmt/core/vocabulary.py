"""What a model and an objective need to know of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")


@dataclass(frozen=True)
class Vocabulary:
    """The size of the target's vocabulary and the numbers of its special tokens.

    Attributes:
        size: V.
        pad: fills up a batch's shorter rows; the same number on both sides.
        bos: starts what a decoder reads.
        eos: ends a sentence.
        unk: stands for what the vocabulary lacks.
        mask: stands for what is to be guessed; None where nothing ever is.
        own_source: the source's vocabulary, where it has one of its own.
    """

    size: int
    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
    mask: int | None = None
    own_source: Vocabulary | None = None

    @classmethod
    def of_bert(cls, size: int, special: Mapping[str, int]) -> Vocabulary:
        """Return the vocabulary of a BERT: a sentence begins with [CLS] and ends with [SEP].

        Args:
            size: V.
            special: numbers of the tokens pad, cls, sep, unk and mask.
        """
        return cls(size, special["pad"], special["cls"], special["sep"], special["unk"], special["mask"])

    @property
    def source(self) -> Vocabulary:
        """The source's vocabulary, which is often the same."""
        return self.own_source or self
