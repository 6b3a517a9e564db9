"""N x M multi-layer softmaxing: one model that translates with any number of its layers.

Dabre, Fujita: "Multi-Layer Softmaxing during Training Neural Machine Translation for Flexible Decoding with Fewer
Layers", 2019, algorithm 1.

With enc_i the states after i of N encoder layers, and dec_ij the states after j of M decoder layers that attend to
enc_i,

    enc_i = L^enc_i(enc_{i-1}),    dec_ij = L^dec_j(dec_i,j-1, enc_i),
    loss = 1/(N M) sum_{i,j} CE(softmax(W dec_ij), Y).

All exits share the output projection W. In pre-norm models every exit passes through the final LayerNorm of its
stack.

The N encoder exits are blocks of rows of one batch, so that each decoder layer runs once. The cross-entropy of all
exits is computed chunk by chunk, which bounds the memory of the logits.

Extensions of the paper: ``exits=AxB`` draws A encoder exits and B decoder exits for each update, as a function of
(seed, update). Full depth is always among them. Each drawn exit e is weighted by the inverse of its inclusion
probability pi_e (Horvitz, Thompson: "A Generalization of Sampling Without Replacement from a Finite Universe", 1952),

    loss = sum_{e drawn} (w_e / pi_e) CE_e / sum_{e with pi_e > 0} w_e,

so that its expectation, and that of its gradient, is the mean, weighted by ``weights`` (w_e), over all exits that can
be drawn. On a side with N stages, pi is 1 for the last and (A - 1)/(N - 1) for the others.
``inverse_probability=false`` takes the mean over the drawn exits.

In recurrent stacks an exit is a number of loops. There ``full_depth=false`` draws the A stages of a side with equal
probabilities A/N, so that ``1x1`` trains one random number of loops of each side in an update.

With a weight ``teacher`` (lambda) above 0, the deep exit q teaches the others: an exit p has the loss

    CE_e + lambda KL(q || p),    or with divergence=symmetric    CE_e + lambda/2 [KL(p || q) + KL(q || p)],

in which q is a constant (Phuong, Lampert: "Distillation-Based Training for Multi-Exit Architectures", 2019).

Legend: N rows of the projection, E exits, T target length, D model width.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.core.objective import Likelihood, LikelihoodOutput, Passes, States
from deepspeed_nmt.core.parts import Parts
from deepspeed_nmt.errors import shown
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.kernels.torch_ops import Taught
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.registry import Entry, SelfTest

_EXITS = re.compile(r"([1-9]\d*)x([1-9]\d*)")


class MultiSoftmaxConfig(LabelSmoothedConfig):
    """Exits to train, and their weights."""

    exits: str = Field(default="all", description="all, or AxB: A encoder and B decoder exits drawn for each update")
    weights: dict[str, float] = Field(default={}, description="weights of exits n-m, 1 by default: {6-6: 2.0}")
    inverse_probability: bool = Field(
        default=True,
        description="true: divide the weight of a drawn exit by the probability of drawing it, so that the expected "
        "loss is that of exits=all; false: do not",
    )
    full_depth: bool = Field(
        default=True,
        description="true: full depth is always among the drawn exits; false: it is drawn as often as others, for "
        "exits that are numbers of loops (model.name=recurrent)",
    )
    teacher: float = Field(
        default=0.0, ge=0.0, le=1e6, description="weight of an exit's divergence from the deep exit beside its loss"
    )
    divergence: Taught = Field(
        default="kl",
        description="kl: KL(q, p) of the deep exit q, a constant, and an exit p; symmetric: mean of both directions",
    )

    @field_validator("exits", mode="before")
    @classmethod
    def _form(cls, value: object) -> str:
        if not isinstance(value, str):  # YAML reads 0x2 as a hexadecimal number.
            raise ValueError(f"is {shown(value)} in YAML; use all, or a string AxB such as 2x2, A and B from 1")
        if value != "all" and not _EXITS.fullmatch(value):
            raise ValueError(f"is {shown(value)}; use all, or AxB such as 2x2")
        return value

    @field_validator("weights")
    @classmethod
    def _positive(cls, value: dict[str, float]) -> dict[str, float]:
        if any(weight < 0.0 for weight in value.values()):
            raise ValueError("is negative for an exit; use 0 or more")
        return value

    @model_validator(mode="after")
    def _has_a_teacher(self) -> MultiSoftmaxConfig:
        if self.teacher > 0.0 and not self.full_depth:
            raise ValueError(
                f"teacher is {self.teacher:g}, but with full_depth=false the deep exit is not in each update; set "
                "teacher=0 or full_depth=true"
            )
        return self

    @property
    def drawn(self) -> tuple[int, int] | None:
        """Numbers of encoder and decoder exits drawn for an update; None if all are used."""
        match = _EXITS.fullmatch(self.exits)
        return None if match is None else (int(match[1]), int(match[2]))

    def weight(self, encoder: int, decoder: int) -> float:
        """Return the weight of an exit (w_e)."""
        return self.weights.get(exit_name(encoder, decoder), 1.0)

    def probability(self, encoder: int, decoder: int, stages: tuple[int, int]) -> float:
        """Return the probability that an update includes an exit (pi_e)."""
        sides = zip((encoder, decoder), stages, self.drawn or stages, strict=True)
        if not self.full_depth:
            return math.prod(count / top for _, top, count in sides)
        return math.prod(1.0 if stage == top else (count - 1) / (top - 1) for stage, top, count in sides)

    def trains_exit(self, encoder: int, decoder: int, stages: tuple[int, int]) -> bool:
        """Return True if the exit can be drawn and its weight is above 0."""
        return self.probability(encoder, decoder, stages) > 0.0 and self.weight(encoder, decoder) > 0.0

    def shares(self, exits: Sequence[tuple[int, int]], stages: tuple[int, int]) -> Tensor:
        """Return the factors of the losses of the drawn exits, by stages of both sides. Shape: -> fp32 (E,)."""
        if not self.inverse_probability:
            weight_E = torch.tensor([self.weight(n, m) for n, m in exits])
            return weight_E / weight_E.sum().clamp(min=1e-30)
        every = itertools.product(range(1, stages[0] + 1), range(1, stages[1] + 1))
        total = sum(self.weight(n, m) for n, m in every if self.probability(n, m, stages) > 0.0)
        return torch.tensor([self.weight(n, m) / self.probability(n, m, stages) / total for n, m in exits])

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse exits that the model lacks, weights that leave nothing to train, and layers that cannot be exits."""
        stages = parts.model.exit_stages()
        if stages is None:
            yield (
                f"objective.multi_softmax trains many exits, but model.name={parts.model.name} has only the one at "
                "its top to train; use another objective, or model.name=transformer"
            )
            return
        encoder, decoder = stages
        top = exit_name(encoder.total, decoder.total)
        for count, side in zip(self.drawn or (1, 1), stages, strict=True):
            if count > side.total:
                yield (
                    f"objective.multi_softmax.exits draws {count} exits, but model.{side.setting} is {side.total}; "
                    "lower it"
                )
        if not (self.full_depth or encoder.shared):
            yield (
                f"objective.multi_softmax.full_depth=false leaves layers of model.name={parts.model.name} out of an "
                "update; use full_depth=true, or model.name=recurrent"
            )
        for name, part in parts.active_regularizers().items():
            if self.teacher > 0.0 and part.pairs:
                yield (
                    f"objective.multi_softmax.teacher and objective.{name} both compare each prediction with another "
                    "one; set teacher to 0 or the other to null"
                )
        every = [(n, m) for n in range(1, encoder.total + 1) for m in range(1, decoder.total + 1)]
        if unknown := sorted(set(self.weights) - {exit_name(n, m) for n, m in every}):
            yield f"objective.multi_softmax.weights names {', '.join(unknown)}; use exits n-m up to {top}"
        trained = [pair for pair in every if self.trains_exit(*pair, (encoder.total, decoder.total))]
        if not trained:
            name = "objective.multi_softmax"
            yield f"{name}.weights gives all exits of exits={self.exits} weight 0; raise that of {top}"
        elif trained == every[-1:] != every:
            yield (
                f"objective.multi_softmax trains exit {top} alone with exits={self.exits} and these weights; use "
                "other ones, such as exits=2x2, or for one random number of loops full_depth=false"
            )
        if not any(parts.layer.attends_to_source(number) for number in range(1, decoder.layers + 1)):
            yield (
                "objective.multi_softmax translates from the decoder's first layer on, but the settings of "
                f"layer.name={parts.layer.name} leave that layer no cross-attention; use a layer.drop_ratio below 1"
            )


