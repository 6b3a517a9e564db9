"""Merged attention: an average of the prefix and cross-attention in one sub-layer of the decoder.

Zhang, Titov, Sennrich: "Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention", 2019
(MAtt). It is a baseline of "Recurrent multiple shared layers in Depth for Neural Machine Translation" (Li and Li,
2021), table 1.

With H the encoder's states, x_t the layer's input (with pre-norm, normalised) and head_h cross-attention's heads, the
sub-layer computes

    MAtt(x)_t = [1/t sum_{i <= t} x_i W_v + concat_h head_h(x_t W_q, H W_k, H W_v)] W_o.

The first term is the simplified average attention, in place of self-attention. As in the authors' code, it shares W_v
and W_o with cross-attention; the 154.3M parameters that they print for 20-20 layers leave no room for more. A
feed-forward network follows, and the whole is trained with depth-scaled initialisation (``model.init=depth_scaled``)
and post-norm.

A hypothesis keeps the sum of its x_i W_v, one vector a layer, whatever its length.

Legend: B sentences, T target length, D model width, R rows = B x beam, P rows of packed sentences, L positions of the
longest sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.parts import LayerConfig, Parts
from deepspeed_nmt.kernels.segments import Mask, SegmentPair
from deepspeed_nmt.methods.transformer import SMALL, TransformerShape
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.layers import Context, DecoderBlock, LayerParts, Residual
from deepspeed_nmt.nn.linear import Product
from deepspeed_nmt.registry import Entry, SelfTest


class MergedAttentionConfig(LayerConfig):
    """Decoder layers with merged attention, which have no settings."""

    name: Literal["merged_attention"] = "merged_attention"

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse a decoder without any positions."""
        if isinstance(parts.model, TransformerShape) and parts.model.positions == "none":
            yield (
                f"layer.name=merged_attention has no self-attention, by which model.name={parts.model.name} knows "
                "positions, and model.positions is none; set model.positions=tensor2tensor"
            )


class MergedAttentionLayer(DecoderBlock):
    """Decoder layer with merged attention and a feed-forward network."""

    cross_attention: MultiHeadAttention
    feed_forward_residual: Residual

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.self_residual = None
        self.cross_attention, self.cross_residual = parts.attention(), parts.residual()
        self.feed_forward, self.feed_forward_residual = parts.feed_forward(), parts.residual()

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode whole sentences, (B,T,D) -> (B,T,D), or with ``cache`` the next positions, (R,1,D) -> (R,1,D)."""
        bottom_BTD, last = x_BTD, self.feed_forward_residual
        x_BTD = self.cross(x_BTD, context, cache)
        x_BTD = last(x_BTD, self.feed_forward, last.branch_of(x_BTD, bottom_BTD))
        return x_BTD

    @override
    def attend_to_source(
        self, h_BTD: Tensor, memory: Tensor | KeysValues, context: Context, cache: LayerCache | None
    ) -> Product:
        attention = self.cross_attention
        values_BTD = attention.v_proj(attention.ranks.copy(h_BTD))
        average_BTD = _average(values_BTD, context.target_mask) if cache is None else _next(values_BTD, cache)
        product: Product = attention(h_BTD, memory, context.mask, added_BTD=average_BTD)
        return product


def _average(values_BTD: Tensor, mask: Mask) -> Tensor:
    """Average each position and those before it in its sentence, by a product: sums in sequence are slow on a GPU.

    Shape: (B,T,D) -> (B,T,D)
    """
    if isinstance(mask, SegmentPair):
        rows_PBLD = mask.queries.to_rows(values_BTD, 1)
        return mask.queries.from_rows(_average(rows_PBLD, None), 1)
    places_T = torch.arange(1, values_BTD.shape[-2] + 1, device=values_BTD.device)
    weights_TT = (places_T.unsqueeze(1) >= places_T) / places_T.unsqueeze(1)
    return weights_TT.to(values_BTD.dtype) @ values_BTD


def _next(values_R1D: Tensor, cache: LayerCache) -> Tensor:
    """Average the newest position of each hypothesis and those before it. Shape: (R,1,D) -> (R,1,D)."""
    total_R1D = values_R1D.to(torch.promote_types(values_R1D.dtype, torch.float32))
    if cache.state:
        total_R1D = total_R1D + cache.state[0]
    cache.advance(total_R1D)
    return (total_R1D / cache.length).to(values_R1D.dtype)


ENTRY = Entry(
    "merged_attention",
    MergedAttentionConfig,
    lambda config, number, parts: MergedAttentionLayer(parts),
    SelfTest(
        "merged",
        {
            "model": {"name": "transformer", **SMALL, "norm": "post", "init": "depth_scaled"},
            "layer": {"name": "merged_attention"},
        },
    ),
)
