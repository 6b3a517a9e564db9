"""Filtering of text that is in no file: batches of pairs, in order, such as translations that a model has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.duplicates import Repetitions, hashes_of
from deepspeed_nmt.data.filters import PairFilters, read_filters
from deepspeed_nmt.data.removals import Removals
from deepspeed_nmt.errors import ConfigError
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

    def keep(self, pairs: Sequence[tuple[str, str]], scores: Sequence[float] | None = None) -> npt.NDArray[np.bool_]:
        """Judge the next batch of pairs (source, target).

        Args:
            pairs: text of both sides. Shape: (pairs,)
            scores: of the pairs, for the filter ``score``. Shape: (pairs,)

        Returns:
            True for pairs to keep. Shape: (pairs,)

        Raises:
            ConfigError: if a filter reads scores, but there are none.
        """
        if scores is None and (names := self._filters.reading_scores):
            raise ConfigError(f"the filter {names[0]} needs a score of each pair; give scores")
        keep = np.zeros(len(pairs), dtype=np.bool_)
        given: Sequence[float | None] = [None] * len(pairs) if scores is None else scores
        for number, (pair, score) in enumerate(zip(pairs, given, strict=True)):
            if fault := self._filters.fault(*pair, score):
                self.removals.add(fault, *pair)
            else:
                keep[number] = True
        left = [pairs[number] for number in np.flatnonzero(keep)]
        hashes = {name: hashes_of(self._filters.keys(name, left), len(left)) for name in self._filters.remembering}
        keep[keep] = self._repetitions.remove(len(left), hashes, self.removals, left.__getitem__)
        return keep
