"""CAD, cross-attention drop: decoder layers that skip cross-attention at random in training.

Li, Wang, Utiyama, Sumita, Zhao, Watanabe: "What Works and Doesn't Work, A Deep Decoder for Neural Machine
Translation", Findings of ACL 2022, section 3.3.

A decoder of 15 to 27 layers can degenerate into a language model that ignores its source. CAD skips the whole
cross-attention sub-layer of layer l in training, with its residual connection and LayerNorm, with probability

    p_l = drop_ratio for l <= drop_depth, beyond for l > drop_depth.

The layer then runs self-attention and feed-forward only. Layers are numbered from 1, at the embedding. In inference
every layer that has cross-attention applies it.

With ``target_reliance`` R above 0, drop_ratio is not fixed. After each measurement by the collapse monitor, once the
decoder has had time to read its source, with r the lower one of source and prefix reliance,

    drop_ratio <- clip(drop_ratio + adapt_step clip(1 - r / R, -1, 1), min_ratio, max_ratio),

so it rises while the decoder relies less on one of its inputs than R, and falls while it relies more on both. The
ratio is a function of what was measured, the same on all ranks, and saved with each checkpoint. This is not in the
paper.

A choice (coin) is a function of (seed, update, pass, layer), so it is the same on all ranks, in all micro-batches of
an update, and in recomputation. With ``coins: micro_batch`` it is also a function of the micro-batch's number on its
rank: the k-th micro-batches of all ranks share their coins, because under ZeRO all ranks must run the same
sub-layers.

A skipped sub-layer has no cost per token, and its parameters get zero gradients. A layer with p_l = 1 has no
cross-attention at all, neither parameters nor cache, as the paper's Table 1 requires. docs/papers/deep-decoder.md has
the deviations from the paper's text.

Legend: T target length, D model width, P passes, B sentences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.parts import LayerConfig, Parts
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.layers import Context, DecoderLayer, LayerParts, select_blocks
from deepspeed_nmt.randomness import Purpose
from deepspeed_nmt.registry import Entry, SelfTest

CoinPeriod = Literal["update", "micro_batch"]


class CrossAttentionDropConfig(LayerConfig):
    """Settings of cross-attention drop."""

    name: Literal["cross_attention_drop"] = "cross_attention_drop"
    drop_ratio: float = Field(
        default=1.0, ge=0.0, le=1.0, description="probability of dropping (p_l) in the lowest drop_depth layers"
    )
    drop_depth: int = Field(default=0, ge=0, description="number of layers, from the lowest, that have drop_ratio")
    beyond: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="probability of dropping (p_l) in the layers above; 1 in the paper's text",
    )
    coins: CoinPeriod = Field(
        default="update",
        description="random choices for each update, or for each micro-batch; a run with the latter depends on the "
        "number of ranks and on batch.micro_tokens",
    )

    target_reliance: float = Field(
        default=0.0,
        ge=0.0,
        description="reliance on source or prefix, whichever is lower, in nats per token, below which drop_ratio "
        "rises after a measurement of the collapse monitor, and above which it falls; 0: drop_ratio stays",
    )
    adapt_step: float = Field(
        default=0.1, gt=0.0, le=1.0, description="largest change of drop_ratio after a measurement"
    )
    min_ratio: float = Field(default=0.0, ge=0.0, lt=1.0, description="lower bound of an adapted drop_ratio")
    max_ratio: float = Field(default=0.9, ge=0.0, lt=1.0, description="upper bound of an adapted drop_ratio")

    @property
    @override
    def adapts(self) -> bool:
        return self.target_reliance > 0.0

    @override
    def adapted(self, drop_ratio: float | None, reliance: float) -> float | None:
        if not self.adapts:
            return None
        error = max(-1.0, min(1.0, 1.0 - reliance / self.target_reliance))
        ratio = (self.drop_ratio if drop_ratio is None else drop_ratio) + self.adapt_step * error
        return max(self.min_ratio, min(self.max_ratio, ratio))

    def rate(self, number: int) -> float:
        """Return p_l of layer ``number``, counted from 1."""
        return self.drop_ratio if number <= self.drop_depth else self.beyond

    @override
    def attends_to_source(self, number: int) -> bool:
        return self.rate(number) < 1.0

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse a drop depth above the decoder's depth or not given, and decoders without any cross-attention."""
        made = parts.model.custom_layers()
        if made is None:
            return  # A model that builds its own layers cannot have this setting at all.
        setting, depth = made
        if not {"drop_depth", "beyond"} & self.model_fields_set:  # a given 0 is the plain point of a sweep
            yield (
                f"layer.name={self.name} drops nothing with the default layer.drop_depth=0; set layer.drop_depth to "
                f"two fifths of {setting}={depth}, or to 0 if no layer is to drop"
            )
        if self.adapts and not (self.drop_depth and self.min_ratio <= self.drop_ratio <= self.max_ratio):
            yield (
                f"layer.drop_depth is {self.drop_depth} and layer.drop_ratio {self.drop_ratio:g}, but "
                "layer.target_reliance adapts the ratio of the lowest layers from a start between layer.min_ratio="
                f"{self.min_ratio:g} and layer.max_ratio={self.max_ratio:g}; set a depth above 0 and such a start"
            )
        if self.drop_depth > depth:
            yield (f"layer.drop_depth is {self.drop_depth}, more than {setting}={depth}; lower it to {depth} at most")
        if not any(self.attends_to_source(number) for number in range(1, depth + 1)):
            yield (
                f"layer.drop_ratio, layer.drop_depth and layer.beyond leave none of the {depth} layers of "
                f"{setting} any cross-attention; lower layer.drop_depth or layer.beyond"
            )


