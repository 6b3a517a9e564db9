"""Training of a run: a session is built, from the newest checkpoint or from the start, and passed to the loop."""

from __future__ import annotations

import gc
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deepspeed_nmt.build import build_meta_model, build_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.loader import TrainLoader, collate, epoch_order
from deepspeed_nmt.data.mixture import next_phase, taken
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.data.update_order import Cursor, UpdateOrder
from deepspeed_nmt.data.validation import ValidationSet
from deepspeed_nmt.directories import made
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.base import Engine
from deepspeed_nmt.engine.checkpoint_size import checkpoint_bytes
from deepspeed_nmt.engine.settings import validation_dtype
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, counted
from deepspeed_nmt.methods import collapse_remedies
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import from_main
from deepspeed_nmt.parallel.launched import once_per_host
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.gpus import kind_of
from deepspeed_nmt.planning.memory import count_rates
from deepspeed_nmt.run.attention_images import AttentionImages
from deepspeed_nmt.run.batches import update_order_of
from deepspeed_nmt.run.directory import check_record, record_of
from deepspeed_nmt.run.manifest import CHECKPOINTS
from deepspeed_nmt.run.resolve import ResolvedRun, resolve_run
from deepspeed_nmt.run.validation import MAIN
from deepspeed_nmt.run.validation_sets import SPLIT
from deepspeed_nmt.run.validator import ModelValidator
from deepspeed_nmt.run.warm_start import Origin, warm_start, write_origin
from deepspeed_nmt.train.checkpoint import Checkpoint
from deepspeed_nmt.train.collapse import CollapseMonitor
from deepspeed_nmt.train.disk import DiskWatch, Rotation, check_can_save
from deepspeed_nmt.train.events import NO_EVENTS, Event, Events
from deepspeed_nmt.train.loop import train
from deepspeed_nmt.train.metrics import Metrics
from deepspeed_nmt.train.optimizer import build_optimizer
from deepspeed_nmt.train.out_of_memory import probe
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.replica import Replica
from deepspeed_nmt.train.saving import Saver
from deepspeed_nmt.train.session import Session
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.store import CheckpointStore
from deepspeed_nmt.train.throughput import Workload


def check_room(run: Path, config: RunConfig, data: TrainingData) -> None:
    """Check that a run's checkpoints have room, before anything is written, unless the run has ended.

    Args:
        run: run directory.
        config: settings of the run.
        data: data to train on.

    Raises:
        ConfigError: if its checkpoints cannot be written, or have no room.
    """
    training = config.training
    store = CheckpointStore(run / CHECKPOINTS, training.keep_last, training.keep_best)
    names = store.names()
    progress = store.progress(names[-1]) if names else None
    if progress is not None and training.ends_at(progress):
        return
    tokenizer = data.main.tokenizer()
    if not names:
        config.model.check_data(tokenizer)
    model = build_meta_model(config, tokenizer.vocabulary)
    size, rotation = checkpoint_bytes(*_sizes(model)), Rotation(training.keep_last, training.keep_best)
    check_can_save(store.directory, size, rotation, len(names))
    with made(store.directory):
        DiskWatch(store.directory, rotation)(size, len(names))


@dataclass(frozen=True)
class Job:
    """A run to be trained by these ranks.

    Attributes:
        path: run directory, which has been prepared by :func:`deepspeed_nmt.run.directory.begin`.
        config: settings of the run.
        data: data to train on.
        sets: data directories of all validation sets by name, first that of ``data``.
        origin: run of a warm start; None for random or pretrained weights.
        world: the ranks.
        stop: request to stop, by a user or a scheduler.
        watchdog: monitor of the ranks, which records the work of this rank.
        events: history of the run.
    """

    path: Path
    config: RunConfig
    data: TrainingData
    sets: Mapping[str, DataDirectory]
    origin: Origin | None
    world: World
    stop: StopRequest
    watchdog: Watchdog
    events: Events = NO_EVENTS

    @property
    def store(self) -> CheckpointStore:
        """Checkpoints of the run."""
        training = self.config.training
        record = record_of(self.config, self.data)
        return CheckpointStore(self.path / CHECKPOINTS, training.keep_last, training.keep_best, record)


def train_run(job: Job) -> Progress:
    """Train until the end or a requested stop, and return the progress. A rollback is followed by a resume."""
    resolved = resolve_run(job.config, job.data, job.sets, job.world, resumed=bool(job.store.names()))
    logger.info("%s", resolved)
    if job.world.is_main:
        resolved.save(job.path)
    rolled_back = False
    while (progress := _resume_or_start(job, resolved, rolled_back)) is None:
        rolled_back = True
        job.watchdog.at("rolling back", slow=True)
        for _ in range(2):  # frees the engine, and then parts that DeepSpeed's finalizers released
            gc.collect()
        if job.world.device.type == "cuda":
            torch.cuda.empty_cache()
    return progress


