"""Output of the commands: results on stdout, progress and log on stderr.

Progress is a bar if stderr is a terminal, and plain lines otherwise, so that the log file of a batch job is readable.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm
from typing_extensions import override

from deepspeed_nmt.errors import EXIT_USER_ERROR, DataError, TrainingError, UserError, counted, shown

T = TypeVar("T")
logger = logging.getLogger("deepspeed_nmt")

_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space and start again"),
    errno.ENAMETOOLONG: "; give a shorter one",
    errno.EROFS: "; make it writable, or work with a copy of it",
    errno.EACCES: "; change its permissions, or work with a copy of it",
}
"""Hints for errors of the system."""
_MISTAKES = (errno.EROFS, errno.EACCES, errno.ENAMETOOLONG)
"""Errors of the system that are mistakes of the user."""
PLAIN_LINE_EVERY_S = 10.0
"""Seconds between two lines of progress if stderr is not a terminal."""
ON_BAR = "on_bar"
"""Attribute of a log record whose values a progress bar shows: only log files receive it."""


class _TqdmHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes lines above a progress bar."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, ON_BAR, False):
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # a closed stderr must not end the program
            self.handleError(record)


def setup_logging(rank: int = 0) -> None:
    """Send the log of this package to stderr: all of it on rank 0, warnings and errors on other ranks."""
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler = _TqdmHandler()
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _ClosedInput(io.RawIOBase):
    """Standard input that the caller has closed."""

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: object) -> NoReturn:
        raise DataError("standard input is closed; give a file, or `< FILE`")


def set_up_streams() -> None:
    """Open the standard streams that the caller has closed (``<&-``, ``>&-``, ``2>&-``), and write UTF-8 to stdout.

    Python has no objects for closed ones, and the next files to be opened would take their descriptors: what a
    library writes to stderr would end up in a checkpoint. Reading from a closed stdin and writing to a closed stdout
    then fail; what is written to a closed stderr is discarded.

    Text is UTF-8 in any locale, on stdout as in files; names of files that are not UTF-8 are written as they are.
    """
    accesses = {"stdin": os.O_WRONLY, "stdout": os.O_RDONLY, "stderr": os.O_WRONLY}
    for descriptor, (name, access) in enumerate(accesses.items()):
        if getattr(sys, name) is None:
            os.open(os.devnull, access)  # takes the lowest free descriptor, which is this one
            if name == "stdin":
                sys.stdin = io.TextIOWrapper(io.BufferedReader(_ClosedInput()))
            else:
                setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


def discard_output() -> None:
    """Discard what stdout could not write; otherwise Python would report the same error again when it closes it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _LogFile(logging.FileHandler):
    """Log handler of a file, which reports once on stderr if the file cannot be written, such as on a full disk."""

    _reported = False

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._reported:
            self._reported = True
            logger.error("%s could not be written (%s)", self.baseFilename, error.strerror or error)


def log_to(file: Path) -> None:
    """Append the whole log of this rank to a file as well."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(file, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def report(error: Exception) -> int:
    """Log an expected error that ends a command, and return its exit status."""
    if isinstance(error, UserError):
        logger.error("error: %s", error)
        return EXIT_USER_ERROR
    if isinstance(error, TrainingError):
        logger.error("stopped: %s", error)
        return error.status
    assert isinstance(error, OSError)
    named = isinstance(error.filename, (str, bytes)) and error.filename  # it may be a descriptor
    name = shown(os.fsdecode(error.filename)) if named else ""
    reason, hint = error.strerror or error, _HINTS.get(error.errno or 0, "")
    logger.error("error: %s%s%s", reason, f" ({name})" if name else "", hint)
    return EXIT_USER_ERROR if error.errno in _MISTAKES else 1


def output(text: str) -> None:
    """Write a command's result to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(rows: Sequence[Sequence[str]], *, left: int = 1, markdown: bool = False) -> str:
    """Return a table, of which the first ``left`` columns are left-aligned, the others right-aligned."""
    from tabulate import tabulate

    options: dict[str, object] = {"tablefmt": "plain"}  # in which the head is a line as others
    if markdown:
        rows = [[text.replace("|", "\\|") for text in row] for row in rows]
        options = {"tablefmt": "pipe", "headers": "firstrow"}
    sides = ["left" if column < left else "right" for column in range(len(rows[0]))]
    text = str(tabulate(rows, colalign=sides, disable_numparse=True, **options))
    return "\n".join(line.rstrip() for line in text.split("\n"))


def cell(value: object, digits: int = 3) -> str:
    """Return a value as it stands in a table: ``-`` for None, thousands separated, a float with ``digits``."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def setting(value: object) -> str:
    """Return the value of a setting as it stands in a table: unrounded."""
    return value if isinstance(value, str) else json.dumps(value)


def json_line(values: Mapping[str, object]) -> str:
    """Return values as one line of JSON, which has neither infinity nor NaN: null stands for them."""
    return json.dumps(json.loads(json.dumps(values), parse_constant=lambda name: None), ensure_ascii=False)


def progress_bar(**options: Any) -> tqdm[NoReturn]:
    """Return a bar of `tqdm` on stderr. A terminal without a size, as some have at the start, counts as 80 x 24.

    `tqdm` by itself would then show nothing, and not ask for the size again.
    """
    bar = tqdm(dynamic_ncols=True, **options)
    if not bar.disable:
        bar.ncols, bar.nrows = _terminal_size(sys.stderr)
    bar.dynamic_ncols = _terminal_size  # type: ignore[assignment]  # asked at each refresh; typed as the option
    return bar


def _terminal_size(stream: Any) -> tuple[int, int]:
    columns, lines = 0, 0
    with suppress(OSError, ValueError):  # a terminal that is closed
        columns, lines = os.get_terminal_size(stream.fileno())
    return columns or 80, lines or 24


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` and show progress."""
    with counting(description, unit, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def counting(
    description: str, unit: str, total: int | None = None, before: int = 0
) -> Iterator[Callable[[int], object]]:
    """Show the progress of the block, of which ``before`` units were done earlier; yield a function to count more."""
    if sys.stderr.isatty():
        with progress_bar(desc=description, unit=f" {unit}", total=total, initial=before, unit_scale=True) as bar:
            yield bar.update
        return
    start = last = time.monotonic()
    count = 0

    def advance(more: int) -> None:
        nonlocal count, last
        count += more
        now = time.monotonic()
        if now - last >= PLAIN_LINE_EVERY_S:
            last = now
            rate = count / (now - start)
            so_far = f"{before + count:,} of {total:,} {unit}" if total else counted(before + count, unit)
            left = f", {timedelta(seconds=round((total - before - count) / rate))} left" if total and rate else ""
            logger.info("%s: %s, %.0f per second%s", description, so_far, rate, left)

    yield advance
    logger.info("%s: %s in %.1f s", description, counted(count, unit), time.monotonic() - start)
