"""Everything that the training loop works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.engine.base import Engine
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.collapse import CollapseMonitor
from deepspeed_nmt.train.metrics import Metrics
from deepspeed_nmt.train.optimizer import OptimizerConfig, ScheduleConfig
from deepspeed_nmt.train.out_of_memory import Probe
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.store import CheckpointStore
from deepspeed_nmt.train.throughput import Workload


class TrainingConfig(Config):
    """Length of training, and intervals of logging, validation and checkpoints."""

    seed: int = Field(
        default=1,
        ge=0,
        description="seed of initial weights, order of the data, dropout and all other random choices",
    )
    max_updates: int = Field(default=100_000, ge=1, description="stop after so many updates")
    max_epochs: int = Field(default=0, ge=0, description="stop after so many passes over the data; 0: no limit")
    log_every: int = Field(default=100, ge=1, description="updates between two lines of the log")
    validate_every: int = Field(default=0, ge=0, description="updates between validations; 0: once an epoch")
    save_every: int = Field(default=0, ge=0, description="updates between checkpoints; 0: with each validation")
    keep_last: int = Field(default=5, ge=1, description="newest checkpoints to keep")
    keep_best: bool = Field(default=True, description="keep the best checkpoint besides")
    patience: int = Field(
        default=0, ge=0, description="stop after so many validations without a better score; 0: never"
    )
    max_skipped: int = Field(
        default=20, ge=1, description="roll back after so many updates in a row without finite gradient"
    )
    max_rollbacks: int = Field(
        default=2, ge=0, description="stop when so many rollbacks in a row do not get past the update that failed"
    )
    spike_factor: float = Field(
        default=0.0, ge=0.0, description="warn of a loss above so many times the median of 100 updates; 0: never"
    )
    probe: Probe = Field(
        default="auto", description="try out the largest micro-batch before the first update; auto: only on a GPU"
    )


@dataclass(frozen=True)
class Validation:
    """Result of a validation.

    Attributes:
        values: by tag, for the log.
        score: by which the best checkpoint is chosen; greater is better.
    """

    values: dict[str, float]
    score: float


class Validator(Protocol):
    """Validates the model after the newest update. All ranks call it together and get the same result."""

    def __call__(self, update: int) -> Validation:
        """Validate after ``update``."""
        ...


@dataclass(frozen=True)
class Session:
    """One stretch of training, from a checkpoint or the start until the end, a stop, or a rollback.

    Attributes:
        config, optimizer, schedule: settings.
        engine: carries out updates.
        loader: this rank's micro-batches.
        validator: computes validation loss and BLEU.
        monitor: measures whether the decoder still depends on its source.
        store: the run's checkpoints.
        metrics: the run's log.
        world: the ranks.
        stop: tells that somebody wants the run to stop.
        watchdog: is told what this rank is doing.
        workload: cost of training, for perf/mfu; None where it is unknown.
    """

    config: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    engine: Engine
    loader: TrainLoader
    validator: Validator
    monitor: CollapseMonitor
    store: CheckpointStore
    metrics: Metrics
    world: World
    stop: StopRequest
    watchdog: Watchdog
    workload: Workload | None = None
