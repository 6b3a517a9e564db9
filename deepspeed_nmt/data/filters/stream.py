"""Filtering of text that is no file: batches of pairs, in order, such as translations that a model has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.duplicates import Repetitions, hashes_of
from deepspeed_nmt.data.filters import PairFilters, read_filters
from deepspeed_nmt.data.removals import Removals
from deepspeed_nmt.text import TextForm


class PairStream:
    """Filters that are applied to batches of pairs.

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
        self._repetitions = Repetitions(self._filters.remembering)
        self.removals = Removals()

    def keep(self, pairs: Sequence[tuple[str, str]]) -> npt.NDArray[np.bool_]:
        """Judge the next batch of pairs (source, target).

        Returns:
            True for pairs to keep. Shape: (pairs,)
        """
        keep = np.zeros(len(pairs), dtype=np.bool_)
        for number, pair in enumerate(pairs):
            if fault := self._filters.fault(*pair):
                self.removals.add(fault, *pair)
            else:
                keep[number] = True
        left = [pairs[number] for number in np.flatnonzero(keep)]
        hashes = {name: hashes_of(self._filters.keys(name, left), len(left)) for name in self._filters.remembering}
        keep[keep] = self._repetitions.remove(len(left), hashes, self.removals, left.__getitem__)
        return keep
