"""The log of a run as columns: one series for each tag, thinned for a picture."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_nmt.evaluate.curves import HOURS, METRICS_FILE, TOKENS
from deepspeed_nmt.files import parse_json

MAX_POINTS = 2000
"""Bound on the points of a curve: more than a wide screen has columns."""
_LARGEST_UPDATE = 1 << 53
"""Bound on the number of an update, which JavaScript counts exactly."""


@dataclass(frozen=True)
class Series:
    """Values under one tag, in order of updates.

    Attributes:
        updates: number of the update of each value.
        values: the values; NaN and infinities are among them.
    """

    updates: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        """Last value; None of an empty series, and if it is not finite."""
        return self.values[-1] if self.values and math.isfinite(self.values[-1]) else None

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self.values if math.isfinite(value)]

    def best(self, *, higher_is_better: bool) -> tuple[int, float] | None:
        """Return the update and the value of the first best value; None if none is finite."""
        found = [pair for pair in zip(self.updates, self.values, strict=True) if math.isfinite(pair[1])]
        if not found:
            return None
        return max(found, key=lambda pair: pair[1]) if higher_is_better else min(found, key=lambda pair: pair[1])

    def thinned(self, most: int = MAX_POINTS) -> Series:
        """Return at most about ``most`` points: the extremes of equal parts of the series, and its first and last.

        A part with a value that is not finite keeps one of them, so that the gap stays visible.
        """
        count = len(self)
        if count <= most:
            return self
        parts = max(1, most // 3)
        kept = {0, count - 1}
        for part in range(parts):
            inside = range(part * count // parts, (part + 1) * count // parts)
            finite = [index for index in inside if math.isfinite(self.values[index])]
            if finite:
                kept |= {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
            if len(finite) < len(inside):
                kept.add(next(index for index in inside if not math.isfinite(self.values[index])))
        chosen = sorted(kept)
        return Series([self.updates[index] for index in chosen], [self.values[index] for index in chosen])


EMPTY = Series([], [])


class RunLog:
    """The log of a run.

    Args:
        entries: values by tag for each update.
        damaged: number of lines that could not be read.
    """

    def __init__(self, entries: Mapping[int, Mapping[str, float]], damaged: int = 0) -> None:
        self.damaged = damaged
        self._series: dict[str, Series] = {}
        for update in sorted(entries):
            for tag, value in entries[update].items():
                series = self._series.setdefault(tag, Series([], []))
                series.updates.append(update)
                series.values.append(value)

    @classmethod
    def read(cls, run: Path) -> RunLog:
        """Read the log of a run directory; an empty one if there is none. Lines that are damaged are counted."""
        entries: dict[int, dict[str, float]] = {}
        damaged = 0
        try:
            with (run / METRICS_FILE).open("rb") as stream:
                for line in stream:
                    found = _entry(line)
                    if found is None:
                        damaged += bool(line.strip())
                    else:
                        entries.setdefault(found[0], {}).update(found[1])
        except OSError:
            pass
        return cls(entries, damaged)

    @property
    def tags(self) -> list[str]:
        """All tags, in order of their first values."""
        return list(self._series)

    @property
    def update(self) -> int:
        """Number of the last update that was logged; 0 of an empty log."""
        return max((series.updates[-1] for series in self._series.values()), default=0)

    def series(self, tag: str) -> Series:
        """Return the values under a tag; an empty series if there are none."""
        return self._series.get(tag, EMPTY)

    def last(self, tag: str) -> float | None:
        """Return the last value under a tag; None if there is none, or it is not finite."""
        return self.series(tag).last

    def positions(self) -> dict[str, list[float]]:
        """Return hours and target tokens at some updates, for axes other than updates; no key for what is not logged.

        Between these updates both grow evenly enough to interpolate.
        """
        found: dict[str, list[float]] = {}
        for name, tag in (("hours", HOURS), ("tokens", TOKENS)):
            series = self.series(tag)
            pairs = [(u, v) for u, v in zip(series.updates, series.values, strict=True) if math.isfinite(v) and u > 0]
            if len(pairs) > 1:
                step = max(1, len(pairs) // 500)
                pairs = [*pairs[:-1:step], pairs[-1]]
                found[f"{name}_at"] = [0, *(float(update) for update, _ in pairs)]
                found[name] = [0.0, *(value for _, value in pairs)]
        return found


@dataclass(frozen=True)
class Grid:
    """Values of numbered rows over updates, for a heat map.

    Attributes:
        updates: number of the update of each column.
        rows: name of each row.
        values: a list for each row; None where nothing finite was logged.
    """

    updates: list[int]
    rows: list[str]
    values: list[list[float | None]]


def grid(rows: Mapping[str, Series], most: int = 240) -> Grid:
    """Return series as rows of a grid. Of more than ``most`` updates, neighbours are joined by their means.

    Args:
        rows: series by name, in order.
        most: bound on the number of columns.
    """
    updates = sorted({update for series in rows.values() for update in series.updates})
    columns = min(most, len(updates))
    # The first update of each column; a value belongs to the last column that begins at or before it.
    starts = [updates[column * len(updates) // columns] for column in range(columns)]
    values: list[list[float | None]] = []
    for series in rows.values():
        sums, counts = [0.0] * columns, [0] * columns
        for update, value in zip(series.updates, series.values, strict=True):
            if math.isfinite(value):
                column = bisect_left(starts, update + 1) - 1
                sums[column] += value
                counts[column] += 1
        values.append([total / count if count else None for total, count in zip(sums, counts, strict=True)])
    return Grid(starts, list(rows), values)


def finite(values: Sequence[float]) -> list[float | None]:
    """Return values for JSON, rounded to six digits, with None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _entry(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return update and numbers of a line of the log, NaN for null; None if it is damaged."""
    try:
        content = parse_json(line)
        update = int(content.pop("update"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    if not 0 <= update < _LARGEST_UPDATE:
        return None
    values = {}
    for tag, value in content.items():
        if value is None:
            values[tag] = math.nan
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                values[tag] = float(value)
            except OverflowError:  # an integer of hundreds of digits
                values[tag] = math.inf
    return update, values
