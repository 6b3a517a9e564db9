"""The files of a run as reports read them: its log as columns, its events, and others, as far as they can be read.

A run may be trained right now, may have lost files, or may come from elsewhere. So nothing in it is trusted: a pipe,
a device, or a link that leads out of the run is left out with a warning, as are damaged lines, and sizes are bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_nmt.console import logger
from deepspeed_nmt.evaluate.metrics import METRICS, Metric, validation_tag
from deepspeed_nmt.files import open_regular, resolved
from deepspeed_nmt.train.events import EVENTS_FILE
from deepspeed_nmt.train.log import METRICS_FILE

TOKENS, HOURS, GOODPUT = "train/target_tokens", "perf/hours", "perf/goodput"
SOURCE_RELIANCE, PREFIX_RELIANCE = "collapse/source_reliance", "collapse/prefix_reliance"
CROSS_SHARE = "collapse/cross_share/"
TRAIN_PERPLEXITY, VALID_PERPLEXITY, VALID_LOSS = "train/ppl", "valid/ppl", "valid/loss"
STARTS, ENDINGS = ("start", "resume"), ("stop", "end", "failure")
"""Events that begin and end a process of training."""
_MAX_POINTS = 2000
"""Bound on the points of a drawn curve: more than a wide screen has columns."""
_LARGEST_UPDATE = 1 << 53
"""Bound on the number of an update, which JavaScript counts exactly."""
_LARGEST_VALUE = 1e100
"""Magnitude from which a value of the log is not finite for a report, which computes with it."""
_MAX_TEXT = 600
_MAX_TAGS, _MAX_TAG, _MAX_LAYERS = 3000, 200, 2000
_MAX_BYTES, _MAX_LINE_BYTES, _MAX_NESTING = 1 << 30, 1 << 24, 20
_LAYER = re.compile(r"layer_(\d{1,4})")


def read_file(run: Path, name: str) -> bytes:
    """Return the content of a file of a run; empty if it is missing, or cannot or may not be read."""
    return b"".join(read_lines(run, name))


def read_object(run: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a run; an empty one if it cannot be read."""
    return _object(read_file(run, name)) or {}


