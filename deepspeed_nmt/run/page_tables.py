"""Tables of the page of a run: its settings, data, environment, starts and validation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_nmt.data.directory import Meta
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.evaluate.page.content import Table
from deepspeed_nmt.evaluate.page.events import STARTS, Events
from deepspeed_nmt.evaluate.page.log import RunLog
from deepspeed_nmt.evaluate.page.texts import VALIDATION
from deepspeed_nmt.evaluate.table import cell, setting
from deepspeed_nmt.files import parse_json
from deepspeed_nmt.run.directory import ORIGIN_FILE
from deepspeed_nmt.run.manifest import DataRecord
from deepspeed_nmt.run.scores import recorded_scores
from deepspeed_nmt.run.validation import LOSSES

RESOLVED_FILE = "resolved.json"


@dataclass(frozen=True)
class Compared:
    """The recipe that a run is compared with.

    Attributes:
        recipe: its name.
        settings: its settings, defaults included.
        is_guessed: True if nothing names it, and it is the one that differs least.
    """

    recipe: str
    settings: Mapping[str, object]
    is_guessed: bool


def settings_tables(own: Mapping[str, object], compared: Compared) -> list[Table]:
    """Return the settings that differ from those of a recipe, and the others."""
    other = compared.settings
    changed = differing(own, other)
    rows = [[key, _setting(own, key), _setting(other, key)] for key in changed]
    same = [[key, setting(own[key])] for key in own if key not in changed]
    note = (
        "No command is recorded that names a recipe; this is the one that differs least."
        if compared.is_guessed
        else ""
    )
    title = f"Differences from the recipe {compared.recipe}"
    tables = [Table(title, ["setting", "this run", "recipe"], rows, note=note)] if rows else []
    return [*tables, Table("Settings as in the recipe", ["setting", "value"], same, folded=True)]


def data_tables(record: DataRecord | None, metas: Mapping[str, Meta]) -> list[Table]:
    """Return the data that a run was last trained on.

    Args:
        record: record of the run; None if it cannot be read.
        metas: descriptions of its data directories that can be reached, by path.
    """
    if record is None:
        return []
    weights = {each.path: each for each in record.corpora}
    rows, removed, inputs = [], [], []
    for path in dict.fromkeys([record.path, *weights]):
        meta, corpus = metas.get(path), weights.get(path)
        train = None if meta is None else meta.splits.get("train")
        valid = None if meta is None else meta.splits.get("valid")
        rows.append(
            [
                path,
                cell(train.pairs if train else None),
                cell(train.source.tokens if train else None),
                cell(train.target.tokens if train else None),
                cell(valid.pairs if valid else None),
                cell(meta.vocabulary_size if meta else None),
                "-" if corpus is None else ", ".join(f"{each.value:g}" for each in corpus.weights),
                (record.fingerprint if corpus is None else corpus.fingerprint)[:12],
            ]
        )
        if meta is None:
            continue
        removed += [[reason, f"{count:,}", path] for reason, count in meta.removed.items() if count]
        inputs += [
            [name, f"{each.lines:,}", each.sha256[:12], each.path]
            for name, files in meta.inputs.items()
            for each in files
        ]
    head = ["directory", "pairs", "source tokens", "target tokens", "validation pairs", "vocabulary", "weight"]
    note = "" if metas else "The data directory cannot be reached from here."
    tables = [Table("Corpora", [*head, "fingerprint"], rows, note=note)]
    if removed:
        tables.append(Table("Pairs removed by `prepare`", ["reason", "pairs", "from"], removed))
    if inputs:
        tables.append(Table("Input files", ["text", "lines", "sha256", "file"], inputs, folded=True))
    return tables


def environment_tables(run: Path, found: Mapping[str, Any]) -> list[Table]:
    """Return where and with what a run was last started.

    Args:
        run: run directory.
        found: its recorded environment.
    """
    resolved_settings = json_object(run / RESOLVED_FILE)
    rows = [[key, _words(found[key])] for key in ("deepspeed_nmt", "git", "ranks", "threads", "gpus") if key in found]
    rows += [[key, _words(value)] for key, value in _mapping(found.get("slurm")).items()]
    rows += [[key, _words(found[key])] for key in ("python", "platform") if key in found]
    rows += [[key.replace("_", " "), _words(value)] for key, value in resolved_settings.items() if value is not None]
    if origin := json_object(run / ORIGIN_FILE):
        rows += [[f"origin: {key}", _words(value)] for key, value in origin.items()]
    tables = [Table("The last start", ["what", "value"], rows)] if rows else []
    packages = [[name, _words(value)] for name, value in _mapping(found.get("packages")).items() if value]
    if packages:
        tables.append(Table("Packages", ["package", "version"], packages, folded=True))
    if command := plain_list(found.get("command")):
        words = [Path(str(command[0])).name, *map(str, command[1:])]
        tables.append(Table("Command of the last start", ["word", "argument"], _arguments(words), folded=True))
    return tables


def start_tables(events: Events) -> list[Table]:
    """Return the starts of a run."""
    rows = []
    for number, event in enumerate(events.of(*STARTS), 1):
        more = ", ".join(f"{key} {_words(value)}" for key, value in event.more.items() if value is not None)
        at = "-" if event.update is None else f"{event.update:,}"
        rows.append([f"{number}", event.shown_time, at, more, event.text])
    if not rows:
        return []
    return [Table("Starts", ["start", "time", "after update", "on", "text"], rows, folded=len(rows) > 12)]


def validation_tables(run: Path, log: RunLog) -> list[Table]:
    """Return the measures of validation sets, and the scores of test sets that reports have recorded."""
    rows = []
    for tag in log.tags:
        name = tag.removeprefix("valid/")
        measure = name.rpartition("/")[2]
        if name == tag or measure in ("nll", "ppl"):
            continue
        series = log.series(tag)
        best = series.best(higher_is_better=is_higher_better(run, name))
        at, value = ("-", "-") if best is None else (f"{best[0]:,}", cell(best[1]))
        rows.append([name, cell(series.last), value, at, _signature(run, name)])
    head = ["measure", "last", "best", "at update", "signature"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    tables = [Table("Measures", head, rows)] if rows else []
    scores = [
        [each.text, each.metric, f"{each.value:.2f}", f"{each.lines:,}", each.checkpoint, each.signature]
        for each in recorded_scores(run)
    ]
    if scores:
        head = ["test set", "metric", "score", "lines", "checkpoint", "signature"]
        tables.append(Table("Test scores", head, scores))
    return tables


def is_higher_better(run: Path, measure: str) -> bool:
    """Return the direction of a measure of validation: a loss, a metric, or another of SET/NAME or NAME.

    Args:
        run: run directory, where the signature of a measure that is no metric of this version tells its direction.
        measure: its name.
    """
    name = measure.rpartition("/")[2]
    if name in METRICS:
        return METRICS[name].higher_is_better
    return name not in LOSSES and "lower" not in _signature(run, measure).split("|")


def _signature(run: Path, name: str) -> str:
    of, _, metric = name.rpartition("/")
    found = json_object(run / VALIDATION / (of or "main") / "signatures.json").get(metric)
    return found if isinstance(found, str) else ""


def differing(own: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the settings that two configurations do not share, or that differ."""
    return [key for key in dict.fromkeys([*own, *other]) if own.get(key) != other.get(key)]


def _setting(settings: Mapping[str, object], key: str) -> str:
    return setting(settings[key]) if key in settings else "-"


def _arguments(words: Sequence[str]) -> list[list[str]]:
    """Return the words of a command as rows, an option with its value."""
    rows: list[list[str]] = []
    for word in words:
        if rows and not word.startswith("-") and "=" not in word and rows[-1][1].startswith("-"):
            rows[-1][1] += f" {word}"
        else:
            rows.append([f"{len(rows) + 1}", word])
    return rows


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(each)}" for key, each in value.items())
    return "-" if value is None else str(value)


def json_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if it cannot be read."""
    with suppress(OSError, ValueError):
        content = parse_json(file.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def plain_list(value: object) -> list[object]:
    """Return a value that is a list; an empty list otherwise."""
    return value if isinstance(value, list) else []
