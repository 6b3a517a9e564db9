"""Trainer of a run: puts its parts together, from the newest checkpoint or from the start, and runs the loop."""

from __future__ import annotations

import gc
import math
import os
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.loader import TrainLoader, collate
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.data.update_order import UpdateOrder
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.errors import EXIT_STOPPED, counted
from deepspeed_nmt.methods import collapse_remedies
from deepspeed_nmt.parallel.collectives import any_rank, fail_together, from_main
from deepspeed_nmt.parallel.launched import once_per_host
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.counting import sizes
from deepspeed_nmt.run.batches import update_order_of, with_mixture
from deepspeed_nmt.run.directory import CHECKPOINTS, GRADIENTS, DataRecord, check_record
from deepspeed_nmt.run.late_scores import LateScores
from deepspeed_nmt.run.resolve import checkpoint_size, resolve, workload_of
from deepspeed_nmt.run.start import Origin, load_first_weights
from deepspeed_nmt.run.validator import ModelValidator
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore
from deepspeed_nmt.train.collapse import CollapseMonitor
from deepspeed_nmt.train.events import NO_EVENTS, Detail, Events, check_progress
from deepspeed_nmt.train.goodput import Ledger
from deepspeed_nmt.train.growth import Grown
from deepspeed_nmt.train.log import Metrics, label
from deepspeed_nmt.train.loop import TrainingLoop
from deepspeed_nmt.train.out_of_memory import OutOfMemoryError, probe
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.saving import Saver
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.validation import Replica


