"""Description of a model as a standard Transformer, from which other programs' weights are written.

A standard Transformer applies a list of layers, one after another, between embeddings with fixed positions and a
projection. A layer that is applied several times is listed several times.

Legend: V vocabulary, D model width, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
_OUTPUTS = {
    "self_residual": "self_attention.out_proj",
    "cross_residual": "cross_attention.out_proj",
    "feed_forward_residual": "feed_forward.down_proj",
}
"""The last product within each residual connection of a layer."""


class NotStandardError(Exception):
    """A model is no standard Transformer; the message is a clause with the reason."""


@dataclass(frozen=True)
class StandardTransformer:
    """A standard Transformer. Pairs are of the encoder and the decoder.

    Attributes:
        weights: by the names of a :class:`~deepspeed_nmt.methods.transformer.Transformer`; layers are numbered in the
            order of application, so ``encoder.layers.2`` is the third that is applied. Those that are shared are the
            same memory. Decoder layers that do not read the source have no cross-attention.
        scale: factor of rows of the embeddings, before positions are added.
        positions: function that returns the positions 0..T-1, (T,D), given T.
        depths: numbers of layers.
        heads: attention heads of all layers.
        norms: places of the LayerNorms.
        activation: of all feed-forward networks.
        norm_eps: of all LayerNorms.
        alphas: weights of the residual branches, for DeepNorm; else 1.
        input_scales: factors of the embedded tokens, positions included.
        relative: True if self-attention has relative positions: ``key_edges`` and ``value_edges``, (1, 2 k + 1, K).
    """

    weights: Mapping[str, Tensor]
    scale: float
    positions: Callable[[int], Tensor]
    depths: tuple[int, int]
    heads: int
    norms: tuple[NormStyle, NormStyle]
    activation: Activation
    norm_eps: float
    alphas: tuple[float, float]
    input_scales: tuple[float, float] = (1.0, 1.0)
    relative: bool = False


def describe(
    fixed: Mapping[str, nn.Module],
    scale: float,
    positions: Callable[[int], Tensor],
    encoder: LayerStack,
    decoder: LayerStack,
) -> StandardTransformer:
    """Describe a model by its stacks and its other modules, embeddings and projection, by name.

    Raises:
        NotStandardError: if a stack adds its input again, has links, or has other layers than standard ones.
    """
    stacks = {"encoder": encoder, "decoder": decoder}
    weights = {
        f"{where}.{name}": parameter.detach()
        for where, module in fixed.items()
        for name, parameter in module.named_parameters()
    }
    weights |= {name: weight.detach() for side, stack in stacks.items() for name, weight in _weights(stack, side)}
    layers = (*encoder.layers, *decoder.layers)
    common = {
        (attention.q_proj.out_features // attention.head_dim, network.activation, around.norm.eps)
        for layer in layers
        for around in _modules(layer, Residual)
        for attention in _modules(layer, MultiHeadAttention)
        for network in _modules(layer, FeedForward)
    }
    if len(common) != 1:
        raise NotStandardError("its layers differ in their heads, activations or the eps of their norms")
    heads, activation, eps = common.pop()
    depths = encoder.applications, decoder.applications
    encoder_norm, encoder_alpha = _connections(encoder, "encoder")
    decoder_norm, decoder_alpha = _connections(decoder, "decoder")
    norms, alphas = (encoder_norm, decoder_norm), (encoder_alpha, decoder_alpha)
    relative = any(attention.is_relative for layer in layers for attention in _modules(layer, MultiHeadAttention))
    return StandardTransformer(
        weights, scale, positions, depths, heads, norms, activation, eps, alphas, relative=relative
    )


def _weights(stack: LayerStack, side: str) -> Iterator[tuple[str, Tensor]]:
    order, norm = stack.order, stack.final_norm
    if added := sorted(at for at in order.inputs_at if at < len(order.indices)):
        raise NotStandardError(f"its {side} adds the embedded tokens to the state again before layer {added[0] + 1}")
    if stack.links is not None:
        raise NotStandardError(f"layers of its {side} do not read the state below as it is")
    layers = [
        _folded(_standard(layer, f"layer {number} of its {side}")) for number, layer in enumerate(stack.layers, 1)
    ]
    for number, index in enumerate(order.indices):
        yield from ((f"{side}.layers.{number}.{name}", weight) for name, weight in layers[index].items())
    if norm is not None:
        if not isinstance(norm, LayerNorm):
            raise NotStandardError(f"its {side} ends in another module than a LayerNorm")
        yield f"{side}.final_norm.weight", norm.weight
        yield f"{side}.final_norm.bias", norm.bias


def _folded(layer: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a layer by name, with the scales of its residual connections in them."""
    weights: dict[str, Tensor] = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    for name, output in _OUTPUTS.items():
        around = getattr(layer, name, None)
        if isinstance(around, Residual):
            around.fold(weights, name, output)
    return weights


def _connections(stack: LayerStack, side: str) -> tuple[NormStyle, float]:
    kinds = {(around.style, around.alpha) for layer in stack.layers for around in _modules(layer, Residual)}
    if len(kinds) != 1:
        raise NotStandardError(f"the layers of its {side} differ in their norms or the weights of residual branches")
    norm, alpha = kinds.pop()
    if norm != "pre" and stack.final_norm is not None:  # as of an exit that was added
        raise NotStandardError(f"its {side} has a LayerNorm behind layers that end in one")
    return norm, alpha


def _standard(layer: nn.Module, which: str) -> nn.Module:
    standard = layer.in_inference() if isinstance(layer, DecoderBlock | EncoderLayer) else None
    if standard is None:
        raise NotStandardError(f"{which} is no standard layer")
    for around in _modules(standard, Residual):
        if around.not_standard:
            raise NotStandardError(around.not_standard)
    if type(standard.feed_forward) is not FeedForward:
        raise NotStandardError("its feed-forward networks are not those of a standard Transformer")
    attentions = list(_modules(standard, MultiHeadAttention))
    if any(attention.is_relative and attention.own_parameters()[0] for attention in attentions):
        raise NotStandardError("each head has relative positions of its own")
    if any(type(attention) is not MultiHeadAttention and not attention.is_relative for attention in attentions):
        raise NotStandardError("its attention is not that of a standard Transformer")
    return standard


def _modules(layer: nn.Module, kind: type[M]) -> Iterator[M]:
    return (module for module in layer.modules() if isinstance(module, kind))
