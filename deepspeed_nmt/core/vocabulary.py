"""The part of a vocabulary that models, objectives and searches need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")
MAX_VOCABULARY = 10_000_000
"""Bound on the tokens of a vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """Size and special tokens of the target's vocabulary.

    Attributes:
        size: number of tokens, V.
        pad: padding token, which has the same number on both sides.
        bos: first token that a decoder reads; that of fairseq's models is EOS.
        eos: end-of-sentence token.
        unk: token that replaces text missing from the vocabulary.
        mask: token that replaces tokens to be guessed; None if the vocabulary has none.
        own_source: the source's vocabulary; None if both sides share one.
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
        """Return the vocabulary of a BERT, whose sentences begin with [CLS] and end with [SEP]."""
        pad, bos, eos, unk, mask = (special[name] for name in ("pad", "cls", "sep", "unk", "mask"))
        return cls(size, pad, bos, eos, unk, mask)

    @property
    def unpredicted(self) -> tuple[int, ...]:
        """Special tokens that a search never predicts: padding, BOS unless it is EOS, and the mask."""
        special = dict.fromkeys((self.pad, self.bos, self.mask))
        return tuple(token for token in special if token not in (None, self.eos))

    @property
    def source(self) -> Vocabulary:
        """The source's vocabulary, which is the same object if both sides share one."""
        return self.own_source or self
