"""Description of a model as a plain Transformer, from which other programs' weights are written.

A plain Transformer applies a list of layers, one after another, between embeddings with fixed positions and a
projection. A layer that is applied several times is listed several times.

Legend: V vocabulary, D model width, E output width, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.feedforward import Activation, FeedForward
from deepspeed_nmt.nn.layers import CrossAttending, EncoderLayer
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.nn.sublayer import LayerNorm, NormStyle, Residual

M = TypeVar("M", bound=nn.Module)


class NotPlainError(Exception):
    """A model is no plain Transformer; the message is a clause with the reason."""


@dataclass(frozen=True)
class PlainLinear:
    """The matrix and the bias of a matrix product x W^T + b.

    Attributes:
        weight_ED: W.
        bias_E: b; None for zeros.
    """

    weight_ED: Tensor
    bias_E: Tensor | None


@dataclass(frozen=True)
class PlainNorm:
    """The parameters of a LayerNorm."""

    weight_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True)
class PlainAttention:
    """An attention sub-layer with its LayerNorm."""

    norm: PlainNorm
    query: PlainLinear
    key: PlainLinear
    value: PlainLinear
    output: PlainLinear


@dataclass(frozen=True)
class PlainFeedForward:
    """A feed-forward sub-layer with its LayerNorm."""

    norm: PlainNorm
    up: PlainLinear
    down: PlainLinear


@dataclass(frozen=True)
class PlainLayer:
    """A layer of an encoder or a decoder.

    Attributes:
        self_attention: its first sub-layer.
        cross_attention: its second one; None in encoders, and in decoder layers that do not read the source.
        feed_forward: its last one.
    """

    self_attention: PlainAttention
    cross_attention: PlainAttention | None
    feed_forward: PlainFeedForward


@dataclass(frozen=True)
class PlainStack:
    """The layers of an encoder or a decoder.

    Attributes:
        layers: in the order of application.
        alpha: weight of the residual branch, for DeepNorm; else 1.
        final_norm: applied to the last state; None without such.
        input_scale: factor of the embedded tokens, positions included.
    """

    layers: tuple[PlainLayer, ...]
    alpha: float
    final_norm: PlainNorm | None
    input_scale: float = 1.0


@dataclass(frozen=True)
class PlainTransformer:
    """A plain Transformer.

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
    output: PlainLinear
    scale: float
    positions: Callable[[int], Tensor]
    heads: int
    norm: NormStyle
    activation: Activation
    norm_eps: float
    encoder: PlainStack
    decoder: PlainStack

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
    output: PlainLinear,
    scale: float,
    positions: Callable[[int], Tensor],
    encoder: LayerStack,
    decoder: LayerStack,
) -> PlainTransformer:
    """Describe a model by its embeddings and its stacks; the other arguments are those of :class:`PlainTransformer`.

    Args:
        source_VD: embedding of the source.
        target_VD: embedding of the target.
        output: projection.
        scale: factor of embeddings.
        positions: function of positions.
        encoder: stack of encoder layers.
        decoder: stack of decoder layers.

    Raises:
        NotPlainError: if a stack adds its input again, or has other layers than standard ones.
    """
    plain_encoder, plain_decoder = _stack(encoder, "encoder"), _stack(decoder, "decoder")
    norm, heads, activation, eps = _common((encoder, decoder))
    return PlainTransformer(
        source_VD=source_VD.detach(),
        target_VD=target_VD.detach(),
        output=output,
        scale=scale,
        positions=positions,
        heads=heads,
        norm=norm,
        activation=activation,
        norm_eps=eps,
        encoder=plain_encoder,
        decoder=plain_decoder,
    )


def _stack(stack: LayerStack, side: str) -> PlainStack:
    order = stack.order
    if added := sorted(at for at in order.inputs_at if at < len(order.indices)):
        raise NotPlainError(f"its {side} adds the embedded tokens to the state again before layer {added[0] + 1}")
    described = [_layer(layer, f"layer {number} of its {side}") for number, layer in enumerate(stack.layers, 1)]
    alphas = {part.alpha for layer in stack.layers for part in layer.modules() if isinstance(part, Residual)}
    if len(alphas) != 1:
        raise NotPlainError(f"the layers of its {side} weight their residual branches differently")
    final = None
    if stack.final_norm is not None:
        if not isinstance(stack.final_norm, LayerNorm):
            raise NotPlainError(f"its {side} ends in another module than a LayerNorm")
        final = _norm(stack.final_norm)
    return PlainStack(tuple(described[index] for index in order.indices), alphas.pop(), final)


def _layer(layer: nn.Module, which: str) -> PlainLayer:
    if type(layer) is EncoderLayer:
        return PlainLayer(
            self_attention=_attention(layer.self_attention, layer.self_residual),
            cross_attention=None,
            feed_forward=_feed_forward(layer.feed_forward, layer.feed_forward_residual),
        )
    standard = layer.in_inference() if isinstance(layer, CrossAttending) else None
    if standard is None:
        raise NotPlainError(f"{which} is no standard layer")
    crosses = standard.cross_attention is not None and standard.cross_residual is not None
    return PlainLayer(
        self_attention=_attention(standard.self_attention, standard.self_residual),
        cross_attention=_attention(standard.cross_attention, standard.cross_residual) if crosses else None,
        feed_forward=_feed_forward(standard.feed_forward, standard.feed_forward_residual),
    )


def _attention(attention: MultiHeadAttention | None, around: Residual | None) -> PlainAttention:
    assert attention is not None and around is not None
    if type(attention) is not MultiHeadAttention:
        raise NotPlainError("its attention is not that of a plain Transformer")
    return PlainAttention(
        norm=_norm(around.norm),
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        output=_linear(attention.out_proj),
    )


def _feed_forward(network: FeedForward, around: Residual) -> PlainFeedForward:
    if type(network) is not FeedForward:
        raise NotPlainError("its feed-forward networks are not those of a plain Transformer")
    return PlainFeedForward(_norm(around.norm), _linear(network.up_proj), _linear(network.down_proj))


def _linear(layer: nn.Linear) -> PlainLinear:
    bias: Tensor | None = layer.bias
    return PlainLinear(layer.weight.detach(), None if bias is None else bias.detach())


def _norm(norm: LayerNorm) -> PlainNorm:
    return PlainNorm(norm.weight.detach(), norm.bias.detach())


def _common(stacks: tuple[LayerStack, LayerStack]) -> tuple[NormStyle, int, Activation, float]:
    """Return what all layers must have in common: place of the norms, heads, activation, and eps of the norms."""
    found: set[tuple[NormStyle, int, Activation, float]] = set()
    for layer in (layer for stack in stacks for layer in stack.layers):
        residuals = list(_modules(layer, Residual))
        attentions, networks = list(_modules(layer, MultiHeadAttention)), list(_modules(layer, FeedForward))
        found |= {
            (around.style, attention.q_proj.out_features // attention.head_dim, network.activation, around.norm.eps)
            for around in residuals
            for attention in attentions
            for network in networks
        }
    if len(found) != 1:
        raise NotPlainError("its layers differ in their norms, heads or activations")
    return found.pop()


def _modules(layer: nn.Module, kind: type[M]) -> Iterator[M]:
    return (module for module in layer.modules() if isinstance(module, kind))
