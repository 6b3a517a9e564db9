"""Stop requests: Ctrl-C, SIGTERM (preemption), SIGHUP (the terminal is lost) and SIGUSR1 (a time limit is near).

This module imports nothing heavy, so that signal handlers are installed before anything is loaded.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from deepspeed_nmt.errors import EXIT_STOPPED
from deepspeed_nmt.interruption import ONE_REQUEST_S

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

STOP_FILE = "DEEPSPEED_NMT_STOP"
"""Environment variable of the scripts in launch/ with the path of a file whose existence requests a stop.

Unlike a signal it reaches a process that has just started, and one whose launcher would die of the signal.
"""
STATUS_FILE = "DEEPSPEED_NMT_STATUS"
"""Environment variable of the scripts in launch/ with the path of a file for the exit status of training.

DeepSpeed's launcher returns success even if it is killed, and reports any other status of a rank as an error.
"""


class StopRequest:
    """A request to stop, after which the loop finishes its update and saves.

    Its source is a signal, STOP_FILE, or the loss of the launcher that started this rank. A second signal exits at
    once; checkpoints are written atomically, so the last good one stays intact.

    Attributes:
        signal_name: source of the request; empty without one.
        agreed: True once all ranks have agreed to stop.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.agreed = False
        self._since = 0.0
        self._previous: dict[int, object] = {}
        self._file = os.environ.get(STOP_FILE, "")
        self._launcher = os.getppid() if "RANK" in os.environ else 0

    def __bool__(self) -> bool:
        # A signal may arrive at any moment here; its name must not be overwritten.
        if not self.signal_name and (other := self._without_a_signal()):
            self.signal_name = other
        return bool(self.signal_name)

    def agree(self, by: str = "") -> None:
        """Record that all ranks stop now, by this rank's request or another's, whose source may be ``by``."""
        self.agreed = True
        if not self:
            # A preemption signals one rank after another; this rank's own signal, if still to come, is no second one.
            self.signal_name, self._since = by or "a request to another rank", time.monotonic()

    def hand_over(self, status: int) -> int:
        """Write the status of training that ended as it should to STATUS_FILE, and return that for the launcher.

        It is 0 if ``status`` is written, otherwise ``status``.
        """
        path = os.environ.get(STATUS_FILE, "")
        if not path or status not in (0, EXIT_STOPPED) or self._launcher_lost:
            return status
        try:
            Path(path).write_text(f"{status}\n", encoding="utf-8")
        except OSError:  # the script runs on another host
            return status
        return 0

    @property
    def _launcher_lost(self) -> bool:
        return self._launcher != 0 and os.getppid() != self._launcher

    def _without_a_signal(self) -> str:
        if self._file and Path(self._file).exists():
            return "request"
        return "the loss of its launcher" if self._launcher_lost else ""

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # `nohup` was asked to let it train on
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self.agreed:
            # The same request may arrive again while the process ends. Python's handlers are gone then, and the
            # signal's default action would kill the process.
            for harmless in (signal.SIGHUP, signal.SIGUSR1):
                signal.signal(harmless, signal.SIG_IGN)
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name and now - self._since > ONE_REQUEST_S:
            os._exit(128 + number)
        if not self.signal_name:
            self.signal_name, self._since = signal.Signals(number).name, now
            if number == signal.SIGINT:  # A user is watching. A logger may hold its lock at this moment.
                with suppress(OSError):  # stderr may be closed
                    os.write(2, b"finishing this update, then saving; interrupt again to stop at once\n")
