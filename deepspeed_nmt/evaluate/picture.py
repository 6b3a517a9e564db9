"""Pictures: the check of the path before the work is done, the figure, and its file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import atomic_write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_picture(out: Path) -> None:
    """Check that a picture can be written to a path.

    Raises:
        ConfigError: if it is a directory, lies in no existing directory, or has no suffix of a picture format.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if out.is_dir():
        raise ConfigError(f"--out must be a file, but {out} is a directory; give a name in it, such as {out}/out.png")
    if not out.parent.is_dir():
        raise ConfigError(f"--out must be in a directory that exists, but {out.parent} does not; make it first")
    # Without a suffix matplotlib would add one and write to another file than the user named.
    if out.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError(
            f"--out must end in .png, .svg or .pdf, or another suffix that matplotlib writes, but is {out}"
        )


@contextmanager
def picture(out: Path, width: float, height: float) -> Iterator[Figure]:
    """Open a figure that is written when the block ends without an error, in the format of the path's suffix.

    Args:
        out: file to write, which :func:`check_picture` has accepted.
        width: in inches.
        height: in inches.

    Yields:
        The figure. It belongs to no window, so it needs no screen and no closing.

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