class CrossAttentionDropLayer(DecoderLayer):
    """Decoder layer that skips its cross-attention with probability ``rate`` in training.

    Attributes:
        number: number of the layer, an argument of its random choices.
        rate: p_l, below 1; above 0 unless it adapts.
        adapts: True if ``rate`` follows the collapse monitor.
        coins_per: period of its random choices.
    """

    always_attends = False
    number: int
    rate: float
    adapts: bool
    coins_per: CoinPeriod

    @override
    def set_drop_ratio(self, ratio: float) -> None:
        if self.adapts:
            self.rate = ratio

    def project_source(self, context: Context) -> KeysValues | None:
        """Project the source for all applications, unless all passes skip them."""
        return None if self.training and not self._kept(context) else super().project_source(context)

    def cross(
        self, x_BTD: Tensor, context: Context, cache: LayerCache | None, onto_BTD: Tensor | None = None
    ) -> Tensor:
        """Apply cross-attention to the rows of the passes that do not skip it.

        Shape: (P B,T,D) -> (P B,T,D)
        """
        if not self.training:
            return super().cross(x_BTD, context, cache)
        assert context.draw is not None
        kept, count = self._kept(context), len(context.draw.passes)
        if len(kept) == count:
            return super().cross(x_BTD, context, None)
        if not kept:
            # Without a use in this update, ZeRO-3 would keep a parameter's last gradient. One position is enough.
            probe_11D = x_BTD.new_zeros(1, 1, x_BTD.shape[2])
            x_BTD = torch_ops.touch(x_BTD, super().cross(probe_11D, Context(memory_BSD=probe_11D), None))
            # The same holds for the encoder, if all layers drop in one update.
            assert context.memory_BSD is not None
            return torch_ops.touch(x_BTD, context.memory_BSD)
        crossed = super().cross(select_blocks(x_BTD, count, kept), context.of_passes(kept), None)
        rows = x_BTD.shape[0] // count
        blocks, done = list(torch.split(x_BTD, rows)), torch.split(crossed, rows)
        for index, block in zip(kept, done, strict=True):
            blocks[index] = block
        return torch.cat(blocks)

    def in_inference(self) -> DecoderLayer:
        """Return the standard layer: nothing is dropped in inference."""
        attending = self.self_attention, self.self_residual, self.cross_attention, self.cross_residual
        return DecoderLayer(*attending, self.feed_forward, self.feed_forward_residual)

    def choose(self, context: Context) -> Context:
        """Choose the passes that skip cross-attention."""
        return replace(context, kept=self._kept(context))

    def _kept(self, context: Context) -> tuple[int, ...]:
        """Return the indices of the passes that do not skip cross-attention."""
        if context.kept is not None:
            return context.kept
        draw = context.draw
        assert draw is not None, "cross-attention drop needs the update's number in training"
        if draw.update == 0:  # which is never trained, and stands for the largest one when memory is measured
            return tuple(range(len(draw.passes)))
        key = (self.number,) if self.coins_per == "update" else (self.number, draw.micro_batch)
        coins = draw.uniform(Purpose.CROSS_ATTENTION_DROP, *key)
        return tuple(index for index, coin in enumerate(coins) if coin >= self.rate)


def build_cross_attention_drop(config: CrossAttentionDropConfig, number: int, parts: LayerParts) -> DecoderLayer:
    """Build layer ``number`` of a decoder; its class depends on p_l."""
    rate, adapts = config.rate(number), config.adapts and number <= config.drop_depth
    if rate in (0.0, 1.0) and not adapts:
        return DecoderLayer.of(parts, crosses=rate == 0.0)
    layer = CrossAttentionDropLayer.of(parts)
    layer.number, layer.rate, layer.adapts, layer.coins_per = number, rate, adapts, config.coins
    return layer


ENTRY = Entry(
    "cross_attention_drop",
    CrossAttentionDropConfig,
    build_cross_attention_drop,
    SelfTest(
        "deep_decoder",
        {
            "model": {"name": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 4},
            "layer": {"name": "cross_attention_drop", "drop_depth": 1, "drop_ratio": 1.0, "beyond": 0.5},
            "objective": {"ddr": {"weight": 0.7}, "ald": {"weight": 0.5, "every": 2}},
        },
        quick=True,
    ),
    collapse_remedy=(
        "layer.name=cross_attention_drop with layer.drop_depth at two fifths to two thirds of model.decoder_layers "
        "(or more than now)"
    ),
)
