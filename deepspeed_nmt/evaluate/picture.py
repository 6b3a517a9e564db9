"""Check of the path of a picture, before the work is done that it shows."""

from __future__ import annotations

from pathlib import Path

from deepspeed_nmt.errors import ConfigError


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
