"""Session: the objects that the training loop needs, and the settings of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field, field_validator

from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.events import Event
from deepspeed_nmt.train.notify import words_of
from deepspeed_nmt.train.progress import Progress

if TYPE_CHECKING:  # the settings are read by commands that do not train
    import numpy as np
    from numpy.typing import NDArray

    from deepspeed_nmt.data.loader import TrainLoader
    from deepspeed_nmt.engine.base import Engine
    from deepspeed_nmt.parallel.watchdog import Watchdog
    from deepspeed_nmt.parallel.world import World
    from deepspeed_nmt.train.collapse import CollapseMonitor
    from deepspeed_nmt.train.events import Events
    from deepspeed_nmt.train.metrics import Metrics
    from deepspeed_nmt.train.optimizer import OptimizerConfig, ScheduleConfig
    from deepspeed_nmt.train.progress import Progress
    from deepspeed_nmt.train.saving import Saver
    from deepspeed_nmt.train.signals import StopRequest
    from deepspeed_nmt.train.store import CheckpointStore
    from deepspeed_nmt.train.throughput import Workload

Probe = Literal["auto", "always", "never"]
Save = Literal["background", "blocking"]


class TrainingConfig(Config):
    """Length of training, and intervals of logging, validation and checkpoints."""

    seed: int = Field(default=1, ge=0, lt=1 << 63, description="seed of initial weights, data order, and dropout")
    max_updates: int = Field(default=100_000, ge=1, description="number of updates after which training ends")
    max_epochs: int = Field(default=0, ge=0, description="number of epochs after which training ends; 0: no limit")
    log_every: int = Field(default=100, ge=1, description="updates between lines of the log")
    validate_every: int = Field(default=0, ge=0, description="updates between validations; 0: once an epoch")
    save_every: int = Field(default=0, ge=0, description="updates between checkpoints; 0: with each validation")
    save: Save = Field(
        default="background",
        description="background: training waits only until a checkpoint is copied to host memory, if that has room; "
        "blocking: until it is written",
    )
    keep_last: int = Field(default=5, ge=1, description="number of newest checkpoints to keep")
    keep_best: bool = Field(default=True, description="also keep the best checkpoint")
    patience: int = Field(
        default=0,
        ge=0,
        description="early stopping: validations in a row that are no better than the best and end training; 0: off",
    )
    max_skipped: int = Field(
        default=20, ge=1, description="updates in a row without a finite gradient that cause a rollback"
    )
    max_rollbacks: int = Field(
        default=2, ge=0, description="rollbacks in a row that may fail to pass the same update; then the run stops"
    )
    spike_factor: float = Field(
        default=0.0, ge=0.0, description="warn of a loss above this multiple of the median of 100 updates; 0: off"
    )
    probe: Probe = Field(
        default="auto",
        description="test that the largest micro-batch fits before the first update; auto: on GPUs only",
    )
    norms_every: int = Field(
        default=100, ge=0, description="updates between norms of gradient and weight change by layer; 0: never"
    )
    notify: str = Field(
        default="",
        description="command that runs in the background for some events, with the event in JSON on stdin; no shell "
        "runs it",
    )
    notify_on: tuple[Event, ...] = Field(
        default=("stop", "failure", "collapse", "unsaved", "best", "end"),
        description="events for which training.notify runs",
    )

    @field_validator("notify")
    @classmethod
    def _is_split(cls, notify: str) -> str:
        words_of(notify)
        return notify

    def ends_at(self, progress: Progress) -> bool:
        """Return True if training is over at this progress, by its length or by early stopping."""
        return (
            progress.update >= self.max_updates
            or bool(self.max_epochs and progress.epoch >= self.max_epochs)
            or bool(self.patience and progress.validations_since_best >= self.patience)
        )


@dataclass(frozen=True)
class Validation:
    """Result of a validation.

    Attributes:
        values: values for the log, by tag.
        best_by: tag of the value that chooses the best checkpoint.
        score: that value, with its sign changed if smaller ones are better; -inf if it is not known.
        loss: validation loss, which decides between equal scores.
        least: score below which only losses are compared.
        decimals: number of printed decimals; scores that are equal in them are equal.
        sign: -1 if the score is the value with its sign changed.
        may_await: number of newest validations whose scores may be awaited, if the score is to come; otherwise 0.
        samples: translations of a few sentences, in Markdown, by tag.
        images: grey images for the log, by tag, on rank 0. Shape: (height,width) each
    """

    values: dict[str, float]
    best_by: str
    score: float
    loss: float
    least: float = -math.inf
    decimals: int = 2
    sign: int = 1
    may_await: int = 0
    samples: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)

    def improves_on(self, progress: Progress) -> bool:
        """Return True if this validation is better than the best so far: by its score, at equal scores by its loss.

        Scores by different measures are not compared: the first one by a new measure is the best.
        """
        if progress.best_score is None or progress.best_by not in (None, self.best_by):
            return True
        best_loss = math.inf if progress.best_loss is None else progress.best_loss
        return self._rank(self.score, self.loss) > self._rank(progress.best_score, best_loss)

    def _rank(self, score: float, loss: float) -> tuple[float, float]:
        """Return a key that sorts validations, the best last; NaN is worse than any number."""
        shown = round(score, self.decimals) if score >= self.least else -math.inf
        return shown, -math.inf if math.isnan(loss) else -loss


@dataclass(frozen=True)
class LateValidation:
    """A validation some of whose values come late.

    Attributes:
        update: update after which the model was validated.
        values: values that have come since the last question, by tag.
        target_tokens: target tokens that the run had seen.
        found: the validation with all values that choose; None while one of them is to come.
    """

    update: int
    values: dict[str, float]
    target_tokens: int
    found: Validation | None


class Validator(Protocol):
    """Validator of the model after the newest update. All ranks call it together and get the same result."""

    def __call__(self, progress: Progress) -> Validation:
        """Validate after the newest update."""
        ...

    def late(self, awaited: Sequence[int]) -> Sequence[LateValidation]:
        """Return the late values that have come, and what is known of awaited validations, oldest first.

        Args:
            awaited: updates of validations whose scores are awaited.
        """
        ...

    def gains(self, update: int, over: int) -> bool:
        """Return True if translations are significantly better than others, or significance does not matter.

        Args:
            update: update after which the translations were made.
            over: update of the others.
        """
        ...


@dataclass(frozen=True)
class Session:
    """Objects that the training loop needs, from a start or a resume to the end, a stop, or a rollback.

    Attributes:
        config: settings of training.
        optimizer: settings of the optimizer.
        schedule: settings of the learning-rate schedule.
        engine: the engine, which makes updates.
        loader: loader of this rank's micro-batches.
        validator: validation by loss and metrics.
        monitor: measurement of source reliance.
        store: checkpoints of the run.
        saver: writer of new checkpoints.
        metrics: log of the run.
        events: history of the run.
        world: the ranks.
        stop: request to stop, by a user or a scheduler.
        watchdog: monitor of the ranks, which records the work of this rank.
        workload: cost of training, for perf/mfu; None if it is unknown.
    """

    config: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    engine: Engine
    loader: TrainLoader
    validator: Validator
    monitor: CollapseMonitor
    store: CheckpointStore
    saver: Saver
    metrics: Metrics
    events: Events
    world: World
    stop: StopRequest
    watchdog: Watchdog
    workload: Workload | None = None
