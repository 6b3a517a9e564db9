"""Session: the objects that the training loop needs, and the settings of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.events import Event
from deepspeed_nmt.train.notify import words_of
from deepspeed_nmt.train.progress import Progress

if TYPE_CHECKING:  # the settings are read by commands that do not train
    from deepspeed_nmt.data.loader import TrainLoader
    from deepspeed_nmt.engine.base import Engine
    from deepspeed_nmt.parallel.watchdog import Watchdog
    from deepspeed_nmt.parallel.world import World
    from deepspeed_nmt.train.collapse import CollapseMonitor
    from deepspeed_nmt.train.events import Events
    from deepspeed_nmt.train.metrics import Metrics
    from deepspeed_nmt.train.optimizer import OptimizerConfig, ScheduleConfig
    from deepspeed_nmt.train.saving import Saver
    from deepspeed_nmt.train.signals import StopRequest
    from deepspeed_nmt.train.store import CheckpointStore
    from deepspeed_nmt.train.throughput import Workload
    from deepspeed_nmt.train.validation import Validator

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
