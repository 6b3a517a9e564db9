"""Late metrics: their programs are started by training, and their numbers are read by `choose-best`.

A validation with late values is recorded in the run, with what choosing the best checkpoint needs. A program, or its
job, writes its number into a file beside the translations. Training never reads it. It keeps the newest
``validation.late_keep`` checkpoints whose scores are to come, and `choose-best` chooses, during training or after it.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import MetricError, counted
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, ending
from deepspeed_nmt.evaluate.metrics import validation_tag
from deepspeed_nmt.files import atomic_write_text, read_regular
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.validation_sets import ValidationTexts
from deepspeed_nmt.train.checkpoint import Chosen
from deepspeed_nmt.train.configuration import MAIN, ValidationConfig
from deepspeed_nmt.train.events import Events
from deepspeed_nmt.train.log import Metrics
from deepspeed_nmt.train.progress import Count, Progress
from deepspeed_nmt.train.validation import Choice, Validation, record_best


@dataclass(frozen=True)
class ValidationRecord:
    """A validation with late values, on disk: ``values`` that are known by tag, and tags of late ones."""

    update: Count
    target_tokens: Count
    values: dict[str, float]
    late: tuple[str, ...]
    choice: Choice

    @classmethod
    def read(cls, path: Path) -> ValidationRecord | None:
        """Read a record; None if it is lost or damaged."""
        try:
            record = TypeAdapter(cls).validate_json(read_regular(path))
            record.choice.validation(record.values)
        except (OSError, ValueError, KeyError, ArithmeticError):
            logger.warning("%s is not a record that validation writes; its late scores do not count", path)
            return None
        return record

    @property
    def awaits_score(self) -> bool:
        """True if a value that chooses is to come."""
        return bool(set(self.late) & set(self.choice.tags))

    @property
    def validation(self) -> Validation:
        """The validation, with the values that are known."""
        return self.choice.validation(self.values)

    def rank(self) -> tuple[float, float]:
        """Return a key that sorts validations, the best last."""
        return self.choice.rank(self.validation.score, self.validation.loss)


class LateScores:
    """The late metrics of a run. Only rank 0 has one."""

    def __init__(self, run: Path, config: ValidationConfig) -> None:
        self._keep = config.late_keep
        self._directory = ValidationTexts(run, MAIN).directory
        self.metrics: dict[str, tuple[CommandMetric, ValidationTexts]] = {
            validation_tag(metric.name, name): (metric, ValidationTexts(run, name))
            for name in (MAIN, *config.sets)
            for metric in config.commands.values()
            if metric.late
        }
        self._processes: list[tuple[str, Path, subprocess.Popen[bytes]]] = []

    def start(self, update: int, target_tokens: int, values: Mapping[str, float], choice: Choice) -> bool:
        """Start all programs on the translations after an update; return True if a value that chooses is to come."""
        for name, log, process in self._processes:
            if status := process.poll():
                logger.warning("%s %s; see %s", name, ending(status), log)
        self._processes = [started for started in self._processes if started[2].poll() is None]
        started = []
        for tag, (metric, texts) in self.metrics.items():
            result, log = texts.path(update, f"{metric.name}.result"), texts.path(update, f"{metric.name}.log")
            result.unlink(missing_ok=True)  # of the same update before a rollback
            try:
                process = metric.start(texts.scored(update, metric.name), result, log)
            except (MetricError, OSError) as error:
                logger.warning("%s; %s of update %d is not known", error, tag, update)
                continue
            self._processes.append((f"{metric.path} of update {update}", log, process))
            started.append(tag)
        if not started:
            return False
        record = ValidationRecord(update, target_tokens, dict(values), tuple(started), choice)
        self._write(record)
        return record.awaits_score

    def records(self) -> list[ValidationRecord]:
        """Return the recorded validations, oldest first."""
        records = map(ValidationRecord.read, self._directory.glob("update-*.json"))
        return sorted((record for record in records if record is not None), key=lambda record: record.update)

    def awaiting(self) -> list[int]:
        """Return the updates of the newest ``validation.late_keep`` validations whose scores are to come."""
        return [record.update for record in self.records() if record.awaits_score][-self._keep :]

    def read(self, record: ValidationRecord) -> ValidationRecord:
        """Return a record with the values that have come, which is written if there are any."""
        values, late = dict(record.values), []
        for tag in record.late:
            if tag not in self.metrics:  # of settings that have changed
                continue
            metric, texts = self.metrics[tag]
            value = None
            try:
                value = metric.read(texts.path(record.update, f"{metric.name}.result"))
            except (MetricError, OSError) as error:
                logger.warning("update %d: %s; correct it, and choose again", record.update, error)
            if value is None:
                late.append(tag)
            else:
                values[tag] = value
        after = replace(record, values=values, late=tuple(late))
        if after != record:
            self._write(after)
        return after

    def _write(self, record: ValidationRecord) -> None:
        path = self._directory / f"update-{record.update:07d}.json"
        atomic_write_text(path, json.dumps(asdict(record), indent=1))


def choose_best(run: Run) -> str:
    """Log the late values of a run that have come, choose its best checkpoint by them, and return a line about it.

    A training of the run may go on meanwhile.
    """
    store, validation = run.checkpoints, run.config.validation
    late, chooser = LateScores(run.path, validation), validation.commands.get(validation.best_measure)
    # By a score that does not come late, training chooses, and goes on to.
    is_late = chooser is not None and chooser.late
    progress = store.open("last", verify=False).progress
    with store.choosing():
        before = late.records()
        records = [late.read(record) for record in before]
        with Metrics(run.path, True, None, progress.update) as metrics:
            for old, new in zip(before, records, strict=True):
                known = old.validation.values
                if values := {tag: value for tag, value in new.validation.values.items() if tag not in known}:
                    metrics.log(Progress(new.update, target_tokens=new.target_tokens), values, ", late values")
        # The score of a validation whose program could not be started does not come.
        scored = [
            record
            for record in records
            if is_late and record.choice.by == progress.best_by and math.isfinite(record.validation.score)
        ]
        kept = {store.update_of(name) for name in store.names()}
        best = max((record for record in scored if record.update in kept), key=ValidationRecord.rank, default=None)
        earlier = store.chosen()
        if best is not None and (
            earlier is None
            or earlier.by != best.choice.by
            or earlier.update not in kept
            or best.rank() > best.choice.rank(earlier.score, earlier.loss)
        ):
            found = best.validation
            store.choose(Chosen(update=best.update, by=best.choice.by, score=found.score, loss=found.loss))
            record_best(Events(run.path, active=True), best.update, found)
        pending = sum(record.awaits_score for record in records)
        to_come = f"; {counted(pending, 'scores')} to come" if pending else ""
        name, chosen = store.best(), store.chosen()
    if name is None:
        return f"{run.path} has no best checkpoint yet{to_come}"
    how = "by its loss: no late score has come" if is_late else "as training has chosen it"
    if chosen is not None and store.update_of(name) == chosen.update:
        how = f"{chosen.by.partition(' ')[0]} {validation.value_of(chosen.by, chosen.score):.4f}"
    return f"best checkpoint: {store.directory / name} ({how}){to_come}"
