"""Choice of the best checkpoint among validations, also by scores that come late, and patience."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from deepspeed_nmt.console import logger
from deepspeed_nmt.parallel.collectives import from_main
from deepspeed_nmt.train.events import Detail, Events
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.session import LateValidation, Session, Validation


def judge(
    progress: Progress, update: int, found: Validation, gains: Callable[[int, int], bool]
) -> tuple[Progress, bool]:
    """Return the progress after a validation, and True if it is the best so far.

    A validation without a score is no reason to stop early. It is the best one only as long as no score is known.

    Args:
        progress: before.
        update: update of the validation.
        found: the validation.
        gains: function of two updates, True if the first one's translations are significantly better.
    """
    if not found.improves_on(progress):
        counts = found.score != -math.inf
        return replace(progress, validations_since_best=progress.validations_since_best + counts), False
    before = progress.best_score
    compared = before is not None and math.isfinite(before) and progress.best_by in (None, found.best_by)
    resets = (
        not compared
        or found.score < found.least  # only losses are compared
        or gains(update, progress.patience_update or progress.best_update)
    )
    return replace(
        progress,
        best_score=found.score,
        best_loss=found.loss,
        best_by=found.best_by,
        best_update=update,
        validations_since_best=0 if resets else progress.validations_since_best + 1,
        patience_update=update if resets else progress.patience_update,
    ), True


def take_late(session: Session, progress: Progress) -> tuple[Progress, bool]:
    """Log late values that have come, and choose by them. All ranks call it together.

    Returns:
        The progress, and True if another checkpoint is the best now.
    """
    late = session.validator.late(progress.awaited)
    if not late:
        return progress, False
    for each in late:
        if each.values:
            values = {**each.values, "train/target_tokens": float(each.target_tokens)}
            session.metrics.log_earlier(each.update, values)
    session.saver.finish()  # a checkpoint that is still being written is kept, too
    kept = from_main(session.store.names() if session.world.is_main else None, session.world)
    updates = [session.store.update_of(name) for name in kept]
    return choose_late(progress, late, updates, session.validator.gains, warn=session.world.is_main)


def choose_late(
    progress: Progress,
    late: Sequence[LateValidation],
    kept: Collection[int],
    gains: Callable[[int, int], bool],
    *,
    warn: bool,
) -> tuple[Progress, bool]:
    """Return the progress after awaited scores have come, and True if another checkpoint is the best now.

    Args:
        progress: before.
        late: validations, oldest first.
        kept: updates that have checkpoints.
        gains: as for :func:`judge`.
        warn: True on rank 0.
    """
    changed = False
    for each in late:
        if each.update not in progress.awaited or each.found is None:
            continue
        progress = replace(progress, awaited=tuple(other for other in progress.awaited if other != each.update))
        if each.found.best_by != progress.best_by:  # another measure chooses by now
            continue
        after, best = judge(progress, each.update, each.found, gains)
        if best and each.update not in kept:
            if warn:
                logger.warning(
                    "%s of update %d is the best so far, but its checkpoint was not kept; raise validation.late_keep",
                    each.found.best_by,
                    each.update,
                )
            continue
        progress, changed = after, changed or best
    return progress, changed


def record_best(events: Events, progress: Progress, found: Validation) -> None:
    """Record that a validation is the best so far, by its score, or by its loss as long as only losses are compared.

    Args:
        events: events of the run.
        progress: after it.
        found: the newest validation, whose scores are by the same measure.
    """
    score, loss, measure = progress.best_score, progress.best_loss, found.best_by.partition(" ")[0]
    value: float | None = None if score is None else found.sign * score
    decimals = found.decimals
    if score is None or score < found.least:
        measure, value, decimals = f"{measure.rpartition('/')[0]}/loss", loss, 4
    if value is None or not math.isfinite(value):
        return
    text = f"update {progress.best_update} is the best so far: {measure} {value:.{decimals}f}"
    details: dict[str, Detail] = {"measure": measure, "score": value, "loss": loss}
    events.record("best", progress.update, text, **details, best_update=progress.best_update)


def with_awaited(progress: Progress, found: Validation, *, warn: bool) -> Progress:
    """Return the progress that also awaits the score of a new validation, if that is to come.

    Args:
        progress: before.
        found: validation after the newest update.
        warn: True on rank 0.
    """
    if not found.may_await:
        return progress
    awaited = (*progress.awaited, progress.update)
    for update in awaited[: -found.may_await] if warn else ():
        logger.warning(
            "%s of update %d has not come, and its checkpoint is no longer kept for it (validation.late_keep)",
            found.best_by,
            update,
        )
    return replace(progress, awaited=awaited[-found.may_await :])
