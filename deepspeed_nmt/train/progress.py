"""Progress of a run, and the state of its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from deepspeed_nmt.data.mixture import Phase
from deepspeed_nmt.registry import Config

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
"""Number that is read from a file."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as a checkpoint records it.

    Attributes:
        update: number of updates made.
        epoch, epoch_update: position of the next update, both from 0.
        train_seconds: seconds spent in updates, over all restarts.
        best_score: score of the best validation so far, greater is better; None before the first validation, and
            -inf if no score is known.
        best_by: description of the measure that is the score.
        validations_since_best: number of validations since the best one, for early stopping; since the last
            significant gain if ``validation.significant`` is set.
        patience_update: update of that validation.
        skipped: number of consecutive skipped updates up to this one.
        retries: number of rollbacks since the run last passed ``failed_at``.
        failed_at: update at which the run failed last; 0 before the first rollback.
        bad_measurements: number of consecutive bad measurements of the collapse monitor.
        monitored_nll: loss of its last measurement; None before the first.
        drop_ratio: that of layers that adapt it to its measurements; None before the first that counts.
        phases: mixtures of corpora that the run was trained on, the last one in force; none for a single corpus.
    """

    update: Count = 0
    epoch: Count = 0
    epoch_update: Count = 0
    target_tokens: Count = 0
    train_seconds: float = 0.0
    best_score: float | None = None
    best_loss: float | None = None
    best_by: str | None = None
    best_update: Count = 0
    validations_since_best: Count = 0
    patience_update: Count = 0
    skipped: Count = 0
    rollbacks: Count = 0
    retries: Count = 0
    failed_at: Count = 0
    bad_measurements: Count = 0
    monitored_nll: float | None = None
    drop_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    phases: tuple[Phase, ...] = ()


class LogState(Config):
    """Sums of one rank since the last line of the log, and what a line counts from the start of the run.

    Attributes:
        sums: sums of losses, by name.
        tokens_of: target tokens of the updates that have each of these sums.
        tokens, worked: target tokens of updates that were not skipped, and of all.
        padded, real: positions in this rank's micro-batches, and those that are not padding.
        waited, elapsed: seconds of waiting for data, and of all updates.
        skipped, spikes: of the run.
        losses, norms: losses of the newest updates, nats per token, and norms of their gradients, with which the next
            one is compared.
    """

    sums: dict[str, float] = Field(default={})
    tokens_of: dict[str, Count] = Field(default={})
    corpus_tokens: dict[str, Count] = Field(default={})
    tokens: Count = 0
    worked: Count = 0
    padded: Count = 0
    real: Count = 0
    waited: float = 0.0
    elapsed: float = 0.0
    skipped: Count = 0
    spikes: Count = 0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    model_config = ConfigDict(allow_inf_nan=True)
