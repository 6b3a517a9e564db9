"""What the commands show: results on stdout, progress and remarks on stderr.

On a terminal long work has a progress bar; in a batch job (stderr is not a terminal) it has plain lines, so that
a log file stays readable.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from deepspeed_nmt.errors import EXIT_USER_ERROR, TrainingError, UserError

T = TypeVar("T")
logger = logging.getLogger("deepspeed_nmt")

PLAIN_LINE_EVERY_S = 10.0


class _TqdmHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines above a progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # whoever read our messages is gone: that must not end the work
            self.handleError(record)


def setup_logging(rank: int = 0) -> None:
    """Send this package's log to stderr; ranks other than 0 only say warnings."""
    _remove_handlers()
    handler = _TqdmHandler()
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def log_to(file: Path) -> None:
    """Write the whole log of this rank into a file, too, after what earlier starts left there.

    Raises:
        OSError: if it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)


def _remove_handlers() -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def report(error: Exception) -> int:
    """Say why a command failed, for a reason that is not the program's, and return its exit status."""
    if isinstance(error, UserError):
        logger.error("error: %s", error)
        return EXIT_USER_ERROR
    if isinstance(error, TrainingError):
        logger.error("stopped: %s", error)
        return 1
    assert isinstance(error, OSError)
    where = f" ({error.filename})" if error.filename else ""
    hint = "; free some space and start again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    logger.error("error: %s%s%s", error.strerror or error, where, hint)
    return 1


def output(text: str) -> None:
    """Write a command's result to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` and show how far it has come."""
    with counting(description, unit, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def counting(description: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """Show how far long work has come: what this gives is to be called with how much more of it is done."""
    if sys.stderr.isatty():
        with tqdm(desc=description, unit=f" {unit}", total=total, dynamic_ncols=True, unit_scale=True) as bar:
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
            of = f" of {total:,}" if total else ""
            logger.info("%s: %s%s %s, %.0f a second", description, f"{count:,}", of, unit, count / (now - start))

    yield advance
    logger.info("%s: %s %s in %.1f s", description, f"{count:,}", unit, time.monotonic() - start)
