"""Curves of runs: read from ``metrics.jsonl``, drawn as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.picture import save_picture
from deepspeed_nmt.files import parse_json, resolved

METRICS_FILE = "metrics.jsonl"
TOKENS = "train/target_tokens"


@dataclass(frozen=True)
class Curve:
    """A logged value over target tokens, in the order of the log.

    Attributes:
        tokens: target tokens at each entry.
        values: value at each entry.
    """

    tokens: list[float]
    values: list[float]

    @property
    def last(self) -> float | None:
        """Last value; None of an empty curve."""
        return self.values[-1] if self.values else None


class RunCurves:
    """Log of one run.

    Args:
        path: run directory.

    Raises:
        DataError: if there is no log, or it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / METRICS_FILE
        if not file.is_file():
            raise DataError(
                f"{path} must be the directory of a run that has logged something, but has no {METRICS_FILE}"
            )
        lines = file.read_bytes().split(b"\n")
        self._entries = [entry for entry in map(_entry, lines) if _is_placed(entry)]
        if not self._entries:
            raise DataError(f"{file} must have entries with {TOKENS}, but has none yet; wait for the run's first log")

    @property
    def updates(self) -> int:
        """Number of updates at the last entry."""
        return int(self._entries[-1]["update"])

    @property
    def tokens(self) -> float:
        """Number of target tokens at the last entry."""
        return self._entries[-1][TOKENS]

    def curve(self, tag: str) -> Curve:
        """Return the values that were logged under a tag."""
        found = [(entry[TOKENS], entry[tag]) for entry in self._entries if tag in entry]
        return Curve([tokens for tokens, _ in found], [value for _, value in found])


def _entry(line: bytes) -> dict[str, float]:
    """Return the numbers in a line of the log by tag; nothing if the line is incomplete, as after a crash."""
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    return {tag: value for tag, value in content.items() if isinstance(value, int | float)}


def _is_placed(entry: Mapping[str, float]) -> bool:
    """Return True if an entry records its update and target tokens."""
    return all(math.isfinite(entry.get(tag, math.nan)) for tag in ("update", TOKENS))


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each run: as many last parts of its path as make the names differ."""
    parts = [resolved(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def draw(runs: Mapping[str, RunCurves], panels: Mapping[str, str], out: Path) -> None:
    """Draw a panel for each tag, with a line for each run.

    Args:
        runs: by name in the legend.
        panels: titles by tag.
        out: picture to write; its suffix is the format (png, svg, pdf).
    """
    import matplotlib

    matplotlib.use("agg")  # works without a screen
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.0 * len(panels), 4.0), squeeze=False)
    for axis, (tag, title) in zip(axes[0], panels.items(), strict=True):
        for name, run in runs.items():
            curve = run.curve(tag)
            axis.plot([tokens / 1e6 for tokens in curve.tokens], curve.values, label=name, linewidth=1.5)
        axis.set_title(title)
        axis.set_xlabel("million target tokens")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.tight_layout()
    try:
        save_picture(figure, out)
    finally:
        pyplot.close(figure)
