"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.loader import Prefetcher, Update
from deepspeed_nmt.data.plans import Cursor
from deepspeed_nmt.errors import TrainingError, counted
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import any_rank
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.choosing import judge, record_best, take_late, with_awaited
from deepspeed_nmt.train.norms import norms_by_layer
from deepspeed_nmt.train.optimizer import learning_rate
from deepspeed_nmt.train.out_of_memory import explained
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.session import Session
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, roll_back, worth_explaining
from deepspeed_nmt.train.throughput import Window


def train(session: Session, progress: Progress) -> Progress | None:
    """Train until the end or a requested stop, and save.

    Args:
        session: objects that the loop needs.
        progress: progress to continue from.

    Returns:
        The new progress; None after a rollback, which requires a new session from the newest checkpoint.

    Raises:
        TrainingError: if the gradient stays infinite or NaN in spite of rollbacks, if memory runs out, or if the
            decoder ignores its source and ``collapse.action`` is "stop".
        OSError: if the last checkpoint cannot be written.
    """
    config, engine, world, watchdog = session.config, session.engine, session.world, session.watchdog
    saver, events = session.saver, session.events
    if _stop_requested(session.stop, world):  # requested during set-up
        return progress
    plan, corpora = session.loader.plan, session.loader.corpora.parts
    window = Window(session.workload, [corpus.name for corpus in corpora])
    spikes = SpikeWatch(config.spike_factor, events)
    loss_scale = engine.scalars().loss_scale
    parameters = [name for name, _ in engine.module.model.named_parameters()]
    fatal = ""
    validating = False
    progress, saving = take_late(session, progress)  # scores that came while the run did not train
    updates = Prefetcher(session.loader.updates(Cursor(progress.epoch, progress.epoch_update), progress.update + 1))
    try:
        while not config.ends_at(progress):
            waiting = time.monotonic()
            watchdog.at(f"update {progress.update + 1}, waiting for its data")
            update = updates.next()
            started = time.monotonic()
            lr = learning_rate(update.number, session.optimizer.lr, session.schedule, config.max_updates)
            with explained(f"update {update.number}", update.micro_batches, world.device):
                explain = worth_explaining(progress.skipped, loss_scale)
                measure = config.norms_every > 0 and update.number % config.norms_every == 0
                begins = _micro_batch_callback(watchdog, update)
                result = engine.update(
                    update.micro_batches, update.target_tokens, lr, explain, begins, measure=measure
                )
            loss_scale = result.loss_scale
            progress = _advance(progress, update, result.skipped, time.monotonic() - started)
            events.at(progress.update)
            if result.skipped:
                cause = report_skip(update, result, progress.skipped, parameters, world, events)
                if progress.skipped >= config.max_skipped:
                    saver.finish()
                    roll_back(session.store, progress, cause, config.max_rollbacks, world, events)
                    return None
            spikes(update, result, world)
            window.add(update, result, waited=started - waiting, elapsed=time.monotonic() - waiting)

            if progress.update % config.log_every == 0:
                values = {
                    **window.flush(lr, world),
                    "train/target_tokens": float(progress.target_tokens),
                    "train/spikes": float(spikes.count),
                    "train/rollbacks": float(progress.rollbacks),
                    "perf/hours": progress.train_seconds / 3600.0,
                }
                if len(corpora) > 1:
                    epochs = plan.epochs(Cursor(progress.epoch, progress.epoch_update), progress.update + 1)
                    for corpus, count in zip(corpora, epochs, strict=True):
                        values[f"data/{corpus.name}/epochs"] = count
                        values[f"data/{corpus.name}/target_tokens"] = count * corpus.mean_target_tokens
                session.metrics.log(progress.update, values, f" (epoch {progress.epoch + 1})")
            if result.squares is not None:
                norms = norms_by_layer(result.squares)
                session.metrics.log(progress.update, {**norms, "train/target_tokens": float(progress.target_tokens)})
            if session.monitor.due(progress.update):
                progress, fatal = _measure_collapse(session, progress)
            validating = validating or _due(config.validate_every, progress)
            saving = saving or _due(config.save_every or config.validate_every, progress)
            # In a streak of skipped updates validation and saving wait, because the weights may be ruined. At the
            # end of training they cannot wait.
            sound, best = progress.skipped == 0, False
            if (validating and sound) or config.ends_at(progress):
                progress, best = _validate(session, progress)
                validating = False
            elif saving and sound:
                progress, best = take_late(session, progress)
            watchdog.at(f"agreeing after update {progress.update}")
            stopping = _stop_requested(session.stop, world)
            if best or stopping or fatal or (saving and sound):
                saver.save(progress, must=stopping or config.ends_at(progress))
                saving = False
            if fatal:
                saver.finish()
                with fail_together(world):
                    raise TrainingError(f"{fatal}. The run was saved after update {saver.saved_at}")
            if stopping:
                break
    finally:
        updates.close()
    saver.finish()
    if saver.saved_at != progress.update or saving:
        saver.save(progress, must=True)
    if config.patience and progress.validations_since_best >= config.patience:
        logger.info("no better validation in %d in a row: stopped early", config.patience)
    if progress.awaited:
        logger.info(
            "%s have scores to come; `deepspeed-nmt choose-best --run %s` chooses by them",
            counted(len(progress.awaited), "validations"),
            session.store.directory.parent,
        )
    return progress


def _stop_requested(stop: StopRequest, world: World) -> bool:
    """Return True on all ranks if a stop is requested on any rank."""
    requested = any_rank(bool(stop), world)
    if requested:  # a later request may have reached some ranks only
        stop.agree()
    return requested


def _micro_batch_callback(watchdog: Watchdog, update: Update) -> Callable[[int], None]:
    """Return a callback that reports the index of the current micro-batch to the watchdog."""
    count = len(update.micro_batches)
    return lambda index: watchdog.at(f"update {update.number}, micro-batch {index + 1} of {count}")


def _due(every: int, progress: Progress) -> bool:
    """Return True after every k-th update; with ``every`` 0, at the end of an epoch."""
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


def _measure_collapse(session: Session, progress: Progress) -> tuple[Progress, str]:
    """Measure and log source reliance, and return the reason to stop the run, or ""."""
    session.watchdog.at(f"measuring collapse after update {progress.update}", slow=True)
    found = session.monitor(progress.update)
    session.metrics.log(progress.update, {**found, "train/target_tokens": float(progress.target_tokens)})
    bad, fatal = session.monitor.judge(progress.update, found, progress.bad_measurements)
    return replace(progress, bad_measurements=bad), fatal


def _validate(session: Session, progress: Progress) -> tuple[Progress, bool]:
    """Validate and log, and return True if a checkpoint is to be saved: of the best validation, or an awaited one."""
    session.watchdog.at(f"validating after update {progress.update}", slow=True)
    found = session.validator(progress)
    session.metrics.log(progress.update, {**found.values, "train/target_tokens": float(progress.target_tokens)})
    for tag, table in found.samples.items():
        session.metrics.text(progress.update, tag, table)
    session.metrics.draw(progress.update, found.images)
    progress, late_best = take_late(session, progress)
    progress, best = judge(progress, progress.update, found, session.validator.gains)
    if best or late_best:
        record_best(session.events, progress, found)
    return with_awaited(progress, found, warn=session.world.is_main), best or late_best or found.may_await > 0
