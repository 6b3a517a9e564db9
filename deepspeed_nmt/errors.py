"""The errors a user can cause, and the exit statuses a job can end with.

A message says what is required, what it is instead, and what to do about it. The command line prints it
without a traceback and exits with :data:`EXIT_USER_ERROR`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_USER_ERROR = 2
"""The user's input was refused; nothing was changed."""
EXIT_STOPPED = 75
"""Asked to stop by a signal, saved, and can be started again (sysexits' EX_TEMPFAIL)."""

EXIT_RANK_LOST = 70
"""Another rank was lost or stuck; the last checkpoint is intact, and the job can be started again (EX_SOFTWARE)."""


class UserError(ValueError):
    """Something the user asked for cannot be done; the message tells how to mend it."""


class DataError(UserError):
    """Text, a corpus or a vocabulary is missing, broken, or does not fit the run."""


class ConfigError(UserError):
    """One or more settings are wrong. All of them are reported together.

    Args:
        problems: one complete sentence per wrong setting.
    """

    def __init__(self, problems: Iterable[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            message = self.problems[0]
        else:
            listing = "\n".join(f"  - {problem}" for problem in self.problems)
            message = f"{len(self.problems)} settings are wrong:\n{listing}"
        super().__init__(message)


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class TrainingError(RuntimeError):
    """Training cannot go on (for example: the loss stays NaN). The last good checkpoint is intact."""


class ReportedError(Exception):
    """Why this process ends has been said already, by itself or another rank.

    Args:
        status: to exit with.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt ``word``: `; did you mean 'x'?`, or else the choices there are."""
    choices = sorted(known)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(choices)}" if choices else ""
