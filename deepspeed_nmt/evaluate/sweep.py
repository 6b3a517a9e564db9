"""Results of a sweep: their picture, against the settings swept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.evaluate.picture import picture, use_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 20.0
"""Ratio of perplexities from which their axis is logarithmic."""


@dataclass(frozen=True)
class Measured:
    """Results of one point.

    Attributes:
        x: value of the first setting swept.
        line: values of the other settings swept, in words; "" if there are none.
        results: by name; None if unknown.
        is_finished: False if the run is not.
    """

    x: float | str
    line: str
    results: Mapping[str, float | None]
    is_finished: bool


def draw_sweep(axis_name: str, points: Sequence[Measured], panels: Mapping[str, str], out: Path) -> None:
    """Draw a panel for each result, with a line for each value of the second setting swept.

    Points of unfinished runs are hollow.

    Args:
        axis_name: the first setting swept.
        points: in the order of the sweep.
        panels: titles by name of the result.
        out: picture to write; its suffix is the format.
    """
    with picture(out, 4.5 * len(panels), 3.8) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (result, title) in zip(axes, panels.items(), strict=True):
            _draw_panel(axis, points, result)
            axis.set_title(title)
            axis.set_xlabel(axis_name)
            axis.grid(alpha=0.3)
        if any(point.line for point in points):
            axes[0].legend(fontsize="small")


def _draw_panel(axis: Axes, points: Sequence[Measured], result: str) -> None:
    values = list(dict.fromkeys(point.x for point in points))
    places: dict[float | str, float] = {value: value for value in values if not isinstance(value, str)}
    if len(places) < len(values):  # words stand side by side
        places = {value: number for number, value in enumerate(values)}
    axis.set_xticks([places[value] for value in values], [str(value) for value in values])
    for line in dict.fromkeys(point.line for point in points):
        members = sorted((point for point in points if point.line == line), key=lambda point: places[point.x])
        xs = [places[point.x] for point in members]
        ys = [_known(point.results[result]) for point in members]
        (drawn,) = axis.plot(xs, ys, marker="o", label=line)
        for x, y, point in zip(xs, ys, members, strict=True):
            if not point.is_finished:
                axis.plot(x, y, marker="o", color=drawn.get_color(), markerfacecolor="white")
    known = [value for point in points if (value := _known(point.results[result])) > 0.0]
    if result == "train_ppl" and known and max(known) > _WIDE * min(known):
        use_log_scale(axis)


def _known(value: float | None) -> float:
    return math.nan if value is None else value
