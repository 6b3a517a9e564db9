"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pydantic import Field
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.loader import Cursor, Prefetcher, TrainLoader, Update
from deepspeed_nmt.engine.base import Engine, UpdateResult, add_sums
from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import any_rank, from_main, sum_over_data_ranks
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.collapse import CollapseMonitor
from deepspeed_nmt.train.memory import Probe, explained, peak_memory_gib
from deepspeed_nmt.train.metrics import Metrics
from deepspeed_nmt.train.optimizer import OptimizerConfig, ScheduleConfig, learning_rate
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, roll_back, worth_explaining


class TrainingConfig(Config):
    """How long to train, and how often to look."""

    seed: int = Field(default=1, ge=0, description="of weights, order of the data, and dropout")
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
class Workload:
    """What training costs, and what a GPU can do.

    Attributes:
        source_flops, target_flops: operations of the model for each source and target token, forwards and backwards.
        peak_flops: of one GPU, a second.
    """

    source_flops: float
    target_flops: float
    peak_flops: float

    def utilisation(self, source_tokens: float, target_tokens: float, gpu_seconds: float) -> float:
        """MFU: the model's operations as a share of what the GPUs could have done."""
        done = self.source_flops * source_tokens + self.target_flops * target_tokens
        return done / (gpu_seconds * self.peak_flops)


@dataclass(frozen=True)
class Validation:
    """What a validation found.

    Attributes:
        values: by tag, for the log.
        score: what the best checkpoint is chosen by; greater is better.
    """

    values: dict[str, float]
    score: float


class Validator(Protocol):
    """Judges the model after an update, the newest. All ranks call it together and get the same answer."""

    def __call__(self, update: int) -> Validation: ...


def train(
    config: TrainingConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    engine: Engine,
    loader: TrainLoader,
    validator: Validator,
    monitor: CollapseMonitor,
    store: CheckpointStore,
    metrics: Metrics,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    progress: Progress,
    workload: Workload | None = None,
) -> Progress | None:
    """Train from ``progress`` until the end, or until asked to stop; what was done is then saved.

    Args:
        workload: for perf/mfu; None where it is unknown.

    Returns:
        Where the run stands; None if it was rolled back: the newest checkpoint then says where it goes on, with
        another engine.

    Raises:
        TrainingError: if the gradient stays infinite or NaN in spite of rollbacks, if memory runs out, or if the
            decoder ignores its source and ``collapse.action`` is "stop".
        OSError: if the last checkpoint cannot be written.
    """
    if _asked_to_stop(stop, world):  # while the run was being set up
        return progress
    window = _Window(workload)
    spikes = SpikeWatch(config.spike_factor)
    loss_scale = engine.scalars().loss_scale
    parameters = [name for name, _ in engine.module.model.named_parameters()]
    saved_at = progress.update
    fatal = ""
    validating = saving = False
    updates = Prefetcher(loader.updates(Cursor(progress.epoch, progress.epoch_update), progress.update + 1))
    try:
        while not _finished(config, progress):
            waiting = time.monotonic()
            watchdog.at(f"update {progress.update + 1}, waiting for its data")
            update = updates.next()
            started = time.monotonic()
            engine.watch = _watched(watchdog, update)
            lr = learning_rate(update.number, optimizer.lr, schedule, config.max_updates)
            with explained(f"update {update.number}", update.micro_batches, world.device):
                explain = worth_explaining(progress.skipped, loss_scale)
                result = engine.update(update.micro_batches, update.target_tokens, lr, explain)
            loss_scale = result.loss_scale
            progress = _advance(progress, update, result.skipped, time.monotonic() - started)
            if result.skipped:
                cause = report_skip(update, result, progress.skipped, parameters, world)
                if progress.skipped >= config.max_skipped:
                    roll_back(store, progress, cause, config.max_rollbacks, world)
                    return None
            spikes(update, result, world)
            window.add(update, result, waited=started - waiting, elapsed=time.monotonic() - waiting)

            if progress.update % config.log_every == 0:
                values = {
                    **window.flush(lr, world),
                    "train/target_tokens": float(progress.target_tokens),
                    "train/spikes": float(spikes.count),
                    "train/rollbacks": float(progress.rollbacks),
                }
                metrics.log(progress.update, values, f" (epoch {progress.epoch + 1})")
            if monitor.due(progress.update):
                watchdog.at(f"measuring collapse after update {progress.update}", slow=True)
                found = monitor(progress.update)
                metrics.log(progress.update, {**found, "train/target_tokens": float(progress.target_tokens)})
                bad, fatal = monitor.judge(progress.update, found, progress.bad_measurements)
                progress = replace(progress, bad_measurements=bad)
            validating = validating or _due(config.validate_every, progress)
            saving = saving or _due(config.save_every or config.validate_every, progress)
            # Amid skipped updates both wait: what is kept then may be ruined. Only the end of training cannot wait.
            sound, best = progress.skipped == 0, False
            if (validating and sound) or _finished(config, progress):
                watchdog.at(f"validating after update {progress.update}", slow=True)
                progress, best = _validate(validator, progress, metrics)
                validating = False
            watchdog.at(f"what follows update {progress.update}")
            stopping = _asked_to_stop(stop, world)
            if best or stopping or fatal or (saving and sound):
                last = stopping or _finished(config, progress)
                watchdog.at(f"saving update {progress.update}", slow=True)
                saved_at = _save(store, engine, progress, best, world, saved_at, must=last)
                saving = False
            if fatal:
                with fail_together(world):
                    raise TrainingError(f"{fatal}. The run is saved as it is after update {saved_at}")
            if stopping:
                break
    finally:
        updates.close()
    if saved_at != progress.update:
        watchdog.at(f"saving update {progress.update}", slow=True)
        _save(store, engine, progress, False, world, saved_at, must=True)
    if config.patience and progress.validations_since_best >= config.patience:
        logger.info("no better score in %d validations: stopped early", config.patience)
    return progress


