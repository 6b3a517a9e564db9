"""Events of a run: one JSON object a line in ``events.jsonl``, and the command that is notified of them.

A line has the keys ``time`` (UTC, ISO 8601), ``update`` (number of updates made), ``event`` (an :data:`Event`),
``text`` (one sentence), and further ones by event. Lines are appended and never changed or removed: the file is the
history of a run over all starts, also of updates that a resume or a rollback has undone.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_nmt.console import json_line, logger
from deepspeed_nmt.errors import (
    ConfigError,
    NoProgressError,
    ReportedError,
    TrainingError,
    UserError,
    first_line,
    shown,
)
from deepspeed_nmt.evaluate.command_metrics import ending, kill, last_line, start
from deepspeed_nmt.files import append_line
from deepspeed_nmt.train.configuration import Event, words_of

EVENTS_FILE = "events.jsonl"
Detail = str | int | float | None


class Events:
    """Writer of a run's events; inactive on ranks other than 0.

    A context manager around the training: an error that leaves the block is a failure. An event that cannot be
    written, for example on a full disk, is reported once; training continues.

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
        """Append an event, and notify the command of it."""
        if event not in ("saved", "unsaved"):  # these come late, from the thread that writes checkpoints
            self._update = update
        self.begun = self.begun or event in ("start", "resume")
        if self._file is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry = {"time": now, "update": update, "event": event, "text": " ".join(text.split()), **details}
        line = json_line(entry)
        with self._lock:
            try:
                append_line(self._file, line)
                self._reported = False
            except OSError as error:
                if not self._reported:
                    logger.error("an event could not be written to %s (%s); training continues", self._file, error)
                self._reported = True
        if self._notifier is not None:
            self._notifier.notify(event, line, self._file.parent, update, str(entry["text"]))

    def at(self, update: int) -> None:
        """Record the number of updates made, for a failure."""
        self._update = update

    def fail(self, text: str) -> None:
        """Record the failure of the run, unless one is recorded already, and wait for the command."""
        if not self._failed:
            self._failed = True
            self.record("failure", self._update, text)
        if self._notifier is not None:
            self._notifier.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(reason(error))
        elif self._notifier is not None:
            self._notifier.close()


class Line(BaseModel):
    """What is read of a line of ``events.jsonl`` or ``metrics.jsonl`` when a run starts."""

    model_config = ConfigDict(strict=True)

    update: Annotated[int, Field(ge=0, lt=1 << 53)]
    event: str = ""
    text: str = ""
    job: str | None = None
    signal: str = ""

    @classmethod
    def read(cls, text: bytes) -> Line | None:
        """Read a line; None if it is damaged, such as the last one of a process that was killed."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


def read_lines(file: Path) -> Iterator[Line]:
    """Yield the lines of a file of a run, as far as it can be read; damaged ones are left out."""
    with suppress(OSError), file.open("rb") as stream:
        yield from filter(None, map(Line.read, stream))


NO_EVENTS = Events()
"""Writer that writes nothing."""


def reason(error: BaseException) -> str:
    """Return the reason of an error that ended training, also of one that another rank reported."""
    if isinstance(error, ReportedError):
        return error.reason or "another rank reported an error; see its log"
    if isinstance(error, (UserError, TrainingError)):
        return str(error)
    return first_line(error)


_TIME_IS_UP = "SIGUSR1"
"""Signal that comes before a job's time limit."""
MAX_FRUITLESS = 3
"""Starts of a job in a row without a new checkpoint, after which it is not started again."""


def check_progress(run: Path, update: int, job: str | None) -> None:
    """Check that one of a job's last starts has left a new checkpoint, or was stopped on request, as by preemption.

    Only the starts of this job count, so a user who has mended the cause submits it anew.

    Raises:
        NoProgressError: if :data:`MAX_FRUITLESS` starts in a row have come no further than this update.
    """
    if job is None:
        return
    causes: list[str] = []
    for line in read_lines(run / EVENTS_FILE):
        if line.event in ("start", "resume"):
            if line.job != job or line.update != update:
                causes.clear()
            else:
                causes.append("it was killed, or its host was lost")
        elif line.event == "stop" and line.signal == _TIME_IS_UP and line.update == update and causes:
            causes[-1] = f"{line.text}, as the time limit came before another update"
        elif line.event in ("stop", "end"):
            causes.clear()
        elif line.event == "failure" and causes:
            causes[-1] = line.text
    if len(causes) >= MAX_FRUITLESS:
        reasons = "; ".join(f"{number}. {cause}" for number, cause in enumerate(causes, 1))
        raise NoProgressError(
            f"job {job} was started {len(causes)} times in a row after update {update}, and no start reached a new "
            f"checkpoint: {reasons}. Mend the cause, or save more often (training.save_every), and submit it anew"
        )


LIMIT_S = 60.0
"""Time limit of the command for one event."""
CLOSE_S = 10.0
"""Seconds for which the end of training waits for the command."""


def check_notify(command: str) -> None:
    """Check that the program of a command exists and can be run; raise a ConfigError otherwise."""
    words = words_of(command)
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"training.notify begins with {shown(words[0])}, which is no program here; check its path and permissions"
        )


class Notifier:
    """Runs a command for the events of some names, one after another in a thread, each within ``limit_s`` seconds."""

    def __init__(self, command: str, events: Sequence[str], limit_s: float = LIMIT_S) -> None:
        self._words, self._events, self._limit_s = words_of(command), frozenset(events), limit_s
        self._thread = ThreadPoolExecutor(1, "notify")
        self._newest: Future[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = self._warned = False

    def notify(self, event: str, line: str, run: Path, update: int, text: str) -> None:
        """Run the command for an event, in the background, with its ``line`` on standard input."""
        if not self._words or event not in self._events or self._ending:
            return
        variables = {"EVENT": event, "RUN": str(run.absolute()), "UPDATE": str(update), "TEXT": text}
        variables = {f"DEEPSPEED_NMT_{name}": value.replace("\0", "") for name, value in variables.items()}
        self._newest = self._thread.submit(self._run, line + "\n", variables)

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Wait for the command until it has run for all events, at most ``wait_s`` seconds; then kill it."""
        if self._newest is None or self._ending:
            return
        is_late = bool(wait([self._newest], wait_s).not_done)
        self._ending = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if is_late:
            self._warn(f"was still running {wait_s:g} s after training had ended, and was killed")
            if self._process is not None:
                kill(self._process)

    def _run(self, line: str, variables: dict[str, str]) -> None:
        """Run the command once. Files instead of pipes: a process that it leaves behind holds up nothing."""
        try:
            with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as complaints:
                given.write(line.encode("utf-8", "replace"))
                given.seek(0)
                process = self._process = start(self._words, given, subprocess.DEVNULL, complaints, variables)
                if self._ending:  # close() had no process to kill
                    kill(process)
                status = process.wait(self._limit_s)
                if status and not self._ending:
                    said = last_line(complaints)[-400:]
                    self._warn(f"{ending(status)}{f' ({said})' if said else ''}")
        except (OSError, ValueError) as error:
            self._warn(f"could not be run ({error})")
        except subprocess.TimeoutExpired:
            kill(process)
            self._warn(f"took longer than {self._limit_s:g} s, and was killed")

    def _warn(self, what: str) -> None:
        """Warn of the first failure."""
        if not self._warned:
            self._warned = True
            logger.warning("training.notify: the command %s; training is not affected", what)