class MultiSoftmax(Likelihood):
    """Label-smoothed cross-entropy, averaged over exits, or an estimate of this average from drawn exits."""

    def __init__(self, config: MultiSoftmaxConfig, pad: int) -> None:
        self.config = config
        self.pad = pad

    def request_passes(self, passes: Passes) -> None:
        """Request the exits of the update; validation uses the top exit."""
        if not passes.model.training:
            return
        update, stages = passes.batch.update, passes.model.stages
        counts = self.config.drawn or stages
        # Update 0, which is never trained, is the largest.
        with_last = self.config.full_depth or update.number == 0
        key = update.seed, randomness.Purpose.EXITS, update.number
        passes.encoder_exits, passes.decoder_exits = (
            _draw(total, count, with_last, *key, side)
            for side, (total, count) in enumerate(zip(stages, counts, strict=True))
        )

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the weighted sum of the losses of the drawn exits; see :class:`Likelihood`.

        The reported NLL is that of the deepest drawn exit, the metric "mean_exit_nll" the mean over the drawn exits.
        """
        names = [name for name in passes[0] if name[0].isdecimal()]
        # Validation uses the top exit only, with weight 1 even if its weight in training is 0.
        shares = [1.0]
        if model.training:
            stages = [name.split("-") for name in names]
            shares = self.config.shares([(int(n), int(m)) for n, m in stages], model.stages).tolist()
        targets_N = batch.target_output_BT.flatten()
        # Filled on the device: a copy of them from the host would wait for the device.
        row_weights_N = torch.cat([torch.full(targets_N.shape, share, device=targets_N.device) for share in shares])
        if (weights_BT := batch.token_weights) is not None:
            row_weights_N = row_weights_N * weights_BT.flatten().repeat(len(names))
        consume = partial(
            projected_cross_entropy,
            targets_N=targets_N.repeat(len(names)),
            smoothing=self.config.smoothing,
            ignore_index=self.pad,
            divergence_weight=divergence,
            row_weights_N=row_weights_N,
        )
        states_ND = [torch.cat([states[name].flatten(0, 1) for name in names]) for states in passes]
        if self.config.teacher > 0.0 and len(names) > 1:
            states_ND.append(passes[0][TOP].flatten(0, 1).repeat(len(names), 1))  # it differs from itself by 0
            consume = partial(consume, divergence_weight=self.config.teacher, taught=self.config.divergence)
        loss, nll_N, kl = model.projection(states_ND, consume)
        nll_EN = nll_N.view(len(names), -1)
        metrics = {"divergence": kl} if len(states_ND) > 1 else {}
        if len(names) > 1:
            metrics["mean_exit_nll"] = nll_EN.sum(dim=1).mean()
        return LikelihoodOutput(loss, nll_EN[-1], metrics)


def _draw(total: int, count: int, with_last: bool, *parts: int) -> list[int]:
    """Draw ``count`` of the stages 1..total, ascending, as a function of ``parts``; ``with_last`` one is the last."""
    others = randomness.permutation(total - with_last, *parts)[: count - with_last]
    return sorted([*(int(stage) + 1 for stage in others), *([total] if with_last else [])])


ENTRY = Entry(
    "multi_softmax",
    MultiSoftmaxConfig,
    lambda config, vocabulary: MultiSoftmax(config, vocabulary.pad),
    SelfTest(
        "exits",
        {
            "model": {
                "name": "recurrent",
                **SMALL,
                "sharing": "closed_chain",
                "encoder_loops": 3,
                "decoder_loops": 2,
            },
            "objective": {"multi_softmax": {"exits": "2x2", "teacher": 0.5}},
        },
    ),
)
