"""Events of a run: starts, skipped updates, spikes, rollbacks, warnings of collapse, ends.

They stand in ``events.jsonl``. Runs of older versions have no such file; theirs are read from the log of rank 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from deepspeed_nmt.files import parse_json

EVENTS_FILE = "events.jsonl"
KINDS = ("start", "resume", "skip", "spike", "rollback", "collapse", "unsaved", "best", "stop", "end", "failure")
STARTS, ENDINGS = ("start", "resume"), ("stop", "end", "failure")
_MAX_TEXT = 600
_LOG = Path("logs") / "rank-0.log"


@dataclass(frozen=True)
class Event:
    """An event of a run.

    Attributes:
        kind: one of KINDS, or a later version's.
        update: number of the last update before it; None if the event does not record it.
        time: ISO 8601; "" if the event does not record it.
        text: one sentence.
        more: further values.
    """

    kind: str
    update: int | None
    time: str
    text: str
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def shown_time(self) -> str:
        """Time of the event to the second, with its time zone if it records one."""
        try:
            moment = datetime.fromisoformat(self.time)
        except ValueError:
            return self.time[:40]
        zone = moment.tzname() or ""
        return f"{moment:%Y-%m-%d %H:%M:%S} {zone}".strip()


@dataclass(frozen=True)
class Events:
    """All events of a run.

    Attributes:
        events: in the order in which they were written.
        source: name of the file that they are from; "" if there is none.
    """

    events: tuple[Event, ...]
    source: str

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of some kinds."""
        return [event for event in self.events if event.kind in kinds]


def read_events(run: Path) -> Events:
    """Read the events of a run directory: those of its file of events, else those that its log reports."""
    for file, read in ((EVENTS_FILE, _recorded), (str(_LOG), _logged)):
        try:
            with (run / file).open(encoding="utf-8", errors="replace") as stream:
                return Events(tuple(read(stream)), file)
        except OSError:
            continue
    return Events((), "")


def _recorded(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events of ``events.jsonl``; damaged lines are left out."""
    for line in lines:
        try:
            content = parse_json(line)
        except ValueError:
            continue
        if not isinstance(content, dict) or not isinstance(content.get("event"), str):
            continue
        update = content.get("update")
        known = isinstance(update, int) and 0 <= update < 1 << 53
        more = {key: value for key, value in content.items() if key not in ("event", "update", "time", "text")}
        time, text = (_text(content.get(key)) for key in ("time", "text"))
        yield Event(content["event"][:40], update if known else None, time, text, more)


def _text(value: object) -> str:
    found = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return found if len(found) <= _MAX_TEXT else f"{found[:_MAX_TEXT]}..."


_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? ([A-Z]+) (.*)")
_PATTERNS = (
    ("start", re.compile(r"deepspeed_nmt \S+ \(git [^)]*\), torch \S+ on (?P<host>[^,]+)(?:, job (?P<job>\S+))?$")),
    ("resume", re.compile(r"resuming after update (?P<update>\d+) \(")),
    ("skip", re.compile(r"update (?P<update>\d+) skipped: ")),
    ("spike", re.compile(r"update (?P<update>\d+): its loss of ")),
    (
        "rollback",
        re.compile(r"\d+ updates in a row skipped: rolling back from update (?P<update>\d+) to (?P<to>\d+),"),
    ),
    ("collapse", re.compile(r"(?:stopped: )?update (?P<update>\d+): the decoder (?:ignores|predicts worse)")),
    ("stop", re.compile(r"stopped by \S+ after update (?P<update>\d+);")),
    ("end", re.compile(r"done: (?P<update>\d+) updates, ")),
    ("failure", re.compile(r"(?:stopped|error): ")),
)


def _logged(lines: Iterable[str]) -> Iterator[Event]:
    """Yield the events that lines of a log report. A resume replaces the start that it belongs to."""
    start: Event | None = None
    for line in lines:
        found = _LINE.match(line)
        if found is None:
            continue
        time, text = found[1].replace(" ", "T"), found[3]
        matches = ((kind, pattern.match(text)) for kind, pattern in _PATTERNS)
        kind, match = next((pair for pair in matches if pair[1] is not None), ("", None))
        if match is None:
            continue
        named = match.groupdict()
        more = {key: named[key] for key in ("host", "job") if named.get(key)}
        event = Event(kind, _number(named.get("update")), time, _text(text), more)
        if kind == "rollback":
            event.more["to_update"] = _number(named["to"])
        if kind == "start":
            if start is not None:
                yield start
            start = event
            continue
        if start is not None:
            if kind == "resume":
                event = Event(kind, event.update, start.time, event.text, start.more)
            else:
                yield Event("start", 0, start.time, start.text, start.more)
            start = None
        yield event
        if kind == "collapse" and text.startswith("stopped: "):
            yield Event("failure", event.update, event.time, event.text)
    if start is not None:
        yield start


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 16 else None
