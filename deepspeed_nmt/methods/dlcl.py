"""DLCL, dynamic linear combination of layers: each layer reads a learned sum of the states of all layers below.

Wang, Li, Xiao, Zhu, Li, Wong, Chao: "Learning Deep Transformer Models for Machine Translation", 2019, section 3.
Encoder and decoder are Transformers, each of whose layers F_l (attention and feed-forward, with their residual
connections) reads not the state below, but a combination. With y_0 the embedded tokens (scaled, with positions and
dropout) and L layers,

    x_l = G_l(y_0, .., y_l),    y_l = F_l(x_{l-1}),    l = 1 .. L,

    G_l = sum_k W_lk LN_k(y_k)        in pre-norm,
    G_l = LN_l(sum_k W_lk y_k)        in post-norm,        k = 0 .. l,

where W is learned and begins as a mean, W_lk = 1 / (l + 1). A pre-norm stack ends in its final LayerNorm of x_L.

As in the authors' code y_0 is not normalised, G_0 has no LayerNorm in post-norm, and its weight is learned too. An
exit after n layers is x_n: what a stack of n layers computes.

Legend: B sentences, T length, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.transformer import SMALL, Transformer, TransformerShape, build_transformer
from deepspeed_nmt.nn.layers import LayerNorm, MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.nn.stack import Links
from deepspeed_nmt.registry import Entry, SelfTest


class CombinedShape(TransformerShape):
    """Shape of a Transformer whose layers read combinations of states."""

    known_norms: ClassVar[frozenset[str]] = frozenset({"pre", "post"})
    """DeepNorm's constants are for layers that read the state below."""

    @override
    def ways_to_grow(self) -> Sequence[str]:
        return ("stack",)  # each sum is for a number of layers below, and those of new layers begin as means


class DLCLConfig(CombinedShape):
    """Settings of a Transformer with dynamic linear combinations of layers."""

    name: Literal["dlcl"] = "dlcl"


class WeightedSum(nn.Module):
    """sum_k w_k s_k of a number of states, with learned weights, at first their mean."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((count,), 1.0 / count))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Add up. Shape: (B,T,D) each -> (B,T,D)."""
        total: Tensor = _WeightedSum.apply(self.weight, *states)  # type: ignore[no-untyped-call]
        return total


class _WeightedSum(torch.autograd.Function):
    """A sum in fp32 or wider that keeps nothing but its inputs: torch's own would keep wide copies of all states."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, *states: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *states)
        wide = torch.promote_types(states[0].dtype, torch.float32)
        total = states[0].to(wide) * weight[0].to(wide)
        for number, state in enumerate(states[1:], 1):
            total.addcmul_(state.to(wide), weight[number].to(wide))
        return total.to(states[0].dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        weight, *states = ctx.saved_tensors
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        of_weight = torch.stack([(wide * state).sum() for state in states]).to(weight.dtype)
        return of_weight, *((wide * each).to(gradient.dtype) for each in weight)


class LayerCombination(Links):
    """Links of a stack (G_l) at some numbers of applications.

    Args:
        points: numbers of applications, from 0, ascending, after which the next layer reads the sum of the states at
            all points so far. At other numbers it reads the state below.
        normalises: True if the states are normalised (pre-norm), False if the sums are (post-norm).
    """

    def __init__(self, dim: int, points: Sequence[int], normalises: bool) -> None:
        super().__init__()
        self.points, self.normalises = frozenset(points), normalises
        self.sums = nn.ModuleList(WeightedSum(count) for count in range(1, len(points) + 1))
        self.norms = nn.ModuleList(LayerNorm(dim) for _ in points[1:])

    @override
    def until(self, number: int) -> LayerCombination:
        points = [point for point in self.points if point <= number]
        cut = LayerCombination(1, points, self.normalises)
        cut.sums, cut.norms = self.sums[: len(points)], self.norms[: len(points) - 1]
        return cut

    @override
    def read(self, x_BTD: Tensor, number: int, kept: list[Tensor]) -> Tensor:
        if number not in self.points:
            return x_BTD
        point = len(kept)
        kept.append(self.norms[point - 1](x_BTD) if self.normalises and point > 0 else x_BTD)
        total: Tensor = self.sums[point](kept)
        return total if self.normalises or point == 0 else self.norms[point - 1](total)


def build_dlcl(
    config: CombinedShape, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> Transformer:
    """Build a freshly initialised Transformer whose layers read combinations of all layers below."""
    model = build_transformer(config, vocabulary, make_layer)
    for stack, norm in zip((model.encoder, model.decoder), config.norms(), strict=True):
        stack.links = LayerCombination(config.dim, range(stack.applications + 1), norm == "pre")
    return model


ENTRY = Entry(
    "dlcl",
    DLCLConfig,
    build_dlcl,
    SelfTest(
        "dlcl",
        {
            "model": {"name": "dlcl", **SMALL},
            "layer": {"name": "cross_attention_drop", "drop_depth": 2, "drop_ratio": 0.5},
        },
    ),
)
