"""Random choices as pure functions of what they are for, never of a generator's state.

A choice keyed by (seed, update, layer, ...) is the same on every rank, for any number of ranks, after a resume and
in recomputation. The mixer is SplitMix64's finaliser, written out here so that the choices do not change with the
version of any library.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a choice is for: the second part of its key, so that no two kinds of choice are related."""

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


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * _MUL_1 & _MASK
    value = (value ^ (value >> 27)) * _MUL_2 & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """A 64-bit number that stands for the sequence ``parts``; (1, 2) and (2, 1) give different ones."""
    state = 0
    for part in parts:
        state = _mix((state + _GOLDEN + (part & _MASK)) & _MASK)
    return state


def uniform(*parts: int) -> float:
    """A number in [0, 1) that stands for the sequence ``parts``."""
    return (key(*parts) >> 11) * 2.0**-53


def keys(count: int, *parts: int) -> NDArray[np.uint64]:
    """``key(*parts, i)`` for i in 0..count-1, as an array of shape (count,)."""
    base = np.uint64((key(*parts) + _GOLDEN) & _MASK)
    values = np.arange(count, dtype=np.uint64) + base
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MUL_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MUL_2)
    return values ^ (values >> np.uint64(31))


def permutation(count: int, *parts: int) -> NDArray[np.int64]:
    """A permutation of 0..count-1 that stands for ``parts``."""
    return np.argsort(keys(count, *parts), kind="stable")


def uniforms(numbers_B: Tensor, count: int, *parts: int) -> Tensor:
    """``uniform(*parts, number, i)`` for each number and i in 0..count-1, on the numbers' device.

    Shape: int64 (B,) -> fp64 (B, count)
    """
    golden = _signed(_GOLDEN)
    base_B = _mix_tensor(numbers_B + _signed((key(*parts) + _GOLDEN) & _MASK))
    positions = torch.arange(count, device=numbers_B.device)
    keys_BN = _mix_tensor(base_B.unsqueeze(1) + golden + positions)
    return _shifted(keys_BN, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's int64 has only the arithmetic one."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * _signed(_MUL_1)
    values = (values ^ _shifted(values, 27)) * _signed(_MUL_2)
    return values ^ _shifted(values, 31)