@dataclass(kw_only=True)
class Trainer:
    """Training of a run by these ranks. All ranks call its methods together.

    Attributes:
        path: run directory, which has been prepared by :func:`deepspeed_nmt.run.start.begin`.
        sets: data directories of all validation sets by name, first that of ``data``.
        origin: run of a warm start; None for random or pretrained weights.
        verified: result of comparing the training data with its hashes, on the first rank of each host.
    """

    path: Path
    config: RunConfig
    data: TrainingData
    sets: Mapping[str, DataDirectory]
    origin: Origin | None
    world: World
    stop: StopRequest
    watchdog: Watchdog
    ledger: Ledger
    events: Events = NO_EVENTS
    verified: Future[None] | None = None

    def __post_init__(self) -> None:
        training, late = self.config.training, LateScores(self.path, self.config.validation)
        record = DataRecord.of(self.data).for_checkpoints(self.config, self.data.main.vocabulary)
        directory = self.path / CHECKPOINTS
        self.store = CheckpointStore(directory, training.keep_last, training.keep_best, record, late.awaiting)

    def train(self) -> int:
        """Train until the end or a requested stop, and return the exit status.

        A rollback is followed by a resume, and so is the update after which the model grows.
        """
        self.ledger.begin("model")
        world, is_resumed = self.world, bool(self.store.names())
        self.resolved = resolve(self.config, self.data, self.sets, world, self.path if is_resumed else None)
        logger.info("%s", self.resolved)
        if world.is_main:
            self.resolved.save(self.path)
        again = False
        while (progress := self._resume_or_start(again)) is None:
            again = True
            self.watchdog.at("building the model again", slow=True)
            for _ in range(2):  # frees the engine, and then parts that DeepSpeed's finalizers released
                gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
        return self._finish(progress)

    def _resume_or_start(self, again: bool) -> Progress | None:
        """Train from the newest checkpoint, or from the start.

        Return None if the run was rolled back, grows, or begins again with smaller micro-batches.
        """
        self.ledger.begin("restore")
        checkpoint = self._newest_checkpoint()
        progress = Progress() if checkpoint is None else checkpoint.progress
        if not again and not self.config.training.ends_at(progress):
            with fail_together(self.world):
                if self.world.is_main:
                    check_progress(self.path, progress.update, os.environ.get("SLURM_JOB_ID"))
            self._record_start(checkpoint)
        if self.world.is_main and not self.config.training.ends_at(progress):
            self.ledger.start(self.path, progress.update)
        self.ledger.begin("model")
        with fail_together(self.world):
            if self.world.is_main:
                self.store.forget_choice_after(progress.update)
            corpora = self.data.corpora(self.config.mixture)
            progress = with_mixture(progress, corpora, self.config, self.data)
            order = update_order_of(corpora, self.config, self.data, progress.phases)
            if self.world.is_main and not again:
                warn_of_early_end(self.config, progress, order.updates_in(progress.epoch))
        with ExitStack() as stack:
            loop = self._loop(checkpoint, progress, order, stack)
            if loop is None:
                return None
            progress_or_none = loop.run(progress)
        loop.engine.close()
        return progress_or_none

    def _loop(
        self, checkpoint: Checkpoint | None, progress: Progress, order: UpdateOrder, stack: ExitStack
    ) -> TrainingLoop | None:
        """Build the loop, whose files ``stack`` closes; return None if a micro-batch does not fit."""
        resolved, world, vocabulary = self.resolved, self.world, self.resolved.vocabulary
        before, config = (self.config.for_update(update) for update in (progress.update, progress.update + 1))
        saved: Checkpoint | Grown | None = checkpoint
        objective = build_objective(config, vocabulary)
        with fail_together(world):
            loader = TrainLoader(order, resolved.batch, world.data_rank, world.data_ranks, vocabulary)
            model = build_model(config, vocabulary, resolved.kernels)
            model.recompute(*resolved.recompute)
            if config.engine.compile == "layers":
                model.compile_layers()
                if world.is_main:
                    logger.info("layers are compiled as they first run, which takes minutes before the first update")
            if checkpoint is not None and before.model != config.model:
                models = {"before": before.model, "after": config.model}
                saved = Grown(checkpoint, checkpoint.names, model, **models, by=config.growth.by)
            if saved is not None:
                saved.load_into(model)
            else:
                origin = load_first_weights(model, config, self.origin, self.data.main)
                if world.is_main and origin is not None:
                    origin.write(self.path)
            parallelize(model, world)
            module = TrainModule(model, objective)
        # The engine moves the model to the device, after it has rounded or partitioned it.
        with once_per_host():
            dummy = collate(order.corpora, np.empty(0, dtype=np.int64), vocabulary)
            engine = build_engine(resolved.engine, module, world, dummy)
        with fail_together(world):
            copy = build_model(config, vocabulary, resolved.kernels)  # unsharded; no sooner, to need less host memory
        trained, frozen = sizes(copy)
        logger.info(
            f"{trained + frozen:,} parameters{f', {trained:,} of them trained' if frozen else ''}; "
            f"{len(loader.corpora):,} pairs, {loader.order.updates_in(0):,} updates an epoch; "
            f"{world.ranks} x {world.device.type}; {type(engine).__name__}"
        )
        replica = Replica(copy, engine, resolved.validation_dtype(world.device))
        if not self._fits(engine, loader):
            engine.close()
            return None
        if checkpoint is not None and saved is not None:
            self.ledger.begin("restore")
            with checkpoint.held_open():
                engine.restore(saved, checkpoint.scalars)
            self.ledger.begin("model")
            logger.info("resuming after update %d (%s)", progress.update, checkpoint.path)
            if saved is not checkpoint and not config.training.ends_at(progress):
                logger.info("%s", saved)
                self.events.record("growth", progress.update, str(saved))
        if config.engine.hash_gradients:
            with fail_together(world):
                (self.path / GRADIENTS).mkdir(exist_ok=True)
                engine.hash_gradients(self.path / GRADIENTS / f"rank-{world.rank}.jsonl")
        with fail_together(world):
            validator = ModelValidator(
                replica=replica,
                objective=objective,
                data=self.sets,
                config=config,
                world=world,
                watchdog=self.watchdog,
                run=self.path,
                update=progress.update,
                interrupted=lambda: bool(self.stop),
            )
            self.data.check_same()  # files that are open now are those whose hashes are verified
            for data in self.sets.values():
                data.check_same()
        monitor = CollapseMonitor(
            config=config.collapse,
            grace=2 * config.schedule.warmup_left,
            validation=validator.main,
            replica=replica,
            objective=objective,
            world=world,
            remedies=collapse_remedies(),
            events=self.events,
        )
        measures = tuple(dict.fromkeys(("train/loss", "valid/loss", validator.measure)))
        limit, settings = config.training.max_updates, config.flat()
        metrics = stack.enter_context(Metrics(self.path, world.is_main, progress.update, limit, settings, measures))
        saver = stack.enter_context(
            Saver(
                store=self.store,
                engine=engine,
                world=world,
                watchdog=self.watchdog,
                config=config.training,
                size=checkpoint_size(copy, config),
                saved_at=progress.update,
                events=self.events,
            )
        )
        return TrainingLoop(
            config=config.training,
            growth=config.growth,
            peak_lr=config.optimizer.lr,
            schedule=config.schedule,
            engine=engine,
            loader=loader,
            validator=validator,
            monitor=monitor,
            store=self.store,
            saver=saver,
            metrics=metrics,
            events=self.events,
            world=world,
            stop=self.stop,
            watchdog=self.watchdog,
            ledger=self.ledger,
            layer=config.layer,
            workload=workload_of(config, resolved, objective, world),
            log=() if checkpoint is None else checkpoint.log,
            verified=self.verified,
        )

    def _fits(self, engine: Engine, loader: TrainLoader) -> bool:
        """Run the largest micro-batch; if it does not fit, and ``batch.micro_tokens`` is auto, halve that."""
        batch, world, fits = self.resolved.batch, self.world, True
        is_auto = self.config.batch.micro_tokens == "auto"
        # Where ranks communicate in a micro-batch, they cannot agree after one of them has failed in it.
        can_agree = world.ranks == 1 or (self.resolved.engine.ds_config is None and world.tensor_ranks == 1)
        may_halve = is_auto and can_agree and batch.bound >= 2 * loader.longest
        try:
            probe(self.config.training.probe, engine, loader, is_auto)
        except OutOfMemoryError:
            if not may_halve:
                raise
            fits = False
        if may_halve and any_rank(not fits, world):
            smaller = batch.bound // 2
            logger.warning("micro-batches of %s tokens do not fit; batch.micro_tokens=%s", batch.bound, smaller)
            batch = batch.model_copy(update={"micro_tokens": smaller})
            self.resolved = replace(self.resolved, batch=batch)
            if world.is_main:
                self.resolved.save(self.path)
            return False
        return True

    def _newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest good checkpoint. Rank 0 verifies its hashes; other ranks open the same one."""
        store, world, newest = self.store, self.world, None
        with fail_together(world):
            if world.is_main:
                if store.names():
                    logger.info("checking and reading the newest checkpoint in %s", store.directory)
                newest = store.newest()
                if newest is not None:
                    check_record(newest, self.config, self.data.main.vocabulary)
        name = from_main(newest.path.name if newest is not None else "", world)
        with fail_together(world):
            return Checkpoint(store.directory / name, verify=False) if name and newest is None else newest

    def _record_start(self, checkpoint: Checkpoint | None) -> None:
        world, host = self.world, socket.gethostname()
        on = f"on {counted(world.ranks, 'ranks')} ({world.device.type}), rank 0 on {host}"
        update = 0 if checkpoint is None else checkpoint.progress.update
        text = f"started {on}" if checkpoint is None else f"resumed after update {update} {on}"
        job = os.environ.get("SLURM_JOB_ID")
        details: dict[str, Detail] = {"ranks": world.ranks, "device": world.device.type, "host": host, "job": job}
        self.events.record("start" if checkpoint is None else "resume", update, text, **details)

    def _finish(self, progress: Progress) -> int:
        """Log and record the end of training, and return the exit status."""
        update = progress.update
        if self.stop.agreed and not self.config.training.ends_at(progress):
            by = self.stop.signal_name
            logger.info("stopped by %s after update %d; start the same command again to resume", by, update)
            self.events.record("stop", update, f"stopped by {by} after update {update}", signal=by)
            return EXIT_STOPPED
        score, config = progress.best_score, self.config.validation
        score = None if score is None or not math.isfinite(score) else config.value_of(progress.best_by, score)
        best = "" if score is None else f", best {label((progress.best_by or '').partition(' ')[0])} {score:.2f}"
        text = f"{update} updates, {progress.target_tokens:,} target tokens{best} (update {progress.best_update})"
        logger.info("done: %s", text)
        if self.world.is_main and (awaiting := LateScores(self.path, config).awaiting()):
            count = counted(len(awaiting), "scores")
            logger.info("%s to come; `deepspeed-nmt choose-best --run %s` chooses by them", count, self.path)
        details = {"score": score, "best_update": progress.best_update, "target_tokens": progress.target_tokens}
        if self.events.begun:  # a run that had ended before has not ended again
            self.events.record("end", update, f"done: {text}", **details)
        elif update > self.config.training.max_updates:
            limit = self.config.training.max_updates
            logger.warning("training.max_updates is %d, so that nothing was trained", limit)
        return 0


def warn_of_early_end(config: RunConfig, progress: Progress, epoch_updates: int) -> None:
    """Warn if training ends within its warm-up, or by its epochs, of ``epoch_updates``, before decay or growth.

    Also warn of a decay that ends above the peak of the learning rate, as if that alone was lowered.
    """
    training, schedule, remedies = config.training, config.schedule, []
    end = progress.update + training.updates_left(progress, epoch_updates)
    if progress.update < end <= schedule.warmup_left:
        logger.warning(
            "training ends after %d updates or so, within the warm-up of schedule.warmup_updates=%d, so that the "
            "learning rate only rises; lower that, or train longer",
            end, schedule.warmup_updates,
        )  # fmt: skip
    if schedule.final_lr > config.optimizer.lr:
        logger.warning(
            "schedule.final_lr=%g is above optimizer.lr=%g, so that the learning rate rises to it; lower it",
            schedule.final_lr, config.optimizer.lr,
        )  # fmt: skip
    if end >= training.max_updates:
        return
    if schedule.needs_end:
        remedies.append(f"training.max_updates={end}, up to which schedule.name={schedule.name} decays")
    if late := [update for update in config.growth.at if update >= end]:
        remedies.append(f"growth.at below that, instead of {late[0]}")
    if remedies:
        logger.warning(
            "training.max_epochs=%d ends training after %d updates or so, before training.max_updates=%d; set %s",
            training.max_epochs, end, training.max_updates, " and ".join(remedies),
        )  # fmt: skip
