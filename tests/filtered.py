"""Filters of pairs in memory, by which tests see what `prepare` removes from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.filters import PairFilters, Removals, read_filters
from deepspeed_nmt.text import TextForm


class PairStream:
    """Filters of text that is in no file: batches of pairs, in order, such as translations that a model has made.

    Args:
        filters: names as of ``prepare --filters``, or settings by name.
        text: form and languages of the text.

    Attributes:
        removals: counts and examples of the pairs removed so far, by filter.

    Raises:
        ConfigError: if a name or a value is wrong, or a filter lacks a language or a package.
    """

    def __init__(self, filters: str | Mapping[str, Any], text: TextForm) -> None:
        self._filters = PairFilters(read_filters(filters), text)
        remembering = (name for name, entry in self._filters.filters.items() if entry.remembers)
        self._seen: dict[str, set[int]] = {name: set() for name in remembering}
        self.removals = Removals()

    def keep(self, pairs: Sequence[tuple[str, str]], scores: Sequence[float] | None = None) -> npt.NDArray[np.bool_]:
        """Return True for pairs (source, target) of the next batch to keep. Shape: (pairs,) -> (pairs,).

        Raises:
            ConfigError: if a filter reads scores, but there are none.
        """
        keep = np.ones(len(pairs), dtype=np.bool_)
        scored = zip(pairs, repeat(None) if scores is None else scores, strict=scores is not None)
        for number, (pair, score) in enumerate(scored):
            if fault := self._filters.fault(*pair, score):
                self.removals.add(fault, *pair)
                keep[number] = False
        for name, seen in self._seen.items():
            numbers = np.flatnonzero(keep).tolist()
            hashes = self._filters.hashes(name, [pairs[number] for number in numbers])
            for number, key in zip(numbers, hashes.tolist(), strict=True):
                if key in seen:
                    self.removals.add(name, *pairs[number])
                    keep[number] = False
                seen.add(key)
        return keep
