"""A toy loss: cross-entropy in which the end of a sentence counts more than other tokens.

With w_t = ``end_weight`` where y_t is EOS and 1 elsewhere, the loss of a sentence is

    sum_t w_t (-log p(y_t)).

The file shows what a likelihood needs: a configuration class, the likelihood, and the registry entry.

Legend: B sentences, T target length, N positions of all targets, D model width.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import Likelihood, LikelihoodOutput, States
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.registry import Entry


class EndWeightedConfig(LikelihoodConfig):
    """Settings of the likelihood."""

    end_weight: float = Field(default=2.0, gt=0.0, description="weight of the end of a sentence (w)")


class EndWeighted(Likelihood):
    """Cross-entropy that weights the end of a sentence."""

    def __init__(self, config: EndWeightedConfig, vocabulary: Vocabulary) -> None:
        self.end_weight, self.vocabulary = config.end_weight, vocabulary

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the loss at the top exit of each pass."""
        targets_N = batch.target_output_BT.flatten()
        weights_N = torch.where(targets_N == self.vocabulary.eos, self.end_weight, 1.0)
        if batch.token_weights is not None:
            weights_N = weights_N * batch.token_weights.flatten()
        loss = partial(
            projected_cross_entropy,
            targets_N=targets_N,
            smoothing=0.0,
            ignore_index=self.vocabulary.pad,
            divergence_weight=divergence,
            row_weights_N=weights_N,
        )
        total, nll_N, kl = model.projection([states[TOP].flatten(0, 1) for states in passes], loss)
        return LikelihoodOutput(total, nll_N, {"divergence": kl} if len(passes) > 1 else {})


ENTRY = Entry("end_weighted", EndWeightedConfig, EndWeighted)
