"""Make a page of one run: one HTML file that needs no network and no other file.

    deepspeed-nmt report run runs/deep --out deep.html

It has the state of the run, its curves with skipped updates, spikes, rollbacks and restarts where they were,
cross-attention by decoder layer, sample translations over time beside their references, the worst sentences, and its
settings, data and environment. What a run does not record is left out, so the page of a run that is still trained, or
that failed, can be made at any time. Figures are drawn by plotly, which the page contains.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SUFFIXES = (".html", ".htm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--out", type=Path, default=Path("page.html"), metavar="F", help="page to write (default: %(default)s)"
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="recipe to compare the settings with (default: that of the last start, or the nearest)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and print the state of the run.

    Raises:
        ConfigError: if the directory is no run, the recipe is unknown, the page cannot be written where it should be,
            or plotly is not installed.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.evaluate.page.document import check_drawing, render
    from deepspeed_nmt.files import atomic_write_bytes
    from deepspeed_nmt.run.page import RunPage

    _check_out(arguments.out)
    check_drawing()
    found = RunPage(arguments.run, arguments.recipe)
    content = found.content
    page = render(content, found.log, found.events, found.texts)
    try:
        atomic_write_bytes(arguments.out, page)
    except OSError as error:
        raise ConfigError(
            f"--out must be writable, but {arguments.out} could not be written ({error.strerror or error}); choose "
            "another place"
        ) from error
    output(f"{content.name}: {content.status.state}, {content.status.sentence}")
    logger.info("page: %s (%.1f MB)", arguments.out, len(page) / 1e6)
    return 0


def _check_out(out: Path) -> None:
    """Check that the page can be written to a path.

    Raises:
        ConfigError: if it is a directory, lies in no existing directory, or has another suffix than a page.
    """
    from deepspeed_nmt.errors import ConfigError

    if out.is_dir():
        raise ConfigError(
            f"--out must be a file, but {out} is a directory; give a name in it, such as {out}/page.html"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"--out must be in a directory that exists, but {out.parent} does not; make it first")
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out must end in {' or '.join(SUFFIXES)}, but is {out}")
