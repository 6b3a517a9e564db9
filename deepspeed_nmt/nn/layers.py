"""Encoder and decoder layers, and their sub-layers.

Legend: B sentences, S source length, T target length, D model width, R rows = B x beam, P passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed_nmt import randomness
from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.linear import UsesPackedWeights
from deepspeed_nmt.nn.sublayer import Residual


@dataclass(frozen=True)
class Draw:
    """The numbers that determine the random choices of layers: the same on every rank, and in recomputation.

    Attributes:
        seed: of the run.
        update: number of the update.
        passes: numbers of the passes over the same sentences whose rows, in equal blocks, make up the batch.
        micro_batch: number of the micro-batch within the update on its rank, from 0.
    """

    seed: int
    update: int
    passes: tuple[int, ...] = (0,)
    micro_batch: int = 0

    def uniform(self, purpose: randomness.Purpose, *key: int) -> list[float]:
        """Draw a number in [0, 1) for each pass, a function of (seed, purpose, update, pass, *key)."""
        return [randomness.uniform(self.seed, purpose, self.update, number, *key) for number in self.passes]


@dataclass(frozen=True)
class Context:
    """The input that all layers of a stack share.

    Attributes:
        mask: source positions that attention sees: bool (B,1,1,S), True for those that are not padding; or those of
            the same sentence in packed rows; None for all. In an encoder it masks self-attention, in a decoder
            cross-attention.
        memory_BSD: the encoder's states, for a decoder.
        draw: determines random choices; in training, layers that make such need it.
        target_mask: the same for a decoder's self-attention; in the padded layout None if it is causal.
        kept: indices of the passes whose rows attend to the source in a layer; None if it has not chosen them yet.
        source: keys and values that a layer projects ``memory_BSD`` to, for all its applications; None if each
            application projects them.
    """

    mask: Mask = None
    memory_BSD: Tensor | None = None
    draw: Draw | None = None
    target_mask: Mask = None
    kept: tuple[int, ...] | None = None
    source: KeysValues | None = None

    def of_passes(self, kept: Sequence[int]) -> Context:
        """Return the context of the rows of some of the passes, given by their indices, without a draw."""
        assert self.memory_BSD is not None and self.draw is not None
        count = len(self.draw.passes)
        return Context(
            mask=select_blocks(self.mask, count, kept) if isinstance(self.mask, Tensor) else self.mask,
            memory_BSD=select_blocks(self.memory_BSD, count, kept),
            source=None
            if self.source is None
            else KeysValues(*(select_blocks(x, count, kept) for x in (self.source.keys, self.source.values))),
        )


def select_blocks(x: Tensor, count: int, kept: Sequence[int]) -> Tensor:
    """Select some of ``count`` equal blocks of rows; a view if adjacent. Shape: (P B, ...) -> (fewer, ...)."""
    rows = x.shape[0] // count
    if list(kept) == list(range(kept[0], kept[-1] + 1)):
        return x[kept[0] * rows : (kept[-1] + 1) * rows]
    return torch.cat([x[index * rows : (index + 1) * rows] for index in kept])


def self_attention_sublayer(
    attention: MultiHeadAttention,
    around: Residual,
    x_BTD: Tensor,
    context: Context,
    cache: LayerCache | None = None,
    following: Residual | None = None,
) -> Tensor:
    """Apply causal self-attention within its residual connection.

    Args:
        attention: the sub-layer.
        around: its residual connection.
        x_BTD: its input.
        context: with the target's mask.
        cache: when decoding position by position.
        following: the connection around the sub-layer that comes next, if it does at once.

    Shape: (B,T,D), or with a cache (R,1,D) -> the same
    """
    h, then = around.pre_norm(x_BTD), around.epilogue(x_BTD, following)
    if cache is None:
        out: Tensor = attention(h, h, context.target_mask, causal=True, then=then)
        return out
    return attention.step_self(h, cache, then)


def cross_attention_sublayer(
    attention: MultiHeadAttention,
    around: Residual,
    x_BTD: Tensor,
    context: Context,
    cache: LayerCache | None = None,
    onto_BTD: Tensor | None = None,
    following: Residual | None = None,
) -> Tensor:
    """Apply cross-attention within its residual connection.

    Args:
        attention: the sub-layer.
        around: its residual connection.
        x_BTD: its input.
        context: with the source's states and mask.
        cache: keeps the source's keys and values from the first step on, when decoding position by position.
        onto_BTD: the residual branch; default ``x_BTD``.
        following: the connection around the sub-layer that comes next, if it does at once.

    Shape: (B,T,D), or with a cache (R,1,D) -> the same
    """
    assert context.memory_BSD is not None
    h, then = around.pre_norm(x_BTD), around.epilogue(x_BTD if onto_BTD is None else onto_BTD, following)
    if cache is None:
        memory = context.memory_BSD if context.source is None else context.source
        out: Tensor = attention(h, memory, context.mask, then=then)
        return out
    if cache.source.projected is None:
        cache.source.projected = attention.keys_values(context.memory_BSD)
    return attention.step_cross(h, cache.source.projected, context.mask, then)


def feed_forward_sublayer(network: FeedForward, around: Residual, x: Tensor, onto: Tensor | None = None) -> Tensor:
    """Apply a feed-forward network within its residual connection, whose branch is ``onto``, by default ``x``.

    Shape: (..., D) -> (..., D)
    """
    out: Tensor = network(around.pre_norm(x), around.epilogue(x if onto is None else onto))
    return out


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
        """Encode. An encoder caches nothing. Shape: (B,S,D) -> (B,S,D)."""
        assert cache is None
        h = self.self_residual.pre_norm(x_BSD)
        then = self.self_residual.epilogue(x_BSD, self.feed_forward_residual)
        x_BSD = self.self_attention(h, h, context.mask, then=then)
        return feed_forward_sublayer(self.feed_forward, self.feed_forward_residual, x_BSD)


class CrossAttending(nn.Module):
    """A decoder layer whose sub-layers' updates of the state can be observed.

    Attributes:
        cross_attention: its cross-attention; None without such.
        self_residual: the connection around self-attention; None without such.
        cross_residual: the connection around cross-attention; None without such.
        feed_forward_residual: the connection around the feed-forward network; None without such.
    """

    cross_attention: MultiHeadAttention | None
    self_residual: Residual | None
    cross_residual: Residual | None
    feed_forward_residual: Residual | None

    def choose(self, context: Context) -> Context:
        """Make the layer's random choices in training; called where they must be made outside of compiled code.

        Returns:
            The context with these choices, if there are any.
        """
        return context

    def project_source(self, context: Context) -> KeysValues | None:
        """Project the source for all applications of the layer, or for all steps of a search.

        Returns:
            Keys and values for ``context.source``; None if no application attends to the source.
        """
        assert context.memory_BSD is not None
        return None if self.cross_attention is None else self.cross_attention.project(context.memory_BSD)

    def in_inference(self) -> DecoderLayer | None:
        """Return the standard layer with the same weights that computes the same in inference; None if none does."""
        return None


class DecoderLayer(CrossAttending, UsesPackedWeights):
    """Causal self-attention, cross-attention, feed-forward, each within a residual connection.

    Without ``cross_attention`` and ``cross_residual`` it has two sub-layers, and does not read the source.
    """

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        self_residual: Residual,
        cross_attention: MultiHeadAttention | None,
        cross_residual: Residual | None,
        feed_forward: FeedForward,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual: Residual = self_residual
        self.cross_attention = cross_attention
        self.cross_residual = cross_residual
        self.feed_forward = feed_forward
        self.feed_forward_residual: Residual = feed_forward_residual

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode whole sentences, or with ``cache`` the next position of each hypothesis.

        Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)
        """
        if self.packed is not None and cache is not None:
            return self.packed.step(self)(x_BTD, context, cache)
        following = self.cross_residual or self.feed_forward_residual
        x_BTD = self_attention_sublayer(self.self_attention, self.self_residual, x_BTD, context, cache, following)
        x_BTD = self.cross(x_BTD, context, cache)
        return feed_forward_sublayer(self.feed_forward, self.feed_forward_residual, x_BTD)

    def in_inference(self) -> DecoderLayer | None:
        """Return this layer. A class derived from it computes something else unless it says otherwise."""
        return self if type(self) is DecoderLayer else None

    def cross(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Apply cross-attention within its residual connection, if there is any. Shape: (B,T,D) -> (B,T,D)."""
        if self.cross_attention is None or self.cross_residual is None:
            return x_BTD
        attention, around = self.cross_attention, self.cross_residual
        return cross_attention_sublayer(
            attention, around, x_BTD, context, cache, following=self.feed_forward_residual
        )


@dataclass(frozen=True)
class LayerParts:
    """Functions that make freshly initialised parts of a model's layers.

    Attributes:
        attention: makes self- or cross-attention.
        feed_forward: makes a feed-forward network.
        residual: makes the connection around either.
    """

    attention: Callable[[], MultiHeadAttention]
    feed_forward: Callable[[], FeedForward]
    residual: Callable[[], Residual]


MakeDecoderLayer = Callable[[int, LayerParts], DecoderLayer]
"""Makes a decoder layer, given its number, from 1 at the bottom, and makers of its parts."""


def make_decoder_layer(number: int, parts: LayerParts) -> DecoderLayer:
    """Make the decoder layer of Vaswani et al. 2017."""
    return DecoderLayer(
        self_attention=parts.attention(),
        self_residual=parts.residual(),
        cross_attention=parts.attention(),
        cross_residual=parts.residual(),
        feed_forward=parts.feed_forward(),
        feed_forward_residual=parts.residual(),
    )
