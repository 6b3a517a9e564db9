"""Results of late metrics: programs are started, and the numbers are read that they or their jobs write.

A validation with late values is recorded in the run, with what choosing the best checkpoint needs. So its result can
be taken in by a resumed run, and by `choose-best` when training has ended.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import MetricError, counted
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, ending
from deepspeed_nmt.evaluate.metrics import Metric, validation_tag
from deepspeed_nmt.files import atomic_write_text, parse_json
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.validation import MAIN, MEAN, ValidationConfig
from deepspeed_nmt.run.validation_texts import ValidationTexts
from deepspeed_nmt.train.choosing import update_best_late
from deepspeed_nmt.train.metrics import Metrics
from deepspeed_nmt.train.validation import Choice, LateResult, Validation


def choice_by(metric: Metric | None, chooses: str, sets: Iterable[str], suffix: str) -> Choice:
    """Return the choice of the best checkpoint by a metric, or by the loss.

    Args:
        metric: the metric; None for the loss.
        chooses: name of the set, or MEAN.
        sets: names of all sets.
        suffix: what the description of the measure ends in.
    """
    name = "loss" if metric is None else metric.name
    of = list(sets) if chooses == MEAN else [chooses]
    return Choice(
        by=validation_tag(name, chooses) + suffix,
        tags=tuple(validation_tag(name, each) for each in of),
        losses=tuple(validation_tag("loss", each) for each in of),
        mean=(validation_tag(name, MEAN), validation_tag("loss", MEAN)) if chooses == MEAN else ("", ""),
        sign=1 if metric is not None and metric.higher_is_better else -1,
        # Losses, which are not rounded, decide alone.
        least=math.inf if metric is None else metric.least,
        decimals=2 if metric is None else metric.decimals,
    )


@dataclass(frozen=True)
class _Record:
    """A validation with late values, on disk.

    Attributes:
        update: update after which the model was validated.
        target_tokens: target tokens that the run had seen.
        values: values that are known, by tag.
        late: tags of those that are pending.
        choice: how the best checkpoint is chosen.
    """

    update: int
    target_tokens: int
    values: dict[str, float]
    late: tuple[str, ...]
    choice: Choice

    @classmethod
    def read(cls, path: Path) -> _Record | None:
        """Read a record; None if it is lost or damaged."""
        try:
            content = parse_json(path.read_bytes())
            record = cls(**{**content, "late": tuple(content["late"]), "choice": Choice.read(content["choice"])})
            record.choice.validation(record.values)
            return record
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def validation(self) -> Validation | None:
        """Return the validation; None while a value that chooses is pending."""
        return None if set(self.late) & set(self.choice.tags) else self.choice.validation(self.values)


class LateMetrics:
    """The late metrics of a run. Only rank 0 has one.

    Args:
        run: run directory.
        config: settings of validation.
    """

    def __init__(self, run: Path, config: ValidationConfig) -> None:
        sets = (MAIN, *config.sets)
        self._main = ValidationTexts(run, MAIN)
        self._metrics: dict[str, tuple[CommandMetric, ValidationTexts]] = {
            validation_tag(metric.name, name): (metric, ValidationTexts(run, name))
            for name in sets
            for metric in config.commands.values()
            if metric.late
        }
        self._processes: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        self._reported: set[tuple[int, str]] = set()

    def start(self, update: int, target_tokens: int, values: Mapping[str, float], choice: Choice) -> None:
        """Start all programs on the translations after an update, and record which values are pending.

        Args:
            update: number of the update.
            target_tokens: target tokens seen so far.
            values: values that are known, by tag.
            choice: how the best checkpoint is chosen.

        Raises:
            OSError: if that cannot be recorded.
        """
        started = []
        for tag, (metric, texts) in self._metrics.items():
            result = texts.result(update, metric.name)
            result.unlink(missing_ok=True)  # of the same update before a rollback
            try:
                log = texts.path(update, f"{metric.name}.log")
                self._processes[update, tag] = metric.start(texts.scored(update, metric.name), result, log)
            except (MetricError, OSError) as error:
                logger.warning("%s; %s of update %d is not known", error, tag, update)
                continue
            started.append(tag)
        self._write(_Record(update, target_tokens, dict(values), tuple(started), choice))

    def has_pending_score(self, update: int) -> bool:
        """Return True if the score of a validation is pending."""
        record = _Record.read(self._main.path(update, "json"))
        return record is not None and record.validation() is None

    def pending_updates(self) -> list[int]:
        """Return the updates of validations some of whose values are pending, oldest first."""
        return [record.update for record in self._records() if record.late]

    def collect(self, pending: Sequence[int]) -> list[LateResult]:
        """Return the late values that have come, and what is known of validations with pending scores, oldest first.

        Args:
            pending: updates of these validations.
        """
        records = list(self._records())
        # Of a record that is lost nothing will come.
        lost = sorted(set(pending) - {record.update for record in records})
        results = [LateResult(update, 0, {}, Validation({}, Choice(""), -math.inf, 0.0)) for update in lost]
        for record in records:
            after = self._with_results(record)
            if after != record:
                try:
                    self._write(after)
                except OSError as error:
                    logger.error("%s; late values are read again later, and training continues", error)
            known = after.choice.validation(after.values).values
            before = record.choice.validation(record.values).values
            new = {tag: value for tag, value in known.items() if tag not in before}
            if new or after.update in pending:
                results.append(LateResult(after.update, after.target_tokens, new, after.validation()))
        return results

    def _with_results(self, record: _Record) -> _Record:
        """Return a record with the values that have come, and without those that will not come."""
        values, late = dict(record.values), list(record.late)
        for tag in record.late:
            if tag not in self._metrics:  # of settings that have changed
                late.remove(tag)
                continue
            metric, texts = self._metrics[tag]
            try:
                value = metric.read(texts.result(record.update, metric.name))
            except (MetricError, OSError) as error:
                value = None
                self._warn(record.update, tag, f"{error}; it is read again at the next validation")
            process = self._processes.get((record.update, tag))
            if value is not None:
                values[tag] = value
                late.remove(tag)
            elif process is not None and (status := process.poll()):
                log = texts.path(record.update, f"{metric.name}.log")
                self._warn(
                    record.update, tag, f"{metric.path} {ending(status)}, so {tag} is not known; see {log}", ends=True
                )
                late.remove(tag)
        for tag in set(record.late) - set(late):
            self._processes.pop((record.update, tag), None)
        return replace(record, values=values, late=tuple(late))

    def _warn(self, update: int, tag: str, message: str, *, ends: bool = False) -> None:
        """Warn once of a late value, and once of its end."""
        if ends or (update, tag) not in self._reported:
            self._reported.add((update, tag))
            logger.warning("update %d: %s", update, message)

    def _records(self) -> Iterator[_Record]:
        found = map(_Record.read, self._main.directory.glob("update-*.json"))
        return iter(sorted((each for each in found if each is not None), key=lambda each: each.update))

    def _write(self, record: _Record) -> None:
        atomic_write_text(self._main.path(record.update, "json"), json.dumps(asdict(record), indent=1))


def choose_again(run: Run) -> str:
    """Log the late values of a run that have come, choose its best checkpoint by them, and return a line about it.

    Args:
        run: a run that is not being trained.

    Raises:
        CheckpointError: if it has no checkpoint, or the newest one is damaged.
        OSError: if the choice cannot be recorded.
    """
    store = run.checkpoints
    newest = store.open("last")
    before = newest.progress
    results = LateMetrics(run.path, run.config.validation).collect(before.awaited)
    if any(result.values for result in results):
        with Metrics(run.path, True, before.update, before.update) as metrics:
            for result in results:
                metrics.log_late(result)
    kept = [store.update_of(name) for name in store.names()]
    progress, _ = update_best_late(before, results, kept, lambda update, than: True, warn=True)
    if progress != before:
        store.restate(newest, progress)
    pending = f"; {counted(len(progress.awaited), 'scores')} still to come" if progress.awaited else ""
    best = store.best()
    if best is None or progress.best_score is None:
        return f"{run.path} has no best checkpoint yet{pending}"
    was = "" if progress.best_update == before.best_update else f", before it update {before.best_update}"
    value = run.config.validation.value_of(progress.best_by, progress.best_score)
    known = "" if progress.best_score == -math.inf else f" {value:.4f}"
    return f"best checkpoint: {store.directory / best} ({progress.best_by}{known}{was}){pending}"
