"""Choice of the best checkpoint among validations, also by scores that come late, and patience."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from deepspeed_nmt.console import logger
from deepspeed_nmt.parallel.collectives import from_main
from deepspeed_nmt.train.events import Detail, Events
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.session import Session
from deepspeed_nmt.train.validation import LateResult, Validation

IsSignificantlyBetter = Callable[[int, int], bool]
"""Function of two updates, True if the first one's translations are significantly better."""


def update_best(
    progress: Progress, update: int, validation: Validation, is_significantly_better: IsSignificantlyBetter
) -> tuple[Progress, bool]:
    """Return the progress after a validation, and True if it is the best so far.

    A validation without a score is no reason to stop early. It is the best one only as long as no score is known.

    Args:
        progress: before.
        update: update of the validation.
        validation: the validation.
        is_significantly_better: compares translations.
    """
    since = progress.validations_since_best
    if not validation.improves_on(progress):
        return replace(progress, validations_since_best=since + (validation.score != -math.inf)), False
    by, before = validation.choice.by, progress.best_score
    is_comparable = before is not None and math.isfinite(before) and progress.best_by in (None, by)
    resets_patience = (
        not is_comparable
        or validation.is_near_chance
        or is_significantly_better(update, progress.patience_update or progress.best_update)
    )
    return replace(
        progress,
        best_score=validation.score,
        best_loss=validation.loss,
        best_by=by,
        best_update=update,
        validations_since_best=0 if resets_patience else since + 1,
        patience_update=update if resets_patience else progress.patience_update,
    ), True


def apply_late_results(session: Session, progress: Progress) -> tuple[Progress, bool]:
    """Log late values that have come, and update the best checkpoint by them. All ranks call it together.

    Returns:
        The progress, and True if another checkpoint is the best now.
    """
    results = session.validator.late_results(progress.awaited)
    if not results:
        return progress, False
    for result in results:
        session.metrics.log_late(result)
    session.saver.finish()  # a checkpoint that is still being written is kept, too
    names = from_main(session.store.names() if session.world.is_main else None, session.world)
    kept = [session.store.update_of(name) for name in names]
    is_significantly_better = session.validator.is_significantly_better
    return update_best_late(progress, results, kept, is_significantly_better, warn=session.world.is_main)


def update_best_late(
    progress: Progress,
    results: Sequence[LateResult],
    kept: Collection[int],
    is_significantly_better: IsSignificantlyBetter,
    *,
    warn: bool,
) -> tuple[Progress, bool]:
    """Return the progress after pending scores have come, and True if another checkpoint is the best now.

    Args:
        progress: before.
        results: late results, oldest first.
        kept: updates that have checkpoints.
        is_significantly_better: compares translations.
        warn: True on rank 0.
    """
    has_changed = False
    for result in results:
        update, validation = result.update, result.validation
        if update not in progress.awaited or validation is None:
            continue
        progress = replace(progress, awaited=tuple(other for other in progress.awaited if other != update))
        if validation.choice.by != progress.best_by:  # another measure chooses by now
            continue
        after, is_best = update_best(progress, update, validation, is_significantly_better)
        if is_best and update not in kept:
            if warn:
                logger.warning(
                    "%s of update %d is the best so far, but its checkpoint was not kept; raise validation.late_keep",
                    validation.choice.by,
                    update,
                )
            continue
        progress, has_changed = after, has_changed or is_best
    return progress, has_changed


def record_best(events: Events, progress: Progress, validation: Validation) -> None:
    """Record that a validation is the best so far, by its score, or by its loss as long as only losses are compared.

    Args:
        events: events of the run.
        progress: after it.
        validation: the newest validation, whose scores are by the same measure.
    """
    choice, score, loss = validation.choice, progress.best_score, progress.best_loss
    measure, decimals = choice.by.partition(" ")[0], choice.decimals
    value: float | None = None if score is None else choice.sign * score
    if score is None or score < choice.least:
        measure, value, decimals = f"{measure.rpartition('/')[0]}/loss", loss, 4
    if value is None or not math.isfinite(value):
        return
    text = f"update {progress.best_update} is the best so far: {measure} {value:.{decimals}f}"
    details: dict[str, Detail] = {"measure": measure, "score": value, "loss": loss}
    events.record("best", progress.update, text, **details, best_update=progress.best_update)


def with_pending_score(progress: Progress, validation: Validation, *, warn: bool) -> Progress:
    """Return the progress that also awaits the score of a new validation, if that is pending.

    Args:
        progress: before.
        validation: validation after the newest update.
        warn: True on rank 0.
    """
    limit = validation.pending_limit
    if not limit:
        return progress
    awaited = (*progress.awaited, progress.update)
    for update in awaited[:-limit] if warn else ():
        logger.warning(
            "%s of update %d has not come, and its checkpoint is no longer kept for it (validation.late_keep)",
            validation.choice.by,
            update,
        )
    return replace(progress, awaited=awaited[-limit:])
