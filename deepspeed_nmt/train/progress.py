"""Progress of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_BLEU = 1.0
"""BLEU below which only losses are compared: so few words match by chance, while a model learns its first ones."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as a checkpoint records it.

    Attributes:
        update: number of updates made.
        epoch: epoch of the next update, from 0.
        epoch_update: index of the next update in its epoch, from 0.
        target_tokens: target tokens seen so far.
        train_seconds: seconds spent in updates, over all restarts.
        best_score: score of the best validation so far, greater is better; None before the first validation.
        best_loss: loss of that validation; None before it, and in checkpoints that did not record it.
        best_update: update of that validation.
        validations_since_best: number of validations since then, for early stopping.
        skipped: number of consecutive skipped updates up to this one.
        rollbacks: number of rollbacks so far.
        retries: number of rollbacks since the run last passed ``failed_at``.
        failed_at: update at which the run failed last; 0 before the first rollback.
        bad_measurements: number of consecutive bad measurements of the collapse monitor.
    """

    update: int = 0
    epoch: int = 0
    epoch_update: int = 0
    target_tokens: int = 0
    train_seconds: float = 0.0
    best_score: float | None = None
    best_loss: float | None = None
    best_update: int = 0
    validations_since_best: int = 0
    skipped: int = 0
    rollbacks: int = 0
    retries: int = 0
    failed_at: int = 0
    bad_measurements: int = 0

    def improved_by(self, score: float, loss: float) -> bool:
        """Return True if a validation is better than the best so far: by its score, and at equal scores by its loss.

        Scores are equal if their two printed decimals are, or if both are below :data:`LEAST_BLEU`.

        Args:
            score: of the validation; greater is better.
            loss: of the validation, in nats a token.
        """
        if self.best_score is None:
            return True
        best_loss = math.inf if self.best_loss is None else self.best_loss
        return _rank(score, loss) > _rank(self.best_score, best_loss)


def _rank(score: float, loss: float) -> tuple[float, float]:
    """Return a key that sorts validations, the best last; NaN is worse than any number."""
    return round(score, 2) if score >= LEAST_BLEU else 0.0, -math.inf if math.isnan(loss) else -loss
