"""Exits for a model that is trained already: a norm for each, taught by the deep exit, and nothing else is trained.

With x_m the state after m of M decoder layers (the encoder at full depth) and W the model's projection, exit m
predicts p_m, and the deep exit p as before:

    p_m = softmax(W norm_m(x_m + U_m V_m x_m)),
    loss = 1/E sum_m [CE(p_m, Y) + teacher D(p_m, p)],    D(p, q) = 1/2 [KL(p || q) + KL(q || p)].

norm_m begins as the stack's final LayerNorm, or without one (post-norm) with weights of 1 and biases of 0, which
normalises what a layer's last LayerNorm has scaled. U_m begins as zeros. U_m and V_m have the rank ``rank``; with 0
there are none, and an exit costs 2 D parameters. Everything else is frozen and runs as in inference, without dropout
and without a graph, so an update costs a forward pass and the projections, and the output at full depth stays the
same, bit for bit. An exit reads the state and does not change it, so that it shares keys and values of its layers
with all deeper exits.

A map before the final norm that is trained towards the last layer's distribution is that of Belrose, Furman, Smith,
Halawi, Ostrovsky, McKinney, Biderman, Steinhardt: "Eliciting Latent Predictions from Transformers with the Tuned
Lens", 2023, with a map of full rank. Translating from it is new here.

Legend: E exits, N rows of the projection, D model width, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.core.objective import Likelihood, LikelihoodOutput, Passes, States
from deepspeed_nmt.core.parts import MAX_WIDTH, ExitStages, Parts
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.nn.layers import LayerNorm, LowRank
from deepspeed_nmt.registry import Entry, SelfTest

_PREFIX = "decoder.exits."


class AddedExitsConfig(LabelSmoothedConfig):
    """The exits that are added, and how they are taught."""

    exits: ExitStages = Field(
        default=(1,),
        description="decoder stages (layers or loops) that become exits",
    )
    rank: int = Field(
        default=0, ge=0, le=MAX_WIDTH, description="rank of a map before an exit's norm; 0: the norm alone is trained"
    )
    teacher: float = Field(
        default=1.0, ge=0.0, le=1e6, description="weight of an exit's divergence from the deep exit beside its loss"
    )

    adds_exits: ClassVar[bool] = True

    @override
    def trains_exit(self, encoder: int, decoder: int, stages: tuple[int, int]) -> bool:
        return encoder == stages[0] and decoder in (*self.exits, stages[1])

    @override
    def extend(self, model: TranslationModel) -> None:
        model.requires_grad_(False)
        (decoder,) = model.stacks[1]
        dim = model.projection.weight.shape[1]
        for number in self.exits:
            decoder.exits[str(number)] = LowRankNorm(dim, self.rank) if self.rank else LayerNorm(dim)

    @override
    def begins_as(self, name: str) -> str | None:
        if not name.startswith(_PREFIX):
            return None
        *_, module, last = name.split(".")
        return f"decoder.final_norm.{last}" if module == "norm" or not self.rank else ""

    @override
    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse exits that the model lacks, and regularizers, which nothing that is trained depends on."""
        stages = parts.model.exit_stages()
        if stages is None:
            yield (
                f"objective.added_exits adds exits, but model.name={parts.model.name} has only the one at its top; "
                "use a run of another model"
            )
        elif self.exits[-1] >= stages[1].total:
            side = stages[1]
            yield (
                f"objective.added_exits.exits has {self.exits[-1]}, and model.{side.setting} is {side.total}; give "
                f"numbers below {side.total}"
            )
        elif not any(parts.layer.attends_to_source(n) for n in range(1, self.exits[0] * stages[1].layers + 1)):
            yield (
                f"objective.added_exits.exits has {self.exits[0]}, below which the settings of "
                f"layer.name={parts.layer.name} leave no cross-attention; give a higher number"
            )
        for name in parts.active_regularizers():
            yield f"objective.added_exits trains exits alone, which objective.{name} does not reach; set it to null"


class LowRankNorm(LowRank):
    """norm(x + U V x)."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__(dim, rank)
        self.norm = LayerNorm(dim)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map and normalise. Shape: (..., D) -> (..., D)."""
        normed: Tensor = self.norm(super().forward(x))
        return normed


class AddedExits(Likelihood):
    """Label-smoothed cross-entropy of the added exits, and their divergence from the deep exit, means over exits."""

    def __init__(self, config: AddedExitsConfig, pad: int) -> None:
        self.config = config
        self.pad = pad

    def request_passes(self, passes: Passes) -> None:
        """Request the added exits and the deep one, also in validation, whose loss would not change otherwise."""
        passes.decoder_exits = [*self.config.exits, passes.model.stages[1]]

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the loss and the NLL, means over the added exits; see :class:`Likelihood`."""
        exits, encoder = self.config.exits, model.stages[0]
        deep_ND = passes[0][TOP].flatten(0, 1)
        exits_ND = torch.cat([passes[0][exit_name(encoder, number)].flatten(0, 1) for number in exits])
        targets_N = batch.target_output_BT.flatten()
        weights_N = torch.ones_like(targets_N, dtype=torch.float32)
        if (weights_BT := batch.token_weights) is not None:
            weights_N = weights_N * weights_BT.flatten()
        consume = partial(
            projected_cross_entropy,
            targets_N=targets_N.repeat(len(exits)),
            smoothing=self.config.smoothing,
            ignore_index=self.pad,
            divergence_weight=self.config.teacher,
            row_weights_N=weights_N.repeat(len(exits)) / len(exits),
            taught="symmetric",
        )
        loss, nll_N, kl = model.projection([exits_ND, deep_ND.repeat(len(exits), 1)], consume)
        return LikelihoodOutput(loss, nll_N.view(len(exits), -1).mean(dim=0), {"divergence": kl})


ENTRY = Entry(
    "added_exits",
    AddedExitsConfig,
    lambda config, vocabulary: AddedExits(config, vocabulary.pad),
    SelfTest(
        "added_exits",
        {"model": {"name": "transformer", **SMALL}, "objective": {"added_exits": {"exits": [1], "rank": 3}}},
    ),
)
