"""The outcome of a run: its settings, its log, and its progress, as far as they can be read.

Reports compare runs that were made by several versions, are still trained, or have lost files. So what a run does not
record is unknown, and never an error.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deepspeed_nmt.config import RunConfig, load_recorded
from deepspeed_nmt.data.directory import open_tokenizer
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError, UserError
from deepspeed_nmt.evaluate.curves import HOURS, RunCurves
from deepspeed_nmt.evaluate.metrics import validation_tag
from deepspeed_nmt.run.manifest import CHECKPOINTS, CONFIG_FILE, DataRecord
from deepspeed_nmt.run.plans import Plans
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.store import CheckpointStore


@dataclass(frozen=True)
class Outcome:
    """Settings of a run, and what came of it so far.

    Attributes:
        path: run directory.
        config: settings of the run.
        curves: log of the run; None if it has logged nothing.
        progress: progress that the newest readable checkpoint records; None if there is none.
    """

    path: Path
    config: RunConfig
    curves: RunCurves | None
    progress: Progress | None

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """Read a run; nothing is verified or restored.

        Raises:
            ConfigError: if it is no run directory, or its settings cannot be read.
        """
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"RUN must be a directory made by `train`, but {path} has no {CONFIG_FILE}")
        curves = None
        with suppress(DataError):
            curves = RunCurves(path)
        return cls(path, load_recorded(path / CONFIG_FILE), curves, _progress(path))

    @property
    def updates(self) -> int:
        """Number of updates made, as the log or a checkpoint records them."""
        logged = 0 if self.curves is None else self.curves.updates
        return max(logged, 0 if self.progress is None else self.progress.update)

    @property
    def target_tokens(self) -> int | None:
        """Target tokens seen."""
        if self.curves is not None:
            return int(self.curves.tokens)
        return None if self.progress is None else self.progress.target_tokens

    @property
    def hours(self) -> float | None:
        """Hours spent in updates; runs of older versions record them in checkpoints only."""
        logged = self.last(HOURS)
        if logged is None and self.progress is not None:
            return self.progress.train_seconds / 3600.0
        return logged

    @property
    def is_finished(self) -> bool:
        """True if training is over. Without a checkpoint, a run that stopped early counts as unfinished."""
        return self.config.training.ends_at(self.progress or Progress(update=self.updates))

    @property
    def status(self) -> str:
        """``finished``, or a phrase for the updates made so far."""
        of = f"{self.updates:,} of {self.config.training.max_updates:,} updates"
        return "finished" if self.is_finished else of

    @property
    def data(self) -> str | None:
        """Data that the run was last trained on: a directory, or those of a mixture, as `train --data` takes them."""
        record = self._data_record
        if record is None or not record.corpora:
            return None if record is None else record.path
        return " ".join(str(corpus.option) for corpus in record.corpora)

    @property
    def data_fingerprint(self) -> str | None:
        """Fingerprint of the data that the run was trained on."""
        return None if self._data_record is None else self._data_record.fingerprint

    @cached_property
    def _data_record(self) -> DataRecord | None:
        with suppress(UserError):
            return DataRecord.read(self.path)
        return None

    def last(self, tag: str) -> float | None:
        """Return the last value that was logged under a tag."""
        return None if self.curves is None else self.curves.curve(tag).last

    def best(self, measure: str) -> float | None:
        """Return the best value of a measure of validation: a metric, or loss; of a named set as SET/METRIC."""
        if self.curves is None:
            return None
        higher = self.config.validation.is_higher_better(measure)
        return self.curves.curve(validation_tag(measure)).best(higher_is_better=higher)

    def parameters(self, plans: Plans) -> int | None:
        """Return the number of parameters, frozen ones included.

        Args:
            plans: what is known of other runs, whose models may be the same.
        """
        with suppress(UserError, OSError):
            return plans.parameters(self.config, open_tokenizer(self.path).vocabulary)[1]
        return None


def _progress(path: Path) -> Progress | None:
    store = CheckpointStore(path / CHECKPOINTS)
    with suppress(CheckpointError):  # a link to a disk that is not mounted
        for name in reversed(store.names()):
            with suppress(CheckpointError):
                return store.read(name, verify=False).progress
    return None
