"""Encoder and decoder layers, made of typed slots.

Legend: B sentences, S source length, T target length, D model width, R rows = B x beam.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.sublayer import Residual


@dataclass(frozen=True)
class Context:
    """What all layers of a stack see besides their input.

    Attributes:
        mask: bool (B,1,1,S), True for source positions that are not padding; None when no position is. In an
            encoder it masks self-attention, in a decoder cross-attention.
        memory_BSD: the encoder's states, for a decoder.
    """

    mask: Tensor | None = None
    memory_BSD: Tensor | None = None


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each within a residual connection."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        self_residual: Residual,
        feed_forward: FeedForward,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = self_residual
        self.feed_forward = feed_forward
        self.feed_forward_residual = feed_forward_residual

    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Shape: (B,S,D) -> (B,S,D). An encoder has nothing to cache."""
        assert cache is None
        h = self.self_residual.open(x_BSD)
        x_BSD = self.self_residual.close(x_BSD, self.self_attention(h, h, context.mask))
        h = self.feed_forward_residual.open(x_BSD)
        return self.feed_forward_residual.close(x_BSD, self.feed_forward(h))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention, feed-forward, each within a residual connection."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        self_residual: Residual,
        cross_attention: MultiHeadAttention,
        cross_residual: Residual,
        feed_forward: FeedForward,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual = self_residual
        self.cross_attention = cross_attention
        self.cross_residual = cross_residual
        self.feed_forward = feed_forward
        self.feed_forward_residual = feed_forward_residual

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode whole sentences, or with ``cache`` the next position of each hypothesis.

        Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)
        """
        h = self.self_residual.open(x_BTD)
        attended = (
            self.self_attention(h, h, causal=True) if cache is None else self.self_attention.step_self(h, cache)
        )
        x_BTD = self.self_residual.close(x_BTD, attended)
        x_BTD = self.cross(x_BTD, context, cache)
        h = self.feed_forward_residual.open(x_BTD)
        return self.feed_forward_residual.close(x_BTD, self.feed_forward(h))

    def cross(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """The cross-attention sub-layer alone, residual connection included. Shape: (B,T,D) -> (B,T,D)"""
        assert context.memory_BSD is not None
        h = self.cross_residual.open(x_BTD)
        if cache is None:
            attended = self.cross_attention(h, context.memory_BSD, context.mask)
        else:
            if cache.cross is None:
                cache.cross = self.cross_attention.keys_values(context.memory_BSD)
            attended = self.cross_attention.step_cross(h, cache.cross, context.mask)
        return self.cross_residual.close(x_BTD, attended)
