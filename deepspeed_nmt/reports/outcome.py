"""The outcome of a run: its settings, its log, and its progress, as far as they can be read.

Runs may be still trained, or have lost files. So what a run does not record is unknown, and never an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import cell, setting
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.errors import CheckpointError, ConfigError, UserError
from deepspeed_nmt.evaluate.metrics import decimals_of, validation_tag
from deepspeed_nmt.files import resolved
from deepspeed_nmt.reports.run_log import (
    GOODPUT,
    HOURS,
    SOURCE_RELIANCE,
    TRAIN_PERPLEXITY,
    VALID_LOSS,
    VALID_PERPLEXITY,
    RunLog,
    read_file,
    shortened,
)
from deepspeed_nmt.reports.text_scores import RecordedScore
from deepspeed_nmt.run.directory import CHECKPOINTS, CONFIG_FILE, DATA_FILE, DataRecord, recorded_config
from deepspeed_nmt.run.plans import Plans
from deepspeed_nmt.train.checkpoint import CheckpointStore, Chosen
from deepspeed_nmt.train.progress import Progress

_RESULTS = {
    "updates": ("updates", 0, ""),
    "target_tokens": ("target tokens", 0, ""),
    "hours": ("hours in updates", 2, ""),
    "goodput": ("goodput", 3, GOODPUT),
    "parameters": ("parameters", 0, ""),
    "train_ppl": ("training perplexity", 3, TRAIN_PERPLEXITY),
    "valid_loss": ("validation loss", 3, VALID_LOSS),
    "valid_ppl": ("validation perplexity", 3, VALID_PERPLEXITY),
    "source_reliance": ("source reliance", 3, SOURCE_RELIANCE),
}
"""Title and decimals of each result by key of the JSON, and the tag of one that is the last value of the log."""
_MAX_IN_LEGEND = 2
"""Bound on the settings that name a curve."""


@dataclass(frozen=True)
class Outcome:
    """Settings of a run, and what came of it so far: its log, which may be empty, and its newest readable progress.

    ``chosen`` is the best checkpoint by late scores, if `choose-best` has chosen it and it is still there.
    """

    path: Path
    config: RunConfig
    log: RunLog
    progress: Progress | None
    chosen: Chosen | None = None

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read a run; nothing is verified or restored.

        A directory that is no run, or whose settings cannot be read, is a ConfigError.
        """
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} has no {CONFIG_FILE}; give a directory made by `train`")
        if not resolved(path / CONFIG_FILE).is_relative_to(resolved(path)):
            raise ConfigError(
                f"{path / CONFIG_FILE} leads out of the run, to {resolved(path / CONFIG_FILE)}; remove it"
            )
        return cls(path, recorded_config(path), RunLog.read(path), *_progress(path))

    @property
    def updates(self) -> int:
        """Number of updates made, as the log or a checkpoint records them."""
        return max(self.log.update, 0 if self.progress is None else self.progress.update)

    @property
    def target_tokens(self) -> int | None:
        """Target tokens seen."""
        if self.log.tokens is None and self.progress is not None:
            return self.progress.target_tokens
        return self.log.tokens

    @property
    def hours(self) -> float | None:
        """Hours spent in updates."""
        logged = self.log.last(HOURS)
        return self.progress.train_seconds / 3600.0 if logged is None and self.progress is not None else logged

    @property
    def is_finished(self) -> bool:
        """True if training is over. Without a checkpoint, a run that stopped early counts as unfinished."""
        return self.config.training.ends_at(self.progress or Progress(update=self.updates))

    @property
    def status(self) -> str:
        """``finished``, or a phrase for the updates made so far."""
        return "finished" if self.is_finished else f"{self.updates:,} of {self.config.training.max_updates:,} updates"

    @cached_property
    def data_record(self) -> DataRecord | None:
        """Record of the data that the run was last trained on; None if it cannot be read."""
        with suppress(ValidationError):
            return DataRecord.model_validate_json(read_file(self.path, DATA_FILE))
        return None

    @property
    def data(self) -> str | None:
        """Data that the run was last trained on: a directory, or those of a mixture, as `train --data` takes them."""
        if (record := self.data_record) is None:
            return None
        return " ".join(str(corpus.option) for corpus in record.corpora) or record.path

    @property
    def fingerprint(self) -> str | None:
        """Beginnings of the fingerprints of its data's directories, which tell their contents apart."""
        if (record := self.data_record) is None:
            return None
        return " ".join(part.fingerprint[:12] for part in record.corpora or (record,))

    def best(self, measure: str) -> tuple[int, float] | None:
        """Return update and best value of a measure of validation: a metric, loss, or SET/ and one of them.

        None if it is not logged, or is a program that the settings do not name any more.
        """
        if not self.config.validation.knows(measure):
            return None
        higher = self.config.validation.is_higher_better(measure)
        return self.log.series(validation_tag(measure)).best(higher_is_better=higher)

    def parameters(self, plans: Plans) -> int | None:
        """Return the number of parameters, frozen ones included; ``plans`` knows models of other runs."""
        with suppress(UserError, OSError):
            return plans.parameters(self.config.for_update(self.updates), open_tokenizer(self.path).vocabulary)[1]
        return None

    def row(
        self, settings: Sequence[str], measures: Sequence[str], plans: Plans, scores: Sequence[RecordedScore]
    ) -> dict[str, Any]:
        """Return what is known of a run, for JSON, with these settings, measures of validation, and test scores."""
        flat = self.config.flat()
        validation = {}
        for measure in measures:
            best, last = self.best(measure), self.log.last(validation_tag(measure))
            if last is not None:
                validation[measure] = {"last": last, "best": best and best[1]}
        return {
            "path": str(self.path),
            "settings": {key: flat.get(key) for key in settings},
            "data": self.data,
            "fingerprint": self.fingerprint,
            "status": self.status,
            "updates": self.updates,
            "target_tokens": self.target_tokens,
            "hours": self.hours,
            "parameters": self.parameters(plans),
            **{key: self.log.last(tag) for key, (*_, tag) in _RESULTS.items() if tag},
            "cross_share": {layer: series.last for layer, series in self.log.cross_shares().items()},
            "validation": validation,
            "test": [{**score.model_dump(exclude={"key"}), "sha256": score.key.text} for score in scores],
        }


