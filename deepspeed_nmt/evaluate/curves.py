"""Curves of runs: read from ``metrics.jsonl``, drawn as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.metrics import METRICS, Metric, validation_tag
from deepspeed_nmt.evaluate.picture import picture, use_log_scale
from deepspeed_nmt.files import parse_json, resolved

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

METRICS_FILE = "metrics.jsonl"
TOKENS, HOURS = "train/target_tokens", "perf/hours"
SOURCE_RELIANCE = "collapse/source_reliance"
TRAIN_PERPLEXITY, VALID_PERPLEXITY, VALID_LOSS = "train/ppl", "valid/ppl", "valid/loss"
_CROSS_SHARE = re.compile(r"collapse/cross_share/layer_(\d+)")


@dataclass(frozen=True)
class Curve:
    """A logged value over target tokens, in the order of updates.

    Attributes:
        updates: number of the update at each entry.
        tokens: target tokens at each entry.
        values: value at each entry.
    """

    updates: list[int]
    tokens: list[float]
    values: list[float]

    @property
    def last(self) -> float | None:
        """Last value; None of an empty curve."""
        return self.values[-1] if self.values else None

    def best(self, *, higher_is_better: bool = True) -> float | None:
        """Return the best value, NaN apart; None if there is none."""
        choose = max if higher_is_better else min
        return choose((value for value in self.values if not math.isnan(value)), default=None)


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
        # Late values are logged after those of later updates.
        self._entries = sorted(filter(_is_placed, map(_entry, lines)), key=lambda entry: entry["update"])
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
        found = [entry for entry in self._entries if tag in entry]
        return Curve(
            [int(entry["update"]) for entry in found],
            [entry[TOKENS] for entry in found],
            [entry[tag] for entry in found],
        )

    def validated(self) -> list[str]:
        """Return the names of logged values of validation, without ``valid/``, in order of their first entries."""
        prefix = validation_tag("")
        return list(
            dict.fromkeys(
                tag.removeprefix(prefix) for entry in self._entries for tag in entry if tag.startswith(prefix)
            )
        )

    def cross_shares(self) -> dict[int, Curve]:
        """Return the share of cross-attention in the update of each decoder layer, by the layer's number."""
        tags = {tag for entry in self._entries for tag in entry}
        layers = {int(found[1]): tag for tag in tags if (found := _CROSS_SHARE.fullmatch(tag))}
        return {layer: self.curve(layers[layer]) for layer in sorted(layers)}


def validation_measures(runs: Iterable[RunCurves]) -> list[str]:
    """Return the measures that runs have logged: METRIC of the main set, SET/METRIC and SET/loss of others.

    Those of the main set have the order of METRICS, then that of the log, and the others that of the log.
    """
    logged = dict.fromkeys(name for run in runs for name in run.validated())
    main = [name for name in METRICS if name in logged]
    programs = [name for name in logged if "/" not in name and name not in (*METRICS, "loss", "nll", "ppl")]
    of_sets = [name for name in logged if "/" in name and name.partition("/")[2] not in ("nll", "ppl")]
    return [*main, *programs, *of_sets]


def validation_metric(runs: Iterable[RunCurves]) -> Metric:
    """Return the first metric of translations that one of the runs has logged; BLEU if none has."""
    logged = list(runs)
    found = (each for each in METRICS.values() if any(run.curve(validation_tag(each.name)).values for run in logged))
    return next(found, METRICS["bleu"])


def _entry(line: bytes) -> dict[str, float]:
    """Return the numbers in a line of the log by tag; nothing if the line is incomplete, as after a crash.

    A number that was not finite is null. Older runs have NaN and Infinity there.
    """
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    numbers = {tag: math.nan if value is None else value for tag, value in content.items()}
    return {tag: value for tag, value in numbers.items() if isinstance(value, int | float)}


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


def draw_curves(runs: Mapping[str, RunCurves], panels: Mapping[str, str], out: Path, *, shares: bool = False) -> None:
    """Draw a panel for each tag, with a line for each run.

    Args:
        runs: by name in the legend.
        panels: titles by tag. Axes of perplexity are logarithmic.
        out: picture to write; its suffix is the format (png, svg, pdf).
        shares: True to add a heat map of cross-attention's share in each decoder layer for each run that logs it.
    """
    maps = {name: found for name, run in runs.items() if shares and (found := run.cross_shares())}
    columns = len(panels)
    rows = math.ceil(len(maps) / columns)
    with picture(out, 4.5 * columns, 3.8 * (1 + rows)) as figure:
        parts = figure.subfigures(2 if maps else 1, 1, squeeze=False, height_ratios=[1, rows] if maps else None)[:, 0]
        axes = parts[0].subplots(1, columns, squeeze=False)[0]
        for axis, (tag, title) in zip(axes, panels.items(), strict=True):
            for name, run in runs.items():
                curve = run.curve(tag)
                axis.plot([tokens / 1e6 for tokens in curve.tokens], curve.values, label=name, linewidth=1.5)
            if tag.endswith("/ppl"):
                use_log_scale(axis)
            axis.set_title(title)
            axis.set_xlabel("million target tokens")
            axis.grid(alpha=0.3)
        if runs:
            axes[0].legend(fontsize="small")
        if maps:
            _draw_maps(parts[1].subplots(rows, columns, squeeze=False).flatten(), maps)


def _draw_maps(axes: Sequence[Axes], maps: Mapping[str, Mapping[int, Curve]]) -> None:
    """Draw the heat map of cross-attention's share of each run, and remove the axes that are left over."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # One scale for all runs, so that their colours can be compared.
    largest = max(curve.best() or 0.0 for layers in maps.values() for curve in layers.values())
    scale = Normalize(0.0, largest or 1.0)
    used = axes[: len(maps)]
    for axis in axes[len(maps) :]:
        axis.remove()
    for axis, (name, layers) in zip(used, maps.items(), strict=True):
        _draw_shares(axis, layers, scale)
        axis.set_title(f"cross-attention's share: {name}")
    used[0].figure.colorbar(ScalarMappable(scale), ax=used)


def _draw_shares(axis: Axes, layers: Mapping[int, Curve], scale: Normalize) -> None:
    """Draw the heat map of a run, blank where nothing was measured, as in layers without cross-attention."""
    from matplotlib.ticker import MaxNLocator

    updates = sorted({update for curve in layers.values() for update in curve.updates})
    grid = [[math.nan] * len(updates) for _ in range(max(layers))]
    place = {update: column for column, update in enumerate(updates)}
    for layer, curve in layers.items():
        for update, value in zip(curve.updates, curve.values, strict=True):
            grid[layer - 1][place[update]] = value
    heights = [layer + 0.5 for layer in range(max(layers) + 1)]
    axis.pcolormesh(_edges(updates), heights, grid, norm=scale, shading="flat")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("updates")
    axis.set_ylabel("decoder layer")


def _edges(centres: Sequence[float]) -> list[float]:
    """Return the borders between neighbours, and those of the first and the last."""
    inner = [(low + high) / 2 for low, high in pairwise(centres)]
    margins = (inner[0] - centres[0], centres[-1] - inner[-1]) if inner else (0.5, 0.5)
    return [centres[0] - margins[0], *inner, centres[-1] + margins[1]]
