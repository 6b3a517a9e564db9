"""Random choices as pure functions of a key, independent of the state of any generator.

A choice with the key (seed, purpose, update, layer, ...) is the same on every rank, for any number of ranks, after a
resume and in recomputation. Numbers are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood: Fast splittable
pseudorandom number generators, 2014). It is implemented here, so that choices do not depend on the version of a
library.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB
_ROUNDS = 8  # of the network that permutes without a table


class Purpose(IntEnum):
    """Purpose of a random choice: a part of its key, so that choices for different purposes are independent."""

    SHUFFLE = 1
    GRAINS = 2
    DROPOUT = 3
    CROSS_ATTENTION_DROP = 4
    MASK_RATIO = 5
    MASKED_TOKENS = 6
    COLLAPSE_SLICE = 7
    EXITS = 8
    TENSOR_RANK = 9
    MASK_COUNT = 10
    MASKED_TARGETS = 11
    TARGET_REPLACEMENT = 12
    SOURCE_SPAN = 13
    SOURCE_REPLACEMENT = 14
    SAMPLING = 15
    SEGMENTATION = 16


def _mix(value: int) -> int:
    """Apply the finaliser of SplitMix64 to a 64-bit number."""
    value = (value ^ (value >> 30)) * _MUL_1 & _MASK
    value = (value ^ (value >> 27)) * _MUL_2 & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Hash a sequence of numbers to an unsigned 64-bit number; the order of ``parts`` matters."""
    state = 0
    for part in parts:
        state = _mix((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state


def uniform(*parts: int) -> float:
    """Hash a sequence of numbers to a number that is uniform in [0, 1)."""
    return (key(*parts) >> 11) * 2.0**-53


def keys(count: int, *parts: int, start: int = 0) -> NDArray[np.uint64]:
    """Return ``key(*parts, i)`` for i in start..start+count-1. Shape: -> (count,)."""
    return _mixed(np.arange(start, start + count, dtype=np.uint64), *parts)


def _mixed(values: NDArray[np.uint64], *parts: int) -> NDArray[np.uint64]:
    """Return ``key(*parts, value)`` for each value."""
    mixed = values + np.uint64((key(*parts) + _GOLDEN) & _MASK)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(_MUL_1)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(_MUL_2)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def permutation(count: int, *parts: int) -> NDArray[np.int64]:
    """Return a random permutation of 0..count-1, as a function of ``parts``. Shape: -> (count,)."""
    return np.argsort(keys(count, *parts), kind="stable")


def permuted(positions: NDArray[np.int64], count: int, *parts: int) -> NDArray[np.int64]:
    """Return what a random permutation of 0..count-1, a function of ``parts``, has at some positions.

    Unlike :func:`permutation` it makes no table, so that a few positions of a long permutation cost little. It is a
    Feistel network over a rectangle of at least ``count`` cells (Black and Rogaway: Ciphers with arbitrary finite
    domains, 2002). A cell outside of 0..count-1 is permuted again until it is inside.

    Shape: (N,) -> (N,)
    """
    width = isqrt(max(0, count - 1)) + 1
    height = np.uint64(-(-count // width))

    def rounds(cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        column, row = cells // height, cells % height
        for number in range(0, _ROUNDS, 2):
            column = (column + _mixed(row, *parts, number) % np.uint64(width)) % np.uint64(width)
            row = (row + _mixed(column, *parts, number + 1) % height) % height
        moved: NDArray[np.uint64] = column * height + row
        return moved

    cells = rounds(positions.astype(np.uint64))
    while len(outside := np.flatnonzero(cells >= count)):
        cells[outside] = rounds(cells[outside])
    return cells.astype(np.int64)


def uniforms(numbers_B: Tensor, count: int, *parts: int) -> Tensor:
    """Return ``uniform(*parts, number, i)`` for each number and i in 0..count-1, on the device of the numbers.

    Shape: int64 (B,) -> fp64 (B, count)
    """
    import torch  # takes seconds, and the order of sentences needs none

    base_B = _mix_tensor(numbers_B + _signed((key(*parts) + _GOLDEN) & _MASK))
    return uniform_after(base_B.unsqueeze(1), torch.arange(count, device=numbers_B.device))


def key_tensor(values: Iterable[int], device: torch.device | str | None = None) -> Tensor:
    """Return keys as a tensor, for :func:`uniform_after`. Shape: -> int64 (N,)."""
    import torch

    return torch.tensor([_signed(value) for value in values], dtype=torch.long, device=device)


def uniform_after(keys: Tensor, part: int | Tensor) -> Tensor:
    """Return ``uniform(*parts, part)`` for each ``key(*parts)``, on the device of the keys. Shape: int64 -> fp64."""
    return _shifted(_mix_tensor(keys + _signed(_GOLDEN) + part), 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """Reinterpret an unsigned 64-bit number as a signed one, as torch's int64 stores it."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift to the right logically; torch shifts int64 arithmetically."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(values: Tensor) -> Tensor:
    """Apply :func:`_mix` to each element of an int64 tensor."""
    values = (values ^ _shifted(values, 30)) * _signed(_MUL_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MUL_2)
    return values ^ _shifted(values, 31)