def finish(job: Job, progress: Progress) -> int:
    """Log and record the end of training, and return the exit status."""
    update = progress.update
    if job.stop.agreed:
        by = job.stop.signal_name
        logger.info("stopped by %s after update %d; start the same command again to resume", by, update)
        job.events.record("stop", update, f"stopped by {by} after update {update}", signal=by)
        return EXIT_STOPPED
    score, config = progress.best_score, job.config.validation
    score = None if score is None or not math.isfinite(score) else config.value_of(progress.best_by, score)
    best = "" if score is None else f", best validation score {score:.2f}"
    text = f"{update} updates, {progress.target_tokens:,} target tokens{best} (update {progress.best_update})"
    logger.info("done: %s", text)
    details = {"score": score, "best_update": progress.best_update, "target_tokens": progress.target_tokens}
    if job.events.begun:  # a run that had ended before has not ended again
        job.events.record("end", update, f"done: {text}", **details)
    elif update > job.config.training.max_updates:
        logger.warning("training.max_updates is %d, so that nothing was trained", job.config.training.max_updates)
    return 0


def _record_start(job: Job, checkpoint: Checkpoint | None) -> None:
    world, host = job.world, socket.gethostname()
    on = f"on {counted(world.ranks, 'ranks')} ({world.device.type}), rank 0 on {host}"
    event: Event = "start" if checkpoint is None else "resume"
    update = 0 if checkpoint is None else checkpoint.progress.update
    text = f"started {on}" if checkpoint is None else f"resumed after update {update} {on}"
    job_id = os.environ.get("SLURM_JOB_ID")
    job.events.record(event, update, text, ranks=world.ranks, device=world.device.type, host=host, job=job_id)


def _resume_or_start(job: Job, resolved: ResolvedRun, rolled_back: bool) -> Progress | None:
    """Train from the newest checkpoint, or from the start; return None if the run was rolled back."""
    checkpoint = _newest_checkpoint(job)
    progress = Progress() if checkpoint is None else checkpoint.progress
    if not rolled_back and not job.config.training.ends_at(progress):
        _record_start(job, checkpoint)
    with fail_together(job.world):
        corpora = job.data.corpora(job.config.mixture)
        progress = _with_mixture(job, corpora, progress)
        order = update_order_of(corpora, job.config, job.data, progress)
    with _session(job, resolved, checkpoint, progress, order) as session:
        return train(session, progress)


def _with_mixture(job: Job, corpora: Corpora, progress: Progress) -> Progress:
    """Return the progress with the mixture of corpora with which the run continues, if it has any."""
    data, first = job.data, progress.update + 1
    if not data.is_mixture and not progress.phases:
        return progress
    before = {}
    if progress.phases:
        before = taken(progress.phases[-1], first, job.config.batch.update_tokens)
    elif progress.update:  # the run began with the first corpus alone
        alone = Corpora(corpora.parts[:1])
        order = epoch_order(alone, job.config.batch, job.config.training.seed)
        epochs = order.epochs(Cursor(progress.epoch, progress.epoch_update), first)[0]
        before = {data.parts[0].identity: round(epochs * len(alone))}
    phases = next_phase(progress.phases, data.phase(corpora, job.config.mixture, first), before)
    if len(phases) > len(progress.phases):
        mixture = job.config.mixture
        how = f"{data}; temperature {mixture.temperature:g}, tags in front of {mixture.tag}s"
        if progress.update:
            logger.warning("from update %s on the run has another mixture: %s", f"{first:,}", how)
        else:
            logger.info("mixture: %s", how)
    return replace(progress, phases=phases)


