"""Errors that end a command, and exit statuses.

A message states the fact, then the way out. The command line prints the message of a :class:`UserError` without a
traceback and exits with :data:`EXIT_USER_ERROR`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

EXIT_USER_ERROR = 2
"""The input is wrong; no checkpoint was changed."""

EXIT_STOPPED = 75
"""The run stopped on request and saved a checkpoint; the same command resumes it (EX_TEMPFAIL of sysexits.h)."""

EXIT_RANK_LOST = 70
"""Another rank was lost or stuck; the same command resumes from the last checkpoint (EX_SOFTWARE of sysexits.h)."""

EXIT_NO_PROGRESS = 78
"""A job was restarted again and again without a new checkpoint; to start it again will not help (EX_CONFIG)."""

EXIT_DEVICE = 71
"""A device has computed a wrong result; its host is to be left out (EX_OSERR)."""

_MAX_PROBLEMS = 20
"""Bound on the problems that a message lists."""
_MAX_KNOWN = 20
"""Bound on the correct words that a message lists."""
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_AS_TYPED = ContextVar("as_typed", default=False)
"""True while a command runs, whose options messages name as they are typed."""


class UserError(ValueError):
    """A mistake in the user's input; the message contains a remedy."""


class DataError(UserError):
    """Text, a corpus or a vocabulary that is missing, damaged, or does not fit the run."""


class ConfigError(UserError):
    """Wrong settings, reported together: ``problems`` has a message for each."""

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = self.problems
        if len(lines) != 1:
            lines = [f"{len(self.problems):,} settings are wrong:", *(f"  - {one}" for one in lines[:_MAX_PROBLEMS])]
            if (more := len(self.problems) - _MAX_PROBLEMS) > 0:
                lines.append(f"  ... and {more:,} more")
        super().__init__("\n".join(lines))


class MetricError(UserError):
    """A metric that is a program, and gave no number."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, or of another model."""


class TrainingError(RuntimeError):
    """A condition that ends training, such as a loss that stays NaN. The last good checkpoint is intact."""

    status = 1
    """Exit status of the command."""


class NoProgressError(TrainingError):
    """A job that was restarted again and again without a new checkpoint."""

    status = EXIT_NO_PROGRESS


class DeviceError(TrainingError):
    """A device, its memory or its network that has changed a result."""

    status = EXIT_DEVICE


class ReportedError(Exception):
    """The end of this process for a reason, if this rank knows it, that one of the ranks has reported already."""

    def __init__(self, status: int, reason: str = "") -> None:
        super().__init__(status)
        self.status, self.reason = status, reason


@contextmanager
def options_as_typed() -> Iterator[None]:
    """Let :func:`option` name options as they are typed on the command line during the block."""
    token = _AS_TYPED.set(True)
    try:
        yield
    finally:
        _AS_TYPED.reset(token)


def typed(name: str) -> str:
    """Return an option as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def option(name: str, in_command: str | None = None) -> str:
    """Return the name of an option for a message: ``--max-tokens`` in a command, ```max_tokens``` in Python."""
    return typed(in_command or name) if _AS_TYPED.get() else f"`{name}`"


def shown(value: object) -> str:
    """Return the representation of a value for a message, shortened if it is long."""
    return _SHORT.repr(value)


def whole_number(text: str) -> int:
    """Parse a whole number in ASCII digits, or raise a ValueError. Python's int takes ``1_0`` and others as well."""
    if not _WHOLE_NUMBER.fullmatch(text):
        raise ValueError(f"{shown(text)} is no whole number")
    return int(text)


def finite_number(text: str) -> float:
    """Parse a finite number in ASCII digits, such as 0.5 or 7e-4, or raise a ValueError."""
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{shown(text)} is no finite number")
    return value


def check_installed(package: str, needed_by: str, install: str) -> None:
    """Check, without importing it, that a package is installed that an option needs; ``install`` is a command."""
    if importlib.util.find_spec(package) is None:
        raise _not_installed(package, needed_by, install)


def import_optional(module: str, needed_by: str, install: str) -> Any:
    """Import a module of an optional package, or raise a ConfigError; ``install`` is a command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _not_installed(module.partition(".")[0], needed_by, install) from error


def _not_installed(package: str, needed_by: str, install: str) -> ConfigError:
    return ConfigError(f"{needed_by} needs the package {package}, which is not installed; install it ({install})")


def counted(count: int, units: str) -> str:
    """Return a number with its unit, a plural in -s, for a message: "1 run", "2,000 runs"."""
    return f"{count:,} {units.removesuffix('s') if count == 1 else units}"


def multiples_around(count: int, of: int) -> str:
    """Return the multiples of a number next to a count that is none, for a message: "12 or 18"."""
    lower = f"{count // of * of} or " if count > of else ""
    return f"{lower}{-(-count // of) * of}"


def listed(items: Sequence[object], most: int) -> str:
    """Return the first of some items, and the number of further ones, for a message: "1, 2 and 5 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error that is not the user's."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].removesuffix(": ")


def shown_bytes(size: int) -> str:
    """Return a size for a message: "1.5 GiB", "20 bytes"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message: "; did you mean 'x'?" if a known word is similar, else a list of these words."""
    choices = sorted(known)
    alike = [choice for choice in choices if min(len(choice), len(word)) > 0.5 * max(len(choice), len(word))]
    close = difflib.get_close_matches(word, alike, n=1, cutoff=0.6)  # "ter" is a part of "meteor", no misspelling
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {listed(choices, _MAX_KNOWN)}" if choices else ""
