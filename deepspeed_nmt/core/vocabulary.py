"""What a model and an objective need to know of a vocabulary."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """The size of a vocabulary and the numbers of its special tokens.

    Attributes:
        size: V.
        pad: fills up a batch's shorter rows.
        bos: starts what a decoder reads.
        eos: ends a sentence on both sides.
        unk: stands for what the vocabulary lacks.
    """

    size: int
    pad: int = 0
    bos: int = 1
    eos: int = 2
    unk: int = 3
