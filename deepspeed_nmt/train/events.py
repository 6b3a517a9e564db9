"""Events of a run: one JSON object a line in ``events.jsonl``, and the command that is notified of them.

A line has the keys ``time`` (UTC, ISO 8601), ``update`` (number of updates made), ``event`` (one of :data:`EVENTS`),
``text`` (one sentence), and further ones by event. Lines are appended and never changed or removed: the file is the
history of a run over all starts, also of updates that a resume or a rollback has undone.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ReportedError, TrainingError, UserError
from deepspeed_nmt.train.notify import Notifier

EVENTS_FILE = "events.jsonl"
Event = Literal[
    "start", "resume", "skip", "spike", "rollback", "collapse", "unsaved", "best", "stop", "end", "failure"
]
EVENTS: tuple[Event, ...] = get_args(Event)
Detail = str | int | float | None


class Events:
    """Writer of a run's events; inactive on ranks other than 0.

    A context manager around the training: an error that leaves the block is a failure. An event that cannot be
    written, for example on a full disk, is reported once; training continues.

    Args:
        run: the run directory; None for a writer that is inactive.
        active: True on rank 0.
        notifier: runs a command for some events.

    Attributes:
        begun: True after the event "start" or "resume".
    """

    def __init__(self, run: Path | None = None, active: bool = False, notifier: Notifier | None = None) -> None:
        self._file = run / EVENTS_FILE if run is not None and active else None
        self._notifier = notifier
        self._update = 0
        self.begun = self._failed = self._reported = False
        self._lock = threading.Lock()  # the watchdog's thread writes, too

    def record(self, event: Event, update: int, text: str, **details: Detail) -> None:
        """Append an event, and notify the command of it.

        Args:
            event: name of the event.
            update: number of updates made.
            text: one sentence.
            details: further keys; numbers that are not finite become null.
        """
        self._update = update
        self.begun = self.begun or event in ("start", "resume")
        if self._file is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {"time": now, "update": update, "event": event, "text": " ".join(text.split()), **finite(details)}
        line = json.dumps(entry, ensure_ascii=False)
        with self._lock:
            try:
                _append(self._file, line)
                self._reported = False
            except OSError as error:
                self._report(error)
        if self._notifier is not None:
            self._notifier.notify(event, line, self._file.parent, update, str(entry["text"]))

    def at(self, update: int) -> None:
        """Record the number of updates made, for an event without one: a failure."""
        self._update = update

    def fail(self, text: str) -> None:
        """Record the failure of the run, unless one is recorded already, and wait for the command."""
        if not self._failed:
            self._failed = True
            self.record("failure", self._update, text)
        if self._notifier is not None:
            self._notifier.close()

    def _report(self, error: OSError) -> None:
        """Log an error, unless the event before could not be written, either."""
        if not self._reported:
            logger.error("an event could not be written to %s (%s); training continues", self._file, error)
        self._reported = True

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(reason(error))
        elif self._notifier is not None:
            self._notifier.close()


NO_EVENTS = Events()
"""Writer that writes nothing."""


def reason(error: BaseException) -> str:
    """Return the reason of an error that ended training, also of one that another rank reported."""
    if isinstance(error, ReportedError):
        return error.reason or "another rank reported an error; see its log"
    if isinstance(error, (UserError, TrainingError)):
        return str(error)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _append(file: Path, line: str) -> None:
    """Append a line by one write. A line that a process died in is ended first, so that it damages no other."""
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * torn + line + "\n").encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def finite(values: Mapping[str, Detail]) -> dict[str, Detail]:
    """Return values for JSON, with None for numbers that are not finite."""
    odd = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    return {**values, **dict.fromkeys(odd)}
