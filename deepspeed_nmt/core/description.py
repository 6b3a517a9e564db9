"""Description of a model as a standard Transformer, from which other programs' weights are written.

A standard Transformer applies a list of layers, one after another, between embeddings with fixed positions and a
projection. A layer that is applied several times is listed several times.

Legend: V vocabulary, D model width, E output width, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.layers import (
    Activation,
    DecoderBlock,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    LayerNorm,
    NormStyle,
    Residual,
)
from deepspeed_nmt.nn.stack import LayerStack

M = TypeVar("M", bound=nn.Module)


class NotStandardError(Exception):
    """A model is no standard Transformer; the message is a clause with the reason."""


@dataclass(frozen=True)
class LinearWeights:
    """The matrix and the bias of a matrix product x W^T + b, b = 0 if it is None."""

    weight_ED: Tensor
    bias_E: Tensor | None


@dataclass(frozen=True)
class NormWeights:
    """The parameters of a LayerNorm."""

    weight_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True)
class AttentionWeights:
    """An attention sub-layer with its LayerNorm."""

    norm: NormWeights
    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights


@dataclass(frozen=True)
class FeedForwardWeights:
    """A feed-forward sub-layer with its LayerNorm."""

    norm: NormWeights
    up: LinearWeights
    down: LinearWeights


@dataclass(frozen=True)
class LayerWeights:
    """A layer; without cross-attention in encoders, and in decoder layers that do not read the source."""

    self_attention: AttentionWeights
    cross_attention: AttentionWeights | None
    feed_forward: FeedForwardWeights


@dataclass(frozen=True)
class StackWeights:
    """The layers of an encoder or a decoder.

    Attributes:
        layers: in the order of application.
        alpha: weight of the residual branch, for DeepNorm; else 1.
        final_norm: applied to the last state, or None.
        input_scale: factor of the embedded tokens, positions included.
    """

    layers: tuple[LayerWeights, ...]
    alpha: float
    final_norm: NormWeights | None
    input_scale: float = 1.0


@dataclass(frozen=True)
class StandardTransformer:
    """A standard Transformer.

    Attributes:
        source_VD: embedding of the source.
        target_VD: embedding of the target; the same object if they share one.
        output: projection to the vocabulary; its matrix may be the same object as an embedding.
        scale: factor of rows of the embeddings, before positions are added.
        positions: function that returns the positions 0..T-1, (T,D), given T.
        heads: attention heads of all layers.
        norm: place of all LayerNorms.
        activation: of all feed-forward networks.
        norm_eps: of all LayerNorms.
    """

    source_VD: Tensor
    target_VD: Tensor
    output: LinearWeights
    scale: float
    positions: Callable[[int], Tensor]
    heads: int
    norm: NormStyle
    activation: Activation
    norm_eps: float
    encoder: StackWeights
    decoder: StackWeights

    @property
    def dim(self) -> int:
        """Model width, D."""
        return self.source_VD.shape[1]

    @property
    def ffn_dim(self) -> int:
        """Inner width of the feed-forward networks."""
        return self.encoder.layers[0].feed_forward.up.weight_ED.shape[0]


def describe(
    source_VD: Tensor,
    target_VD: Tensor,
    output: nn.Module,
    scale: float,
    positions: Callable[[int], Tensor],
    encoder: LayerStack,
    decoder: LayerStack,
) -> StandardTransformer:
    """Describe a model by its embeddings, projection and stacks.

    Raises:
        NotStandardError: if a stack adds its input again, or has other layers than standard ones.
    """
    stacks = _stack(encoder, "encoder"), _stack(decoder, "decoder")
    common = {
        (around.style, attention.q_proj.out_features // attention.head_dim, network.activation, around.norm.eps)
        for layer in (*encoder.layers, *decoder.layers)
        for around in _modules(layer, Residual)
        for attention in _modules(layer, MultiHeadAttention)
        for network in _modules(layer, FeedForward)
    }
    if len(common) != 1:
        raise NotStandardError("its layers differ in their norms, heads or activations")
    norm, heads, activation, eps = common.pop()
    return StandardTransformer(
        source_VD.detach(),
        target_VD.detach(),
        _linear(output),
        scale,
        positions,
        heads,
        norm,
        activation,
        eps,
        *stacks,
    )


def _stack(stack: LayerStack, side: str) -> StackWeights:
    order = stack.order
    if added := sorted(at for at in order.inputs_at if at < len(order.indices)):
        raise NotStandardError(f"its {side} adds the embedded tokens to the state again before layer {added[0] + 1}")
    described = [_layer(layer, f"layer {number} of its {side}") for number, layer in enumerate(stack.layers, 1)]
    alphas = {around.alpha for layer in stack.layers for around in _modules(layer, Residual)}
    if len(alphas) != 1:
        raise NotStandardError(f"the layers of its {side} weight their residual branches differently")
    norm = stack.final_norm
    if norm is not None and not isinstance(norm, LayerNorm):
        raise NotStandardError(f"its {side} ends in another module than a LayerNorm")
    layers = tuple(described[index] for index in order.indices)
    return StackWeights(layers, alphas.pop(), None if norm is None else _norm(norm))


def _layer(layer: nn.Module, which: str) -> LayerWeights:
    standard = layer.in_inference() if isinstance(layer, DecoderBlock) else layer
    cross = None
    if isinstance(standard, DecoderLayer):
        if standard.cross_attention is not None and standard.cross_residual is not None:
            cross = _attention(standard.cross_attention, standard.cross_residual)
    elif type(standard) is not EncoderLayer:
        raise NotStandardError(f"{which} is no standard layer")
    network = standard.feed_forward
    if type(network) is not FeedForward:
        raise NotStandardError("its feed-forward networks are not those of a standard Transformer")
    return LayerWeights(
        _attention(standard.self_attention, standard.self_residual),
        cross,
        FeedForwardWeights(
            _norm(standard.feed_forward_residual.norm), _linear(network.up_proj), _linear(network.down_proj)
        ),
    )


def _attention(attention: MultiHeadAttention, around: Residual) -> AttentionWeights:
    if type(attention) is not MultiHeadAttention:
        raise NotStandardError("its attention is not that of a standard Transformer")
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
    return AttentionWeights(_norm(around.norm), *map(_linear, projections))


def _linear(layer: nn.Module) -> LinearWeights:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return LinearWeights(weight.detach(), bias.detach() if isinstance(bias, Tensor) else None)


def _norm(norm: LayerNorm) -> NormWeights:
    return NormWeights(norm.weight.detach(), norm.bias.detach())


def _modules(layer: nn.Module, kind: type[M]) -> Iterator[M]:
    return (module for module in layer.modules() if isinstance(module, kind))
