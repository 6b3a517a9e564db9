"""The training loop."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import TrainingError, counted
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import any_rank, gather_lists
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.choosing import apply_late_results, record_best, update_best, with_pending_score
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.session import Session
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.stability import roll_back
from deepspeed_nmt.train.updates import Updates


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
    config, world, saver = session.config, session.world, session.saver
    if _stop_requested(session.stop, world):  # requested during set-up
        return progress
    progress, save_wanted = apply_late_results(session, progress)  # scores that came while the run did not train
    validation_wanted = False
    with Updates(session, progress) as updates:
        while not config.ends_at(progress):
            progress = updates.make(progress)
            if progress.skipped >= config.max_skipped:
                saver.finish()
                roll_back(session.store, progress, updates.cause, config.max_rollbacks, world, session.events)
                return None
            updates.log(progress)
            fatal = ""
            if session.monitor.due(progress.update):
                progress, fatal = _measure_collapse(session, progress)
            # In a streak of skipped updates validation and saving wait, because the weights may be ruined. At the
            # end of training they cannot wait.
            is_sound, ends = progress.skipped == 0, config.ends_at(progress)
            validation_wanted = validation_wanted or _due(config.validate_every, progress)
            save_wanted = save_wanted or _due(config.save_every or config.validate_every, progress)
            save_now = save_wanted and is_sound
            if (validation_wanted and is_sound) or ends:
                progress, keeps = _validate(session, progress)
                validation_wanted, save_now = False, save_now or keeps
            elif save_now:
                progress, _ = apply_late_results(session, progress)
            session.watchdog.at(f"agreeing after update {progress.update}")
            stopping = _stop_requested(session.stop, world)
            if save_now or stopping or fatal:
                saver.save(progress, must=stopping or config.ends_at(progress))
                save_wanted = False
            if fatal:
                saver.finish()
                with fail_together(world):
                    raise TrainingError(f"{fatal}. The run was saved after update {saver.saved_at}")
            if stopping:
                break
    saver.finish()
    if saver.saved_at != progress.update or save_wanted:
        saver.save(progress, must=True)
    _log_end(session, progress)
    return progress


def _stop_requested(stop: StopRequest, world: World) -> bool:
    """Return True on all ranks if a stop is requested on any rank."""
    requested = any_rank(bool(stop), world)
    if requested:  # a later request may have reached some ranks only
        stop.agree(next(filter(None, gather_lists([stop.signal_name], world)), ""))
    return requested


def _due(every: int, progress: Progress) -> bool:
    """Return True after every k-th update; with ``every`` 0, at the end of an epoch."""
    return progress.epoch_update == 0 if every == 0 else progress.update % every == 0


def _measure_collapse(session: Session, progress: Progress) -> tuple[Progress, str]:
    """Measure and log source reliance, and return the reason to stop the run, or ""."""
    session.watchdog.at(f"measuring collapse after update {progress.update}", slow=True)
    measured = session.monitor(progress.update)
    session.metrics.log(progress, measured)
    bad, fatal = session.monitor.check(progress.update, measured, progress.bad_measurements)
    return replace(progress, bad_measurements=bad), fatal


def _validate(session: Session, progress: Progress) -> tuple[Progress, bool]:
    """Validate and log, and return True if the checkpoint is to be kept: of the best validation, or a pending one."""
    session.watchdog.at(f"validating after update {progress.update}", slow=True)
    validation = session.validator(progress)
    session.metrics.log(progress, validation.values)
    for tag, table in validation.samples.items():
        session.metrics.text(progress.update, tag, table)
    session.metrics.draw(progress.update, validation.images)
    progress, is_late_best = apply_late_results(session, progress)
    is_significantly_better = session.validator.is_significantly_better
    progress, is_best = update_best(progress, progress.update, validation, is_significantly_better)
    if is_best or is_late_best:
        record_best(session.events, progress, validation)
    progress = with_pending_score(progress, validation, warn=session.world.is_main)
    return progress, is_best or is_late_best or validation.pending_limit > 0


def _log_end(session: Session, progress: Progress) -> None:
    """Log that training stopped early, and that scores are pending."""
    patience = session.config.patience
    if patience and progress.validations_since_best >= patience:
        logger.info("no better validation in %d in a row: stopped early", patience)
    if progress.awaited:
        logger.info(
            "%s have scores to come; `deepspeed-nmt choose-best --run %s` chooses by them",
            counted(len(progress.awaited), "validations"),
            session.store.directory.parent,
        )
