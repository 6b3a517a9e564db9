"""Pictures of reports by matplotlib: the check of the path, the file, and curves of runs."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.data.data_directory import META_FILE
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import atomic_write_bytes, resolved
from deepspeed_nmt.reports.run_log import RunLog, Series
from deepspeed_nmt.run.directory import CONFIG_FILE
from deepspeed_nmt.train.log import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_COLUMNS = 500
"""Bound on the updates in a heat map, as many as its pixels show."""


def check_out(
    out: Path, inputs: Iterable[Path | None], suffixes: Collection[str] = (), option: str = "--out"
) -> None:
    """Check that a file can be written to ``option`` without harm to the ``inputs``, before the work is done.

    Without ``suffixes`` those of pictures are allowed.

    Raises:
        ConfigError: if it is an input or lies in one, is a directory, lies in no existing directory, or has another
            suffix.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if out.is_dir():
        raise ConfigError(f"{option} {out} is a directory; give the name of a file in it")
    if not out.parent.is_dir():
        raise ConfigError(f"{option} {out}: there is no directory {out.parent}; make it first")
    # Without a suffix matplotlib would add one and write to another file than the user named.
    if out.suffix.lower() not in (suffixes or {f".{name}" for name in FigureCanvasBase.get_supported_filetypes()}):
        known = " or ".join(suffixes) or ".png, .svg, .pdf or another suffix that matplotlib writes"
        raise ConfigError(f"{option} {out} does not end in {known}")
    for path in filter(None, inputs):
        if path.is_dir() and not any((path / name).exists() for name in (CONFIG_FILE, METRICS_FILE, META_FILE)):
            continue  # neither a run nor data, which its reader says
        if resolved(out).is_relative_to(resolved(path)):
            raise ConfigError(
                f"{option} {out} is {path}, or lies in it, which the report reads; choose another place"
            )


@contextmanager
def picture(out: Path, width: float, height: float) -> Iterator[Figure]:
    """Open a figure (inches) that is written when the block ends without an error, in the format of the suffix.

    It belongs to no window, so it needs no screen and no closing.

    Raises:
        OSError: if the file cannot be written; an older picture is then unchanged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format=out.suffix.removeprefix("."))
    atomic_write_bytes(out, content.getvalue())


def use_log_scale(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers at its ticks, which are faster to draw than powers."""
    from matplotlib.ticker import LogFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2.0, 0.5)))


def plainly(text: str) -> str:
    """Return text that matplotlib writes as it is: without formulas, and in legends, which leave out ``_...``."""
    return (" " * text.startswith("_")) + text.replace("$", r"\$")


def draw_curves(logs: Mapping[str, RunLog], panels: Mapping[str, str], out: Path) -> None:
    """Draw a panel for each tag and its title over target tokens, with a line for each run by its name.

    Runs that log cross-attention's share in each decoder layer get a heat map of it.
    """
    maps = {name: log.cross_shares() for name, log in logs.items() if log.cross_shares()}
    columns = len(panels)
    rows = math.ceil(len(maps) / columns)
    with picture(out, 4.5 * columns, 3.8 * (1 + rows)) as figure:
        parts = figure.subfigures(2 if maps else 1, 1, squeeze=False, height_ratios=[1, rows] if maps else None)[:, 0]
        axes = parts[0].subplots(1, columns, squeeze=False)[0]
        for axis, (tag, title) in zip(axes, panels.items(), strict=True):
            for name, log in logs.items():
                tokens, values = log.over_tokens(tag)
                axis.plot([count / 1e6 for count in tokens], values, label=plainly(name), linewidth=1.5)
            if tag.endswith("/ppl"):
                use_log_scale(axis)
            axis.set(title=title, xlabel="million target tokens")
            axis.grid(alpha=0.3)
        if logs:
            axes[0].legend(fontsize="small")
        if maps:
            _draw_shares(parts[1].subplots(rows, columns, squeeze=False).flatten(), maps)


def _draw_shares(axes: Sequence[Axes], maps: Mapping[str, Mapping[int, Series]]) -> None:
    """Draw the heat map of each run, blank where nothing was measured, as in layers without cross-attention."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    # One scale for all runs, so that their colours can be compared.
    values = [value for layers in maps.values() for series in layers.values() for value in series.finite.values()]
    scale = Normalize(0.0, max(values, default=0.0) or 1.0)
    used = axes[: len(maps)]
    for axis in axes[len(maps) :]:
        axis.remove()
    for axis, (name, layers) in zip(used, maps.items(), strict=True):
        updates = sorted({update for series in layers.values() for update in series})
        updates = updates[:: -(-len(updates) // _MAX_COLUMNS)]
        rows = range(1, max(layers) + 1)
        grid = [[layers.get(layer, Series()).get(update, math.nan) for update in updates] for layer in rows]
        borders = [min(0, updates[0] - 1), *updates]  # a column reaches back to the measurement before
        axis.pcolormesh(borders, [layer - 0.5 for layer in (*rows, max(layers) + 1)], grid, norm=scale)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="updates", ylabel="decoder layer", title=plainly(f"cross-attention's share: {name}"))
    used[0].figure.colorbar(ScalarMappable(scale), ax=used)
