"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        update: updates made.
        epoch, epoch_update: position in the data: the next update to make.
        target_tokens: seen so far.
        train_seconds: spent in updates, over all restarts.
        best_score: best validation score so far, greater is better; None before the first validation.
        best_update: when it was reached.
        validations_since_best: for early stopping.
        skipped: updates in a row, up to this one, that were skipped.
        rollbacks: how often the run was rolled back.
        retries: how often since it last got past the update where it failed.
        failed_at: that update; 0 before the first rollback.
        bad_measurements: of the collapse monitor, in a row.
    """

    update: int = 0
    epoch: int = 0
    epoch_update: int = 0
    target_tokens: int = 0
    train_seconds: float = 0.0
    best_score: float | None = None
    best_update: int = 0
    validations_since_best: int = 0
    skipped: int = 0
    rollbacks: int = 0
    retries: int = 0
    failed_at: int = 0
    bad_measurements: int = 0