@contextmanager
def _session(
    job: Job, resolved: ResolvedRun, checkpoint: Checkpoint | None, progress: Progress, order: UpdateOrder
) -> Iterator[Session]:
    """Build the session, and close its files and its engine at the end."""
    config, data, world, vocabulary = resolved.config, job.data, job.world, resolved.vocabulary
    objective = build_objective(config, vocabulary)
    with fail_together(world):
        loader = TrainLoader(order, resolved.batch, world.data_rank, world.data_ranks, vocabulary)
        module = TrainModule(_initial_model(job, resolved, checkpoint), objective)
    # The engine moves the model to the device, after it has rounded or partitioned it.
    optimizer = build_optimizer(config.optimizer, module)
    with once_per_host():
        dummy = collate(order.corpora, np.empty(0, dtype=np.int64), vocabulary)
        engine = build_engine(resolved.engine, module, optimizer, world, dummy)
    with fail_together(world):
        copy = build_model(config, vocabulary, resolved.kernels)  # unsharded; no sooner, to need less host memory
    _log_sizes(copy, loader, engine, world)
    replica = Replica(copy, engine, validation_dtype(resolved.engine.precision, world.device))
    probe(config.training.probe, engine, loader)
    if checkpoint is not None:
        engine.restore(checkpoint, checkpoint.scalars)
        logger.info("resuming after update %d (%s)", progress.update, checkpoint.path)
    with fail_together(world):
        valid = {
            name: ValidationSet(each.corpus(SPLIT), vocabulary, config.batch, world.rank, world.ranks)
            for name, each in job.sets.items()
        }
        # Attention to a source belongs to a token that is predicted next.
        count = config.validation.attention_images if config.search.left_to_right else 0
        attention = AttentionImages(valid[MAIN].corpus, job.sets[MAIN].tokenizer(), count) if count else None
        validator = ModelValidator(
            replica=replica,
            objective=objective,
            data=job.sets,
            validation=valid,
            config=config.validation,
            search=config.search,
            world=world,
            watchdog=job.watchdog,
            run=job.path,
            update=progress.update,
            interrupted=lambda: bool(job.stop),
            attention=attention,
        )
        data.check_same()  # files that are open now stay those whose hashes were verified
        for each in job.sets.values():
            each.check_same()
    monitor = CollapseMonitor(
        config=config.collapse,
        grace=2 * config.schedule.warmup_updates,
        validation=valid[MAIN],
        replica=replica,
        objective=objective,
        world=world,
        remedies=collapse_remedies(),
        events=job.events,
    )
    with (
        Metrics(job.path, world.is_main, progress.update, config.training.max_updates) as metrics,
        Saver(
            store=job.store,
            engine=engine,
            world=world,
            watchdog=job.watchdog,
            config=config.training,
            size=checkpoint_bytes(*_sizes(copy)),
            saved_at=progress.update,
            events=job.events,
        ) as saver,
    ):
        yield Session(
            config=config.training,
            optimizer=config.optimizer,
            schedule=config.schedule,
            engine=engine,
            loader=loader,
            validator=validator,
            monitor=monitor,
            store=job.store,
            saver=saver,
            metrics=metrics,
            events=job.events,
            world=world,
            stop=job.stop,
            watchdog=job.watchdog,
            workload=_workload(resolved, objective, world),
        )
    engine.close()


def _newest_checkpoint(job: Job) -> Checkpoint | None:
    """Return the newest good checkpoint. Rank 0 finds it and verifies its hashes; other ranks open the same one."""
    store, world, found = job.store, job.world, None
    with fail_together(world):
        if world.is_main:
            if store.names():
                logger.info("checking and reading the newest checkpoint in %s", store.directory)
            found = store.newest()
            if found is not None:
                check_record(found, job.config, job.data.main.vocabulary)
    name = from_main(found.path.name if found is not None else "", world)
    with fail_together(world):
        return Checkpoint(store.directory / name, verify=False) if name and found is None else found


def _initial_model(job: Job, resolved: ResolvedRun, checkpoint: Checkpoint | None) -> TranslationModel:
    """Build the model with the weights that the run resumes or starts with, sliced over the ranks that share it.

    Raises:
        ConfigError: if frozen parts would keep random weights.
    """
    model = build_model(resolved.config, resolved.vocabulary, resolved.kernels)
    model.recompute(*resolved.recompute)
    if resolved.config.engine.compile == "layers":
        model.compile_layers()
        if job.world.is_main:
            logger.info("layers are compiled as they first run, which takes up to minutes before the first update")
    if checkpoint is not None:
        checkpoint.load_into(model)
    elif job.origin is not None:
        origin = warm_start(model, resolved.config, job.origin, job.data.main)
        if job.world.is_main:
            write_origin(job.path, origin)
    elif not model.load_pretrained() and not all(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "this model has frozen parts, which need trained weights; give their run with --grow-from RUN"
        )
    parallelize(model, job.world)
    return model


def _sizes(model: TranslationModel) -> tuple[int, int]:
    """Return the numbers of trained and of frozen parameters."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return trained, sum(p.numel() for p in model.parameters()) - trained


def _log_sizes(model: TranslationModel, loader: TrainLoader, engine: Engine, world: World) -> None:
    trained, frozen = _sizes(model)
    count = trained + frozen
    logger.info(
        "%s parameters%s; %s pairs, %s updates an epoch; %d x %s; %s",
        f"{count:,}",
        "" if trained == count else f", {trained:,} of them trained",
        f"{len(loader.corpora):,}",
        f"{loader.order.updates_in(0):,}",
        world.ranks,
        world.device.type,
        type(engine).__name__,
    )


def _workload(resolved: ResolvedRun, objective: Objective, world: World) -> Workload | None:
    """Count the cost of training; return None on CPUs, on GPUs of unknown peak, and on ranks that do not log."""
    if world.device.type != "cuda" or not world.is_main:
        return None
    name = torch.cuda.get_device_name(world.device)
    kind = kind_of(name)
    if kind is None:
        logger.info("perf/mfu is not logged: the peak of %s is not known", name)
        return None
    model = build_meta_model(resolved.config, resolved.vocabulary, resolved.kernels)
    rates = count_rates(model, objective, resolved.vocabulary)
    return Workload(rates.source, rates.target, kind.tflops * 1e12)
