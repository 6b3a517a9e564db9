"""The step of a decoder layer, from one position of each hypothesis to the next.

A step for a few hypotheses is so short that looking up modules, hooks and kernels would take as long as its
arithmetic. So whatever does not change from step to step is looked up once. A step is also fewer operations than the
layer's modules take: queries, keys and values are one product, and masks are made once for all layers.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, D model width, H heads, K head width, P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.nn.cache import KeysValues, LayerCache

if TYPE_CHECKING:
    from deepspeed_nmt.nn.attention import MultiHeadAttention
    from deepspeed_nmt.nn.layers import Context, DecoderLayer
    from deepspeed_nmt.nn.linear import PackedWeights
    from deepspeed_nmt.nn.sublayer import LayerNorm, Residual


class DecoderStep:
    """The step of a decoder layer with packed or joined weights; the arithmetic is that of the layer in eval mode.

    Args:
        layer: the layer.
        weights: its packed or joined weights.
    """

    def __init__(self, layer: DecoderLayer, weights: PackedWeights) -> None:
        own, self._feed_forward = layer.self_attention, layer.feed_forward
        self._head_dim = own.head_dim
        self._around_self = _Around(layer.self_residual)
        self._keys_values_query = weights.of(own.k_proj, own.v_proj, own.q_proj)
        self._self_out = weights.of(own.out_proj)
        self._cross: MultiHeadAttention | None = None
        if layer.cross_attention is not None and layer.cross_residual is not None:
            self._cross = layer.cross_attention
            self._around_cross = _Around(layer.cross_residual)
            self._query = weights.of(self._cross.q_proj)
            self._cross_out = weights.of(self._cross.out_proj)
        self._around_feed_forward = _Around(layer.feed_forward_residual)
        self._up = weights.of(self._feed_forward.up_proj)
        self._down = weights.of(self._feed_forward.down_proj)

    def __call__(self, x_R1D: Tensor, context: Context, cache: LayerCache) -> Tensor:
        """Decode the next position of each hypothesis; ``cache`` keeps it. Shape: (R,1,D) -> (R,1,D)."""
        joint = self._keys_values_query(self._around_self.before(x_R1D))
        keys_values, query = joint[..., : -x_R1D.shape[-1]], joint[..., -x_R1D.shape[-1] :]
        known, mask = cache.append_joint(keys_values, self._head_dim)
        attended = self._attend(query, known, mask)
        x_R1D = self._around_self.after(self._self_out(attended, residual=self._around_self.residual(x_R1D)))
        if self._cross is not None:
            source = cache.source.projected
            if source is None:
                assert context.memory_BSD is not None
                source = cache.source.projected = self._cross.keys_values(context.memory_BSD)
            query = self._query(self._around_cross.before(x_R1D))
            attended = self._attend(query, source, cache.additive(context.mask, x_R1D.dtype))
            x_R1D = self._around_cross.after(self._cross_out(attended, residual=self._around_cross.residual(x_R1D)))
        inner = self._up(self._around_feed_forward.before(x_R1D), self._feed_forward.activation)
        around = self._around_feed_forward
        return around.after(self._down(inner, residual=around.residual(x_R1D)))

    def _attend(self, query_R1D: Tensor, to: KeysValues, mask: Tensor | None) -> Tensor:
        """Attend from the hypotheses of each sentence. Shape: (R,1,D), (B,H,P,K), (B,1,W,P) -> (R,1,D)."""
        rows, _, dim = query_R1D.shape
        sentences, heads, _, width = to.keys.shape
        query_BHWK = query_R1D.reshape(sentences, rows // sentences, heads, width).transpose(1, 2)
        attended_BHWK = F.scaled_dot_product_attention(query_BHWK, to.keys, to.values, attn_mask=mask)
        return attended_BHWK.transpose(1, 2).reshape(rows, 1, dim)


class _Around:
    """A residual connection in eval mode; see :class:`~deepspeed_nmt.nn.sublayer.Residual`."""

    def __init__(self, residual: Residual) -> None:
        norm: LayerNorm = residual.norm
        self._weights = (norm.weight.shape, norm.weight, norm.bias, norm.eps, False)
        self._before = residual.style == "pre"
        self._alpha = residual.alpha

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer. Shape: (..., D) -> (..., D)."""
        return torch.layer_norm(x, *self._weights) if self._before else x

    def residual(self, x: Tensor) -> Tensor:
        """Return what is added to the output of the sub-layer. Shape: (..., D) -> (..., D)."""
        return x if self._alpha == 1.0 else x * self._alpha

    def after(self, total: Tensor) -> Tensor:
        """Return the output, given the sum. Shape: (..., D) -> (..., D)."""
        return total if self._before else torch.layer_norm(total, *self._weights)
