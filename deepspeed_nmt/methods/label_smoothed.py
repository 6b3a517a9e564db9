"""Label-smoothed cross-entropy (Szegedy et al. 2016; Vaswani et al. 2017, 5.4).

With e the smoothing and V the vocabulary, a target token y costs

    (1 - e) (-log p(y)) + e/V sum_v (-log p(v)).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import LossOutput, Objective
from deepspeed_nmt.kernels import ops
from deepspeed_nmt.registry import Config


class LabelSmoothedConfig(Config):
    """Settings of the label-smoothed cross-entropy."""

    name: Literal["label_smoothed"] = "label_smoothed"
    smoothing: float = Field(default=0.1, ge=0.0, lt=1.0, description="e: mass spread evenly over the vocabulary")


class LabelSmoothed:
    """Cross-entropy at the decoder's top exit."""

    def __init__(self, smoothing: float, pad: int) -> None:
        self.smoothing = smoothing
        self.pad = pad

    def __call__(self, model: TranslationModel, batch: Batch) -> LossOutput:
        states_BTD = model(batch)[TOP]
        consume = partial(
            ops.projected_cross_entropy,
            targets_N=batch.target_output_BT.flatten(),
            smoothing=self.smoothing,
            ignore_index=self.pad,
        )
        loss, nll = model.projection(states_BTD.flatten(0, 1), consume)
        return LossOutput(loss=loss, nll=nll.detach())


def build_label_smoothed(config: LabelSmoothedConfig, pad: int) -> Objective:
    """The objective of a run."""
    return LabelSmoothed(config.smoothing, pad)
