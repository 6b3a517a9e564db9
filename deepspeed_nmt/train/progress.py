"""Progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_nmt.data.mixture import Phase


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as a checkpoint records it.

    Attributes:
        update: number of updates made.
        epoch: epoch of the next update, from 0.
        epoch_update: index of the next update in its epoch, from 0.
        target_tokens: target tokens seen so far.
        train_seconds: seconds spent in updates, over all restarts.
        best_score: score of the best validation so far, greater is better; None before the first validation, and
            -inf if no score is known yet.
        best_loss: loss of that validation; None before it, and in checkpoints that did not record it.
        best_by: tag of the value that is the score; None before it, and in checkpoints that did not record it.
        best_update: update of that validation.
        validations_since_best: number of validations since the best one, for early stopping; since the last
            significant gain if ``validation.significant`` is set.
        patience_update: update of that validation; 0 in older checkpoints, which reset it at each gain.
        awaited: updates of validations whose scores are pending, oldest first.
        skipped: number of consecutive skipped updates up to this one.
        rollbacks: number of rollbacks so far.
        retries: number of rollbacks since the run last passed ``failed_at``.
        failed_at: update at which the run failed last; 0 before the first rollback.
        bad_measurements: number of consecutive bad measurements of the collapse monitor.
        phases: mixtures of corpora that the run was trained on, the last one in force; none for a single corpus.
    """

    update: int = 0
    epoch: int = 0
    epoch_update: int = 0
    target_tokens: int = 0
    train_seconds: float = 0.0
    best_score: float | None = None
    best_loss: float | None = None
    best_by: str | None = None
    best_update: int = 0
    validations_since_best: int = 0
    patience_update: int = 0
    awaited: tuple[int, ...] = ()
    skipped: int = 0
    rollbacks: int = 0
    retries: int = 0
    failed_at: int = 0
    bad_measurements: int = 0
    phases: tuple[Phase, ...] = ()

    def with_choice_of(self, other: Progress) -> Progress:
        """Return this progress with the choice of the best checkpoint of another one."""
        return replace(self, **{name: getattr(other, name) for name in _CHOICE})


_CHOICE = (
    *("best_score", "best_loss", "best_by", "best_update"),
    *("validations_since_best", "patience_update", "awaited"),
)
"""Fields that choose the best checkpoint and stop early. Scores that come late change them, and nothing else."""