def _progress(path: Path) -> tuple[Progress | None, Chosen | None]:
    store = CheckpointStore(path / CHECKPOINTS)
    with suppress(CheckpointError):  # a link to a disk that is not mounted
        chosen, best = store.chosen(), store.best()
        if chosen is not None and (best is None or store.update_of(best) != chosen.update):
            chosen = None
        for name in reversed(store.names()):
            if (progress := store.progress(name)) is not None:
                return progress, chosen
    return None, None


def differing(configs: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the settings in which configurations differ, also those that some lack."""
    keys = dict.fromkeys(key for flat in configs for key in flat)
    return [key for key in keys if any(flat.get(key) != configs[0].get(key) for flat in configs)]


def legend(name: str, settings: Mapping[str, object]) -> str:
    """Return the words for a run's curve: its name, and the settings in which it differs if they are few."""
    if not 0 < len(settings) <= _MAX_IN_LEGEND:
        return name
    values = (f"{key.rpartition('.')[2]}={shortened(setting(value), 40)}" for key, value in settings.items())
    return f"{name} ({', '.join(values)})"


def comparison_table(rows: Mapping[str, Mapping[str, Any]], measures: Sequence[str]) -> list[list[str]]:
    """Return the cells of a comparison: a line for each setting and result of :meth:`Outcome.row`, a column a run."""
    runs = list(rows.values())
    lines = [["", *rows]]
    lines += [[key, *(setting(row["settings"][key]) for row in runs)] for key in runs[0]["settings"]]
    for key, title in (("data", "data"), ("fingerprint", "fingerprint of the data")):
        if len({row[key] for row in runs}) > 1:
            lines.append([title, *(cell(row[key]) for row in runs)])
    lines.append(["status", *(row["status"] for row in runs)])
    lines += [[title, *(cell(row[key], digits) for row in runs)] for key, (title, digits, _) in _RESULTS.items()]
    for measure in measures:
        digits = decimals_of(measure)
        for which in ("last", "best"):
            values = [row["validation"].get(measure, {}).get(which) for row in runs]
            lines.append([f"validation {measure}, {which}", *(cell(value, digits) for value in values)])
    identity = ("metric", "text", "sha256", "signature")
    scores = [defaultdict[tuple[str, ...], list[Any]](list) for _ in runs]
    for row, of_run in zip(runs, scores, strict=True):
        for score in row["test"]:
            of_run[tuple(score[name] for name in identity)].append(score)
    scored = dict.fromkeys(one for of_run in scores for one in of_run)
    alike = Counter(one[:2] for one in scored)  # other text of the same name is another line, as is another signature
    for one in scored:
        metric, text, sha256, signature = one
        which = f" ({sha256[:8]}, {signature})" if alike[metric, text] > 1 else ""
        cells = [of_run[one] for of_run in scores]
        names = {score["checkpoint"].partition("-")[0] for of_run in cells for score in of_run}
        named = len(names) > 1 or any(len(of_run) > 1 for of_run in cells)
        lines.append([f"{metric} of {text}{which}", *(_values(of_run, named) for of_run in cells)])
    return lines


def _values(scores: Sequence[Mapping[str, Any]], named: bool) -> str:
    """Return the values of some scores, ``named`` with the checkpoint of each."""
    values = [cell(score["value"], decimals_of(score["metric"])) for score in scores]
    if named:
        values = [f"{value} ({score['checkpoint']})" for value, score in zip(values, scores, strict=True)]
    return ", ".join(values) or cell(None)
