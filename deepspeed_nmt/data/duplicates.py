"""Duplicates among tens of millions of texts, in 8 bytes each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.removals import Removals

TextOf = Callable[[int], tuple[str | bytes, str | bytes]]
"""Source and target of a pair, by its number."""


def hashes_of(texts: Iterable[str], count: int) -> npt.NDArray[np.uint64]:
    """Hash ``count`` texts to 64 bits each.

    Among 20 million texts, any two collide with a probability of 1 in 100,000.
    """
    return np.fromiter(map(_hash_of, texts), np.uint64, count)


def _hash_of(text: str) -> int:
    encoded = text.encode("utf-8", errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


class Repetitions:
    """Pairs that repeat an earlier one, found by the hashes of one or more keys of each pair.

    Args:
        reasons: names of the keys, which are the reasons to remove a pair, in order.
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self._seen = {reason: SeenHashes() for reason in reasons}

    def remove(
        self, count: int, hashes: Mapping[str, npt.NDArray[np.uint64]], removals: Removals, text_of: TextOf
    ) -> npt.NDArray[np.bool_]:
        """Find pairs that repeat none of an earlier call, or earlier in this one, and count the others as removed.

        A pair that is removed for one reason is not remembered for the next ones.

        Args:
            count: number of pairs, N.
            hashes: of the pairs' keys, by reason. Shape of each: (N,)
            removals: to which repetitions are added.
            text_of: is called for the examples only.

        Returns:
            True for pairs to keep. Shape: (N,)
        """
        keep = np.ones(count, dtype=np.bool_)
        for reason, seen in self._seen.items():
            new = np.zeros_like(keep)
            new[keep] = seen.add(hashes[reason][keep])
            for number in np.flatnonzero(keep & ~new).tolist():
                removals.add(reason, *(text_of(number) if removals.lacks_examples(reason) else ()))
            keep = new
        return keep


class SeenHashes:
    """A set of 64-bit numbers in 8 bytes each; a Python set takes about 80.

    It consists of sorted runs, each more than twice as long as the next. Adding merges runs of similar size, so every
    number is moved only a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.uint64]] = []

    def add(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Add all numbers.

        Returns:
            True for numbers that are neither in the set nor earlier in ``hashes``. Shape: (N,) -> (N,)
        """
        unique, first = np.unique(hashes, return_index=True)
        fresh = np.ones(len(unique), dtype=np.bool_)
        for run in self._runs:
            position = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            fresh &= run[position] != unique
        new = np.zeros(len(hashes), dtype=np.bool_)
        new[first[fresh]] = True
        added = unique[fresh]
        if len(added):
            while self._runs and len(self._runs[-1]) <= 2 * len(added):
                added = np.sort(np.concatenate((self._runs.pop(), added)), kind="stable")
            self._runs.append(added)
        return new
