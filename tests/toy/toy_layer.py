"""A toy decoder layer, with a learned gate on its cross-attention.

With C the cross-attention sub-layer, including its residual connection, and g the gate, the sub-layer becomes

    x + tanh(g) (C(x) - x).

The file shows what a decoder layer needs: a configuration class, the layer, a build function, a case for `selftest`,
and the registry entry.

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.parts import LayerConfig
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.layers import Context, DecoderLayer, LayerParts
from deepspeed_nmt.registry import Entry, SelfTest


class GatedLayerConfig(LayerConfig):
    """Settings of gated layers."""

    name: Literal["gated"] = "gated"
    gate: float = Field(default=1.0, description="initial value of g")


class GatedLayer(DecoderLayer):
    """Decoder layer with a gate on its cross-attention.

    Attributes:
        gate: g. Shape: (1,)
    """

    gate: nn.Parameter

    @override
    def cross(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        return x_BTD + torch.tanh(self.gate) * (super().cross(x_BTD, context, cache) - x_BTD)


def build_gated_layer(config: GatedLayerConfig, number: int, parts: LayerParts) -> GatedLayer:
    """Build layer ``number`` of a decoder, counted from 1."""
    layer = GatedLayer.of(parts)
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
