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
    """The matrix and the bias of a matrix product x W^T + b.

    Attributes:
        weight_ED: W.
        bias_E: b; None for zeros.
    """

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
    """A layer of an encoder or a decoder.

    Attributes:
        self_attention: its first sub-layer.
        cross_attention: its second one; None in encoders, and in decoder layers that do not read the source.
        feed_forward: its last one.
    """

    self_attention: AttentionWeights
    cross_attention: AttentionWeights | None
    feed_forward: FeedForwardWeights


@dataclass(frozen=True)
class StackWeights:
    """The layers of an encoder or a decoder.

    Attributes:
        layers: in the order of application.
        alpha: weight of the residual branch, for DeepNorm; else 1.
        final_norm: applied to the last state; None without such.
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
        heads: attention heads.
        norm: place of the LayerNorms.
        activation: of the feed-forward networks.
        norm_eps: of all LayerNorms.
        encoder: its layers.
        decoder: its layers.
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
    output: LinearWeights,
    scale: float,
    positions: Callable[[int], Tensor],
    encoder: LayerStack,
    decoder: LayerStack,
) -> StandardTransformer:
    """Describe a model by its embeddings and stacks; the other arguments are those of :class:`StandardTransformer`.

    Args:
        source_VD: embedding of the source.
        target_VD: embedding of the target.
        output: projection.
        scale: factor of embeddings.
        positions: function of positions.
        encoder: stack of encoder layers.
        decoder: stack of decoder layers.

    Raises:
        NotStandardError: if a stack adds its input again, or has other layers than standard ones.
    """
    encoder_weights, decoder_weights = _stack(encoder, "encoder"), _stack(decoder, "decoder")
    norm, heads, activation, eps = _common((encoder, decoder))
    return StandardTransformer(
        source_VD=source_VD.detach(),
        target_VD=target_VD.detach(),
        output=output,
        scale=scale,
        positions=positions,
        heads=heads,
        norm=norm,
        activation=activation,
        norm_eps=eps,
        encoder=encoder_weights,
        decoder=decoder_weights,
    )


def _stack(stack: LayerStack, side: str) -> StackWeights:
    order = stack.order
    if added := sorted(at for at in order.inputs_at if at < len(order.indices)):
        raise NotStandardError(f"its {side} adds the embedded tokens to the state again before layer {added[0] + 1}")
    described = [_layer(layer, f"layer {number} of its {side}") for number, layer in enumerate(stack.layers, 1)]
    alphas = {part.alpha for layer in stack.layers for part in layer.modules() if isinstance(part, Residual)}
    if len(alphas) != 1:
        raise NotStandardError(f"the layers of its {side} weight their residual branches differently")
    final = None
    if stack.final_norm is not None:
        if not isinstance(stack.final_norm, LayerNorm):
            raise NotStandardError(f"its {side} ends in another module than a LayerNorm")
        final = _norm(stack.final_norm)
    return StackWeights(tuple(described[index] for index in order.indices), alphas.pop(), final)


def _layer(layer: nn.Module, which: str) -> LayerWeights:
    if type(layer) is EncoderLayer:
        return LayerWeights(
            self_attention=_attention(layer.self_attention, layer.self_residual),
            cross_attention=None,
            feed_forward=_feed_forward(layer.feed_forward, layer.feed_forward_residual),
        )
    standard = layer.in_inference() if isinstance(layer, DecoderBlock) else None
    if standard is None:
        raise NotStandardError(f"{which} is no standard layer")
    crosses = standard.cross_attention is not None and standard.cross_residual is not None
    return LayerWeights(
        self_attention=_attention(standard.self_attention, standard.self_residual),
        cross_attention=_attention(standard.cross_attention, standard.cross_residual) if crosses else None,
        feed_forward=_feed_forward(standard.feed_forward, standard.feed_forward_residual),
    )


def _attention(attention: MultiHeadAttention | None, around: Residual | None) -> AttentionWeights:
    assert attention is not None and around is not None
    if type(attention) is not MultiHeadAttention:
        raise NotStandardError("its attention is not that of a standard Transformer")
    return AttentionWeights(
        norm=_norm(around.norm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.out_proj),
    )


def _feed_forward(network: FeedForward, around: Residual) -> FeedForwardWeights:
    if type(network) is not FeedForward:
        raise NotStandardError("its feed-forward networks are not those of a standard Transformer")
    return FeedForwardWeights(_norm(around.norm), _linear(network.up_proj), _linear(network.down_proj))


def _linear(layer: nn.Linear) -> LinearWeights:
    bias: Tensor | None = layer.bias
    return LinearWeights(layer.weight.detach(), None if bias is None else bias.detach())


def _norm(norm: LayerNorm) -> NormWeights:
    return NormWeights(norm.weight.detach(), norm.bias.detach())


def _common(stacks: tuple[LayerStack, LayerStack]) -> tuple[NormStyle, int, Activation, float]:
    """Return what all layers must have in common: place of the norms, heads, activation, and eps of the norms."""
    common: set[tuple[NormStyle, int, Activation, float]] = set()
    for layer in (layer for stack in stacks for layer in stack.layers):
        residuals = list(_modules(layer, Residual))
        attentions, networks = list(_modules(layer, MultiHeadAttention)), list(_modules(layer, FeedForward))
        common |= {
            (around.style, attention.q_proj.out_features // attention.head_dim, network.activation, around.norm.eps)
            for around in residuals
            for attention in attentions
            for network in networks
        }
    if len(common) != 1:
        raise NotStandardError("its layers differ in their norms, heads or activations")
    return common.pop()


def _modules(layer: nn.Module, kind: type[M]) -> Iterator[M]:
    return (module for module in layer.modules() if isinstance(module, kind))
