"""Options that several kinds of reports share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_nmt.run.parallel_text import ParallelText


def add_picture(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare the option for the picture of a report."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(default),
        metavar="F",
        help="picture to write, .png, .svg or .pdf (default: %(default)s)",
    )


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the text that a report translates, and for its translation."""
    parser.add_argument("--data", type=Path, metavar="DIR", help="data directory with a test set to translate")
    parser.add_argument("--input", type=Path, metavar="F", help="source text to translate, one sentence a line")
    parser.add_argument("--reference", type=Path, metavar="F", help="reference translation of --input")
    parser.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last, average, or a path (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N",
        help="batch size: sentences x longest source (default: %(default)s)",
    )  # fmt: skip


def check_decoding(arguments: argparse.Namespace) -> None:
    """Check the options for the translation.

    Raises:
        ConfigError: if one is out of range.
    """
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.search.buffers import out_of_bounds

    if problems := out_of_bounds({"max_tokens": arguments.max_tokens}):
        raise ConfigError(problems)


def read_text(arguments: argparse.Namespace) -> ParallelText | None:
    """Read the text to translate; return None if no option names one.

    Raises:
        ConfigError: if the options are incomplete, or contradict each other.
        DataError: if the text is missing, empty or not aligned.
    """
    from deepspeed_nmt.data.directory import DataDirectory
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.run.parallel_text import ParallelText

    files = (arguments.input, arguments.reference)
    if (None in files and files != (None, None)) or (arguments.data is not None and files != (None, None)):
        raise ConfigError("the test set must be named by --data, or by --input and --reference; give one of the two")
    if arguments.data is not None:
        return ParallelText.of(DataDirectory.open(arguments.data))
    return None if arguments.input is None else ParallelText.read(*files)
