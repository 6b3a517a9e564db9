"""Learning-rate schedules, in updates."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from deepspeed_nmt.registry import Section


class ScheduleConfig(Section):
    """Learning-rate schedule: a linear warm-up to ``optimizer.lr``, then a decay."""

    name: Literal["inverse_sqrt", "cosine", "linear", "constant", "wsd"] = Field(
        default="inverse_sqrt", description="shape after the warm-up"
    )
    warmup_updates: int = Field(default=4000, ge=0, description="updates of linear warm-up")
    initial_lr: float = Field(default=1e-7, ge=0.0, description="learning rate at the start of the warm-up")
    skipped_updates: int = Field(
        default=0, ge=0, description="updates by which the schedule is ahead; warmup_updates: it begins at the peak"
    )
    final_lr: float = Field(
        default=0.0, ge=0.0, description="learning rate of cosine, linear and wsd at training.max_updates"
    )
    decay_updates: int = Field(
        default=0, ge=0, description="last updates, in which wsd (warm-up, stable, decay) lowers the learning rate"
    )

    @property
    def warmup_left(self) -> int:
        """Updates of the warm-up that a run makes."""
        return max(0, self.warmup_updates - self.skipped_updates)

    @property
    def needs_end(self) -> bool:
        """True if the learning rate falls up to ``training.max_updates``."""
        return self.name in ("cosine", "linear", "wsd")

    @model_validator(mode="after")
    def _check_decay(self) -> ScheduleConfig:
        if self.name == "wsd" and self.decay_updates == 0:
            raise ValueError("decay_updates is 0, but name=wsd ends in a decay; use a fifth of the updates or so")
        if self.name != "wsd" and self.decay_updates > 0:
            raise ValueError(f"decay_updates is a setting of name=wsd only, and name is {self.name}; remove it")
        if self.final_lr > 0.0 and not self.needs_end:
            raise ValueError(f"final_lr is {self.final_lr:g}, but name={self.name} never comes to it; remove it")
        return self


def learning_rate(update: int, peak: float, config: ScheduleConfig, max_updates: int) -> float:
    """Return the learning rate of an update.

    - warm-up:       initial + (peak - initial) u / W
    - inverse_sqrt:  peak sqrt(W / u)
    - cosine:        final + (peak - final) (1 + cos(pi (u - W) / (U - W))) / 2
    - linear:        final + (peak - final) (U - u) / (U - W)
    - wsd:           peak until U - D, then final + (peak - final) (1 - sqrt((u - U + D) / D))   (Hägele et al. 2024)

    with u the update from 1, W ``warmup_updates``, U ``max_updates``, D ``decay_updates``, of which those within the
    warm-up do not count; ``skipped_updates`` are added to u and U.
    """
    warmup, update, max_updates = (
        config.warmup_updates,
        update + config.skipped_updates,
        max_updates + config.skipped_updates,
    )
    if update <= warmup:
        return config.initial_lr + (peak - config.initial_lr) * update / warmup
    if config.name == "constant":
        return peak
    if config.name == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / update)
    since = max(warmup, max_updates - config.decay_updates) if config.name == "wsd" else warmup
    done = min(1.0, max(0.0, (update - since) / max(1, max_updates - since)))
    if config.name == "cosine":
        rest = (1.0 + math.cos(math.pi * done)) / 2.0
    else:
        rest = 1.0 - (math.sqrt(done) if config.name == "wsd" else done)
    return config.final_lr + (peak - config.final_lr) * rest
