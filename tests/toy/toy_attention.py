"""A toy attention: self-attention of the decoder by the cosines of queries and keys (Henry et al. 2020).

With q and k the queries and keys of a head, and g a learned factor,

    Attention(q, k, v) = softmax(g cos(q, k)) v.

The file shows what an attention needs: the class, a decoder layer that has it, and the registry entry of the layer.

Legend: B sentences, T queries, D model width, H heads, K head width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.parts import LayerConfig
from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues
from deepspeed_nmt.nn.layers import DecoderLayer, LayerParts, make_decoder_layer
from deepspeed_nmt.registry import Entry, SelfTest


class CosineLayerConfig(LayerConfig):
    """Settings of layers with cosine attention."""

    name: Literal["cosine"] = "cosine"


class CosineAttention(MultiHeadAttention):
    """Multi-head attention by cosines."""

    def __init__(self, dim: int, num_heads: int, dropout_p: float = 0.0) -> None:
        super().__init__(dim, num_heads, dropout_p)
        self.factor = nn.Parameter(torch.tensor([10.0]))

    @override
    def attend(self, query_BTD: Tensor, memory: KeysValues, mask: Mask, causal: bool) -> Tensor:
        query_BTHK = F.normalize(query_BTD.unflatten(2, (-1, self.head_dim)), dim=3)
        query_BTHK = query_BTHK * self.factor * self.head_dim**0.5  # softmax divides by the root of the width
        keys_BHSK = F.normalize(memory.keys, dim=3)
        return super().attend(query_BTHK.flatten(2), KeysValues(keys_BHSK, memory.values), mask, causal)


def build_cosine_layer(config: CosineLayerConfig, number: int, parts: LayerParts) -> DecoderLayer:
    """Build layer ``number`` of a decoder, counted from 1."""
    layer = make_decoder_layer(number, parts)
    layer.self_attention = parts.attention(CosineAttention)
    return layer


ENTRY = Entry(
    "cosine",
    CosineLayerConfig,
    build_cosine_layer,
    SelfTest(
        "cosine",
        {
            "model": {"dim": 32, "ffn_dim": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 2},
            "layer": {"name": "cosine"},
        },
    ),
)
