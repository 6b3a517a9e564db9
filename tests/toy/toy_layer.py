"""A toy decoder layer: its cross-attention sub-layer C is mixed in by a learned gate g,

x + tanh(g) (C(x) - x).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deepspeed_nmt.core.parts import LayerConfig
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.layers import Context, DecoderLayer, LayerParts
from deepspeed_nmt.registry import Entry, SelfTest


class GatedLayerConfig(LayerConfig):
    """Settings of the gated layers."""

    name: Literal["gated"] = "gated"
    gate: float = Field(default=1.0, description="g at the start")


class GatedLayer(DecoderLayer):
    """A decoder layer with a gate on its cross-attention."""

    gate: nn.Parameter

    def cross(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Shape: (B,T,D) -> (B,T,D)"""
        return x_BTD + torch.tanh(self.gate) * (super().cross(x_BTD, context, cache) - x_BTD)


def build_gated_layer(config: GatedLayerConfig, number: int, parts: LayerParts) -> GatedLayer:
    """Build layer ``number`` of a decoder."""
    layer = GatedLayer(
        self_attention=parts.attention(),
        self_residual=parts.residual(),
        cross_attention=parts.attention(),
        cross_residual=parts.residual(),
        feed_forward=parts.feed_forward(),
        feed_forward_residual=parts.residual(),
    )
    layer.gate = nn.Parameter(torch.tensor([config.gate]))
    return layer


ENTRY = Entry(
    "gated",
    GatedLayerConfig,
    build_gated_layer,
    SelfTest(
        "gated",
        {
            "model": {"dim": 32, "ffn_dim": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 2},
            "layer": {"name": "gated", "gate": 0.5},
        },
    ),
)