def _asked_to_stop(stop: StopRequest, world: World) -> bool:
    """Whether a signal came to any rank; all then take it for their own."""
    asked = any_rank(bool(stop), world)
    if asked:  # Not asked once more: meanwhile a request may have come to some ranks alone.
        stop.agree()
    return asked


def _watched(watchdog: Watchdog, update: Update) -> Callable[[int], None]:
    count = len(update.micro_batches)
    return lambda index: watchdog.at(f"update {update.number}, micro-batch {index + 1} of {count}")


def _finished(config: TrainingConfig, progress: Progress) -> bool:
    return (
        progress.update >= config.max_updates
        or bool(config.max_epochs and progress.epoch >= config.max_epochs)
        or bool(config.patience and progress.validations_since_best >= config.patience)
    )


def _due(every: int, progress: Progress) -> bool:
    """Whether something done every so many updates is due; 0 means at the end of an epoch."""
    return progress.epoch_update == 0 if every == 0 else progress.update % every == 0


def _advance(progress: Progress, update: Update, skipped: bool, seconds: float) -> Progress:
    passed = not skipped and update.number > progress.failed_at
    return replace(
        progress,
        update=update.number,
        epoch=update.after.epoch,
        epoch_update=update.after.update,
        target_tokens=progress.target_tokens + update.target_tokens,
        train_seconds=progress.train_seconds + seconds,
        skipped=progress.skipped + 1 if skipped else 0,
        retries=0 if passed else progress.retries,
    )


def _validate(validator: Validator, progress: Progress, metrics: Metrics) -> tuple[Progress, bool]:
    found = validator(progress.update)
    metrics.log(progress.update, {**found.values, "train/target_tokens": float(progress.target_tokens)})
    best = progress.best_score is None or found.score > progress.best_score
    if best:
        changes = {"best_score": found.score, "best_update": progress.update, "validations_since_best": 0}
    else:
        changes = {"validations_since_best": progress.validations_since_best + 1}
    return replace(progress, **changes), best  # type: ignore[arg-type]


def _save(
    store: CheckpointStore,
    engine: Engine,
    progress: Progress,
    best: bool,
    world: World,
    saved_at: int,
    must: bool = False,
) -> int:
    """Save on rank 0 what all ranks hold together. A failure is reported, and fatal only if it ``must`` succeed."""
    problem = ""
    scalars = engine.scalars()
    if world.is_main:
        try:
            store.save(progress, scalars, engine.state(), best)
        except OSError as error:
            problem = str(error)
    else:
        for _ in engine.state():
            pass
    problem = from_main(problem, world)
    if not problem:
        return progress.update
    message = (
        f"the checkpoint of update {progress.update} could not be written to {store.directory} ({problem}); the last "
        f"good one is of update {saved_at}. Free some space or lower training.keep_last"
    )
    if must:
        with fail_together(world):
            raise OSError(message)
    if world.is_main:
        logger.error("%s; training goes on", message)
    return saved_at


class _Window:
    """Sums since the last line of the log; they stay on the device until the line is due."""

    def __init__(self, workload: Workload | None) -> None:
        self.skipped = 0
        self._workload = workload
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens_of: dict[str, int] = {}
        self.tokens = self.worked = self.padded = self.real = self.updates = 0
        self.waited = self.elapsed = 0.0
        self.result: UpdateResult | None = None

    def add(self, update: Update, result: UpdateResult, waited: float, elapsed: float) -> None:
        if result.skipped:
            self.skipped += 1
        else:
            add_sums(self.sums, result.sums)
            self.tokens += update.target_tokens
            for name in result.sums:  # A term may be part of some updates only.
                self.tokens_of[name] = self.tokens_of.get(name, 0) + update.target_tokens
        self.worked += update.target_tokens  # skipped updates are work, too
        self.padded += update.padded_positions
        self.real += update.real_positions
        self.waited += waited
        self.elapsed += elapsed
        self.updates += 1
        self.result = result

    def flush(self, lr: float, world: World) -> dict[str, float]:
        """The values of the window, over all ranks, and an empty window."""
        assert self.result is not None
        sums = {name: float(value) for name, value in self.sums.items()}
        device_sums = {**sums, "positions/padded": float(self.padded), "positions/real": float(self.real)}
        total = sum_over_data_ranks(device_sums, world)
        padded, real = total.pop("positions/padded"), total.pop("positions/real")
        values = {f"train/{name}": value / max(1, self.tokens_of[name]) for name, value in total.items()}
        if "train/nll" in values:
            values["train/ppl"] = math.exp(min(values["train/nll"], 100.0))
        values.update(
            {
                "train/grad_norm": self.result.grad_norm,
                "train/lr": lr,
                "train/loss_scale": self.result.loss_scale,
                "train/skipped": float(self.skipped),
                "perf/target_tokens_per_s": self.tokens / self.elapsed,
                "perf/padding": 1.0 - real / padded,
                "perf/data_wait": self.waited / self.elapsed,
                "perf/memory": peak_memory_gib(world.device),
            }
        )
        if self._workload is not None:
            gpu_seconds = self.elapsed * world.ranks
            values["perf/mfu"] = self._workload.utilisation(real - self.worked, self.worked, gpu_seconds)
        self._clear()
        return values
