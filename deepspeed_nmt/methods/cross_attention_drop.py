"""CAD: decoder layers that drop their cross-attention (papers/deep-decoder, section 3.3).

A decoder of 15-27 layers turns into a language model that ignores its source. In training, layer l therefore drops
its cross-attention sub-layer (residual connection and normalisation included) with probability p_l and runs only
self-attention and feed-forward; otherwise it runs all three. In inference every layer that has cross-attention uses
it. Layers are numbered from 1 at the embedding upwards:

    p_l = drop_ratio for l <= drop_depth, else beyond.

Deviations: ``beyond`` is 0.0 by default, with which the paper's experiments (4.3) make sense, where its section 3.3
says 1.0. (The two indicator functions printed there do not add up to the sentence under them; the sentence counts.) A
layer with p_l = 1.0 has no cross-attention: no parameters, no cache.

The coin is a function of (seed, update, pass, layer): all ranks and micro-batches of an update agree on what runs,
and so does recomputation. A dropped sub-layer costs nothing per token; its parameters get a gradient of zero.

Legend: T target length, D model width, P passes, B sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.parts import LayerConfig, Parts
from deepspeed_nmt.kernels import ops
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.layers import Context, DecoderLayer, LayerParts, make_decoder_layer, select_blocks
from deepspeed_nmt.nn.sublayer import Residual
from deepspeed_nmt.randomness import Purpose
from deepspeed_nmt.registry import SelfTest


class CrossAttentionDropConfig(LayerConfig):
    """Which layers drop their cross-attention, and how often."""

    name: Literal["cross_attention_drop"] = "cross_attention_drop"
    drop_ratio: float = Field(
        default=1.0, ge=0.0, le=1.0, description="probability of dropping, in the lowest drop_depth layers"
    )
    drop_depth: int = Field(default=0, ge=0, description="number of layers, from the lowest up, that have drop_ratio")
    beyond: float = Field(
        default=0.0, ge=0.0, le=1.0, description="probability of dropping in the layers above; the paper's text has 1"
    )

    def rate(self, number: int) -> float:
        """p_l of layer ``number``, counted from 1."""
        return self.drop_ratio if number <= self.drop_depth else self.beyond

    def attends_to_source(self, number: int) -> bool:
        """False for layers that always drop their cross-attention: they have none."""
        return self.rate(number) < 1.0

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse more dropping layers than the decoder has, and decoders left without any cross-attention."""
        made = parts.model.custom_layers()
        if made is None:
            return  # the model refuses layers that it does not make
        setting, depth = made
        if self.drop_depth > depth:
            yield (
                f"layer.drop_depth must not exceed {setting}, but is {self.drop_depth} of {depth}; "
                f"lower layer.drop_depth to {depth} at most"
            )
        if not any(self.attends_to_source(number) for number in range(1, depth + 1)):
            yield (
                f"layer.drop_ratio, layer.drop_depth and layer.beyond leave none of the {depth} layers of "
                f"{setting} any cross-attention; lower layer.drop_depth or layer.beyond"
            )


SELF_TEST = SelfTest(
    "deep_decoder",
    {
        "model": {"name": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 4},
        "layer": {"name": "cross_attention_drop", "drop_depth": 1, "drop_ratio": 1.0, "beyond": 0.5},
        "objective": {"ddr": {"weight": 0.7}, "ald": {"weight": 0.5, "every": 2}},
    },
    quick=True,
)
"""The whole paper: layers that drop cross-attention always and sometimes, DDR, and ALD in every other update."""


COLLAPSE_REMEDY = (
    "layer.name=cross_attention_drop with layer.drop_depth at two fifths to two thirds of model.decoder_layers (or "
    "more than now)"
)


class CrossAttentionDropLayer(DecoderLayer):
    """A decoder layer that drops its cross-attention with probability ``rate`` in training.

    Args:
        number: of the layer, for its coin.
        rate: p_l, above 0 and below 1.
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        self_residual: Residual,
        cross_attention: MultiHeadAttention,
        cross_residual: Residual,
        feed_forward: FeedForward,
        feed_forward_residual: Residual,
        *,
        number: int,
        rate: float,
    ) -> None:
        super().__init__(
            self_attention, self_residual, cross_attention, cross_residual, feed_forward, feed_forward_residual
        )
        self.number = number
        self.rate = rate

    def cross(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """The sub-layer for the passes whose coin says so. Shape: (P B,T,D) -> (P B,T,D)"""
        if not self.training:
            return super().cross(x_BTD, context, cache)
        assert context.draw is not None, "training a layer that drops at random needs to know the update"
        coins = context.draw.uniform(Purpose.CROSS_ATTENTION_DROP, self.number)
        kept = [index for index, coin in enumerate(coins) if coin >= self.rate]
        if len(kept) == len(coins):
            return super().cross(x_BTD, context, None)
        if not kept:
            # ZeRO-3 takes parameters that nothing touched to have their last gradient: touch them, with one position.
            probe_11D = x_BTD.new_zeros(1, 1, x_BTD.shape[2]).requires_grad_()
            return ops.touch(x_BTD, super().cross(probe_11D, Context(memory_BSD=probe_11D), None))
        crossed = super().cross(select_blocks(x_BTD, len(coins), kept), context.of_passes(kept), None)
        rows = x_BTD.shape[0] // len(coins)
        blocks, done = list(torch.split(x_BTD, rows)), torch.split(crossed, rows)
        for index, block in zip(kept, done, strict=True):
            blocks[index] = block
        return torch.cat(blocks)


def build_cross_attention_drop(config: CrossAttentionDropConfig, number: int, parts: LayerParts) -> DecoderLayer:
    """Layer ``number`` of a decoder."""
    rate = config.rate(number)
    if rate == 0.0:
        return make_decoder_layer(number, parts)
    if rate < 1.0:
        return CrossAttentionDropLayer(
            self_attention=parts.attention(),
            self_residual=parts.residual(),
            cross_attention=parts.attention(),
            cross_residual=parts.residual(),
            feed_forward=parts.feed_forward(),
            feed_forward_residual=parts.residual(),
            number=number,
            rate=rate,
        )
    return DecoderLayer(
        self_attention=parts.attention(),
        self_residual=parts.residual(),
        cross_attention=None,
        cross_residual=None,
        feed_forward=parts.feed_forward(),
        feed_forward_residual=parts.residual(),
    )
