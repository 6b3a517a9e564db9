"""Goodput of a run: what each second of its life was spent on, over all its starts.

    goodput = seconds of updates that survive, of their validations and checkpoints / seconds since the first start

Rank 0 keeps a ledger, ``goodput.jsonl``. A process that is killed loses the updates after the checkpoint from which
the next one resumes. The ledger's last line before that update says what is kept; the seconds after it were repeated.
This module imports nothing heavy: the clock starts with the process.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import append_line

GOODPUT_FILE = "goodput.jsonl"
Activity = Literal[
    "imports", "data", "rendezvous", "model", "restore", "waiting for data", "updates", "validation", "saving"
]
STARTING: tuple[Activity, ...] = ("imports", "data", "rendezvous", "model", "restore")
"""Activities before the first update, in their order."""
PRODUCTIVE: tuple[Activity, ...] = ("updates", "validation", "saving")
REPEATED, IDLE = "repeated", "idle"
"""Seconds of updates that were lost, with their validations, checkpoints and waits; seconds between two starts."""

_LINE_EVERY_S = 30.0
"""Seconds between two lines: what a killed process did after its last line counts as idle."""
_Seconds = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]


class Entry(BaseModel):
    """A line of the ledger.

    Attributes:
        time: of the line, in seconds since 1970; of the first line of a start, when its process began.
        update: number of updates made; in the first line of a start, those with which it continues.
        begins: True in the first line of a start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    time: _Seconds
    update: Annotated[int, Field(ge=0, lt=1 << 53)]
    begins: bool = False
    seconds: dict[Activity, _Seconds] = {}


class Account(NamedTuple):
    """Seconds of a run by activity, REPEATED and IDLE, whose sum is its life; number of starts, with rollbacks."""

    seconds: Mapping[str, float]
    starts: int

    @property
    def goodput(self) -> float | None:
        """Share of the run's life that its updates needed; None before it has lived."""
        life = sum(self.seconds.values())
        return sum(self.seconds.get(activity, 0.0) for activity in PRODUCTIVE) / life if life > 0.0 else None

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Account:
        """Sum up the lines of a ledger. Lines before the first start are left out."""
        starts: list[list[Entry]] = []
        for entry in entries:
            if entry.begins:
                starts.append([])
            if starts:
                starts[-1].append(entry)
        seconds: dict[str, float] = defaultdict(float)
        for number, start in enumerate(starts, 1):
            first, last = start[0], start[-1]
            following = starts[number] if number < len(starts) else None
            resumed_at = last.update if following is None else following[0].update
            kept = next((entry for entry in reversed(start) if entry.update <= resumed_at), first)
            for activity, spent in last.seconds.items():
                survives = spent if activity in STARTING else kept.seconds.get(activity, 0.0)
                seconds[activity] += survives
                seconds[REPEATED] += spent - survives
            if following is not None:
                # Clocks of two hosts may differ.
                seconds[IDLE] += max(0.0, following[0].time - first.time - sum(last.seconds.values()))
        return cls(seconds, len(starts))


def read_ledger(run: Path) -> list[Entry]:
    """Read the ledger of a run directory; empty if there is none. Damaged lines are left out."""
    entries = []
    with suppress(OSError), (run / GOODPUT_FILE).open("rb") as stream:
        for line in stream:
            with suppress(ValidationError):
                entries.append(Entry.model_validate_json(line))
    return entries


class Ledger:
    """Clock of a process, and writer of the ledger on rank 0 once :meth:`start` has named the run.

    A line that cannot be written, for example on a full disk, is reported once; training continues.
    """

    def __init__(self) -> None:
        age = _age_of_process()
        self._since, self._began = time.monotonic() - age, time.time() - age
        self._activity: Activity = "imports"
        self._seconds: dict[Activity, float] = {}
        self._written = -_LINE_EVERY_S
        self._file: Path | None = None
        self._past = Account({}, 0)
        self._reported = False

    def begin(self, activity: Activity) -> None:
        """Count the seconds from now on as those of an activity."""
        now = time.monotonic()
        self._seconds[self._activity] = self._seconds.get(self._activity, 0.0) + now - self._since
        self._since, self._activity = now, activity

    def start(self, run: Path, update: int) -> None:
        """Record that training continues after an update; again after a rollback, which is a start of its own.

        What is done now, and since :meth:`begin`, belongs to the start.
        """
        if self._file is not None:
            self._seconds, self._began = {}, time.time() - (time.monotonic() - self._since)
        self._file = run / GOODPUT_FILE
        first = Entry(time=self._began, update=update, begins=True)
        self._past = Account.of([*read_ledger(run), first])
        self._append(first)

    def write(self, update: int, *, must: bool = False) -> None:
        """Write a line, if the last one is some time ago, or it must be: a checkpoint has been taken."""
        now = time.monotonic()
        if self._file is None or not (must or now - self._written >= _LINE_EVERY_S):
            return
        self._written = now
        self.begin(self._activity)
        self._append(Entry(time=time.time(), update=update, seconds=dict(self._seconds)))

    def account(self) -> Account:
        """Return the seconds of the run so far."""
        self.begin(self._activity)
        return Account(Counter(self._past.seconds) + Counter(self._seconds), self._past.starts)

    def _append(self, entry: Entry) -> None:
        assert self._file is not None
        content = entry.model_dump(mode="json", exclude_defaults=True)
        content["seconds"] = {name: round(spent, 3) for name, spent in entry.seconds.items()}
        try:
            append_line(self._file, json.dumps(content))
            self._reported = False
        except OSError as error:
            if not self._reported:
                logger.error("%s could not be written (%s); training continues", self._file, error)
            self._reported = True


def _age_of_process() -> float:
    """Return the seconds since this process began; 0 where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
        began = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
