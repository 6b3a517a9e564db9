"""Asking a run to stop: Ctrl-C, SIGTERM (preemption) and SIGUSR1 (a time limit is near). Imports nothing heavy: a run
listens before it loads anything.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ONE_REQUEST_S = 2.0
"""Signals within this time are one request: a launcher passes Ctrl-C on as SIGTERM at once."""


STOP_FILE = "DEEPSPEED_NMT_STOP"
"""Environment variable: a file that asks a run to stop as soon as it exists. Unlike a signal it reaches a process
that has hardly begun, and one whose launcher would die of the signal; the scripts in launch/ use it.
"""


def mark_done() -> None:
    """Leave a file ``done`` beside STOP_FILE: DeepSpeed's launcher, if killed, looks like one that succeeded."""
    if path := os.environ.get(STOP_FILE, ""):
        with suppress(OSError):
            Path(path).with_name("done").touch()


class StopRequest:
    """Notes that somebody wants the run to stop, so that the loop can finish its update and save: by a signal, by
    STOP_FILE, or because the launcher that started this rank is gone. A second signal exits at once; checkpoints are
    written in one step, so the last good one stays intact.

    Attributes:
        signal_name: by what; empty as long as nobody does.
        agreed: whether all ranks have agreed to.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self.agreed = False
        self._since = 0.0
        self._previous: dict[int, object] = {}
        self._file = os.environ.get(STOP_FILE, "")
        self._launcher = os.getppid() if "RANK" in os.environ else 0

    def __bool__(self) -> bool:
        # A signal may come at any moment here; what it has written is never written over with nothing.
        if not self.signal_name and (other := self._without_a_signal()):
            self.signal_name = other
        return bool(self.signal_name)

    def agree(self) -> None:
        """All ranks stop now, because of this rank's request or of another's."""
        self.agreed = True
        if not self:
            self.signal_name = "a request to another rank"

    def _without_a_signal(self) -> str:
        if self._file and Path(self._file).exists():
            return "request"
        if self._launcher and os.getppid() != self._launcher:
            return "the loss of its launcher"
        return ""

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.agreed:
            # The same request may come again, by another way, while the process is ending; then Python no longer
            # listens, and unheard it would kill.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal_name and now - self._since > _ONE_REQUEST_S:
            os._exit(128 + number)
        if not self.signal_name:
            self.signal_name, self._since = signal.Signals(number).name, now
            if number == signal.SIGINT:  # Somebody is watching. A logger may be busy just now.
                os.write(2, b"finishing this update, then saving; once more, and it stops at once\n")
