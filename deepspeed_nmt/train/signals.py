"""Asking a run to stop: Ctrl-C, SIGTERM (preemption) and SIGUSR1 (a time limit is near). Imports nothing heavy: a run
listens before it loads anything.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_ONE_REQUEST_S = 2.0
"""Signals within this time are one request: a launcher passes Ctrl-C on as SIGTERM at once."""


class StopRequest:
    """Notes that a signal came, so that the loop can finish its update and save. A second request exits at once;
    checkpoints are written in one step, so the last good one stays intact.
    """

    def __init__(self) -> None:
        self.signal_name = ""
        self._since = 0.0
        self._previous: dict[int, object] = {}

    def __bool__(self) -> bool:
        return bool(self.signal_name)

    def __enter__(self) -> StopRequest:
        for number in _SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self:
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
