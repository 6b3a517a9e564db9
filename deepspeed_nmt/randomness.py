"""Random choices as pure functions of what they are for, never of a generator's state.

A choice keyed by (seed, update, layer, ...) is the same on every rank, for any number of ranks, after a resume and
in recomputation. The mixer is SplitMix64's finaliser, written out here so that the choices do not change with the
version of any library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


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