def _object(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object, in which integers beyond 64 bits are floats.

    None if it is no object, or nested deeper than anything that `train` writes.
    """
    with suppress(ValueError, RecursionError):
        content = json.loads(
            text.decode("utf-8", errors="replace"),
            parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits),
        )
        if isinstance(content, dict) and _depth(content) <= _MAX_NESTING:
            return content
    return None


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items), default=0)


def read_lines(run: Path, name: str) -> Iterator[bytes]:
    """Yield the lines of a file of a run, long ones in parts; none if it is missing, or cannot or may not be read."""
    path = run / name
    try:
        with open_regular(path) as stream:
            # The file that is open, whatever links led to it and whoever changes them meanwhile.
            actual = Path(f"/proc/self/fd/{stream.fileno()}").readlink()
            if not actual.is_relative_to(resolved(run)):
                logger.warning("%s is left out: it leads out of the run, to %s", path, actual)
                return
            left = _MAX_BYTES
            while left > 0 and (line := stream.readline(min(_MAX_LINE_BYTES, left))):
                left -= len(line)
                yield line
            if not left:
                logger.warning("%s is read up to %d MiB only", path, _MAX_BYTES >> 20)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        logger.warning("%s is left out: it cannot be read (%s)", path, error.strerror or error)


class Series(dict[int, float]):
    """Values under one tag by update, in the order of updates, with NaN and infinities among them."""

    @property
    def last(self) -> float | None:
        """Last value, which may be NaN; None of an empty series."""
        return next(reversed(self.values()), None)

    @property
    def finite(self) -> Series:
        """The values that are finite."""
        return Series((update, value) for update, value in self.items() if math.isfinite(value))

    def best(self, *, higher_is_better: bool) -> tuple[int, float] | None:
        """Return the update and the value of the first best value; None if none is finite."""
        pairs = self.finite.items()
        return (max if higher_is_better else min)(pairs, key=lambda pair: pair[1], default=None)

    def thinned(self) -> Series:
        """Return at most about _MAX_POINTS points: the extremes of equal parts of the series, and its first and last.

        A part with a value that is not finite keeps one of them, so that the gap stays visible.
        """
        if len(self) <= _MAX_POINTS:
            return self
        updates, parts = list(self), _MAX_POINTS // 3
        kept = {updates[0], updates[-1]}
        for part in range(parts):
            inside = updates[part * len(self) // parts : (part + 1) * len(self) // parts]
            if finite := [update for update in inside if math.isfinite(self[update])]:
                kept |= {min(finite, key=self.__getitem__), max(finite, key=self.__getitem__)}
            kept.update([update for update in inside if not math.isfinite(self[update])][:1])
        return Series((update, self[update]) for update in sorted(kept))


class RunLog:
    """The log of a run: values by tag for each update, and the number of damaged lines."""

    def __init__(self, entries: Mapping[int, Mapping[str, float]], damaged: int = 0) -> None:
        self.damaged = damaged
        self._series: dict[str, Series] = {}
        for update in sorted(entries):
            for tag, value in entries[update].items():
                self._series.setdefault(tag, Series())[update] = value

    @classmethod
    def read(cls, run: Path) -> RunLog:
        """Read the log of a run directory; an empty one if there is none. Lines that are damaged are counted."""
        entries: dict[int, dict[str, float]] = {}
        damaged = 0
        tags: set[str] = set()
        for line in read_lines(run, METRICS_FILE):
            content = _object(line) or {}
            update = content.pop("update", None)
            if not isinstance(update, int) or isinstance(update, bool) or not 0 <= update < _LARGEST_UPDATE:
                damaged += bool(line.strip())
                continue
            values = _numbers(content)
            tags |= values.keys()
            if len(tags) > _MAX_TAGS:
                logger.warning("%s has more than %d tags; the rest is left out", run / METRICS_FILE, _MAX_TAGS)
                break
            entries.setdefault(update, {}).update(values)
        return cls(entries, damaged)

    @property
    def tags(self) -> list[str]:
        """All tags, in order of their first values."""
        return list(self._series)

    @property
    def update(self) -> int:
        """Number of the last update that was logged; 0 of an empty log."""
        return max((next(reversed(series)) for series in self._series.values()), default=0)

    @property
    def tokens(self) -> int | None:
        """Number of target tokens at the last entry; None of an empty log."""
        last = self.series(TOKENS).finite.last
        return None if last is None else int(last)

    def series(self, tag: str) -> Series:
        """Return the values under a tag; an empty series if there are none."""
        return self._series.get(tag, Series())

    def last(self, tag: str) -> float | None:
        """Return the last value under a tag, which may be NaN; None if there is none."""
        return self.series(tag).last

    def over_tokens(self, tag: str) -> tuple[list[float], list[float]]:
        """Return the target tokens at each value under a tag, and the values."""
        tokens, series = self.series(TOKENS), self.series(tag)
        updates = [update for update in series if update in tokens]
        return [tokens[update] for update in updates], [series[update] for update in updates]

    def cross_shares(self) -> dict[int, Series]:
        """Return the share of cross-attention in the update of each decoder layer, by the layer's number."""
        tags = {tag: _LAYER.fullmatch(tag.removeprefix(CROSS_SHARE)) for tag in self.tags if CROSS_SHARE in tag}
        layers = {int(match[1]): tag for tag, match in tags.items() if match and 1 <= int(match[1]) <= _MAX_LAYERS}
        return {layer: self.series(layers[layer]) for layer in sorted(layers)}

    def positions(self) -> dict[str, list[float]]:
        """Return hours and target tokens at some updates, for axes other than updates; no key for what is not logged.

        Between these updates both grow evenly enough to interpolate.
        """
        places: dict[str, list[float]] = {}
        for name, tag in (("hours", HOURS), ("tokens", TOKENS)):
            pairs = [(update, value) for update, value in self.series(tag).finite.items() if update > 0]
            if len(pairs) > 1:
                pairs = [*pairs[: -1 : max(1, len(pairs) // 500)], pairs[-1]]
                places[f"{name}_at"] = [0, *(float(update) for update, _ in pairs)]
                places[name] = [0.0, *(value for _, value in pairs)]
        return places


def _numbers(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of the log by tag, NaN for null."""
    values = {}
    for tag, value in content.items():
        if len(tag) <= _MAX_TAG and not isinstance(value, bool) and isinstance(value, int | float | None):
            number = math.nan if value is None else float(value)
            values[tag] = math.copysign(math.inf, number) if abs(number) >= _LARGEST_VALUE else number
    return values


def validation_measures(logs: Iterable[RunLog]) -> list[str]:
    """Return the measures that runs have logged: METRIC of the main set, SET/METRIC and SET/loss of others.

    Those of the main set have the order of METRICS, then that of the log, and the others that of the log.
    """
    prefix = validation_tag("")
    logged = dict.fromkeys(tag.removeprefix(prefix) for log in logs for tag in log.tags if tag.startswith(prefix))
    main = [name for name in METRICS if name in logged]
    programs = [name for name in logged if "/" not in name and name not in (*METRICS, "loss", "nll", "ppl")]
    of_sets = [name for name in logged if "/" in name and name.partition("/")[2] not in ("nll", "ppl")]
    return [*main, *programs, *of_sets]


def validation_metric(logs: Iterable[RunLog]) -> Metric:
    """Return the first metric of translations that one of the runs has logged; BLEU if none has."""
    tags = {tag for log in logs for tag in log.tags}
    return next((metric for metric in METRICS.values() if validation_tag(metric.name) in tags), METRICS["bleu"])


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each run: as many last parts of its path as make them differ, and no bare number."""
    parts = [resolved(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count - (count == 1 and part[-1].isdecimal()) :]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


class Event(NamedTuple):
    """An event of a run: its kind, the update before it, ISO 8601 time and a sentence, as far as recorded."""

    kind: str
    update: int | None
    time: str
    text: str
    details: dict[str, Any]

    @property
    def shown_time(self) -> str:
        """Time of the event to the second, with its time zone if it records one."""
        try:
            moment = datetime.fromisoformat(self.time)
        except ValueError:
            return self.time[:40]
        return f"{moment:%Y-%m-%d %H:%M:%S} {moment.tzname() or ''}".strip()


def read_events(run: Path) -> list[Event]:
    """Read the events of a run directory; none if there is no file. Damaged lines are left out."""
    return [event for line in read_lines(run, EVENTS_FILE) if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    content = _object(line)
    if content is None or not isinstance(content.get("event"), str):
        return None
    update = content.get("update")
    known = isinstance(update, int) and 0 <= update < _LARGEST_UPDATE
    details = {key: value for key, value in content.items() if key not in ("event", "update", "time", "text")}
    time, text = (_text(content.get(key)) for key in ("time", "text"))
    return Event(content["event"][:40], update if known else None, time, text, details)


def _text(value: object) -> str:
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return shortened(text, _MAX_TEXT)


def shortened(text: str, most: int) -> str:
    """Return a text, cut after ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}..."
