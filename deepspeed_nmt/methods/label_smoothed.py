"""Label-smoothed cross-entropy.

Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: "Rethinking the Inception Architecture for Computer Vision", 2016; as used
by Vaswani et al.: "Attention Is All You Need", 2017, section 5.4.

With smoothing e and a vocabulary of V tokens, the loss of a target token y is

    (1 - e) (-log p(y)) + e/V sum_v (-log p(v)).

Legend: T target length, D model width.
"""

from __future__ import annotations

from functools import partial

from pydantic import Field

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import Likelihood, LikelihoodOutput, States
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.registry import Entry


class LabelSmoothedConfig(LikelihoodConfig):
    """Settings of the label-smoothed cross-entropy."""

    smoothing: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="probability spread evenly over the vocabulary (epsilon)"
    )


class LabelSmoothed(Likelihood):
    """Label-smoothed cross-entropy at the top exit."""

    def __init__(self, smoothing: float, pad: int) -> None:
        self.smoothing = smoothing
        self.pad = pad

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the loss at the top exit of each pass; see :class:`Likelihood`."""
        states_ND = [states[TOP].flatten(0, 1) for states in passes]
        consume = partial(
            projected_cross_entropy,
            targets_N=batch.target_output_BT.flatten(),
            smoothing=self.smoothing,
            ignore_index=self.pad,
            divergence_weight=divergence,
            row_weights_N=None if (weights_BT := batch.token_weights) is None else weights_BT.flatten(),
        )
        loss, nll_N, kl = model.projection(states_ND, consume)
        return LikelihoodOutput(loss, nll_N, {"divergence": kl} if len(passes) > 1 else {})


ENTRY = Entry(
    "label_smoothed", LabelSmoothedConfig, lambda config, vocabulary: LabelSmoothed(config.smoothing, vocabulary.pad)
)
