"""Rewriting of plain Transformers for programs that know fewer kinds of layers. What they compute stays the same.

**DeepNorm.** A sub-layer computes LN(alpha x + f(x)). The rewritten one carries y = alpha x from sub-layer to
sub-layer: its matrices that read the state are divided by alpha, the output of its LayerNorm is multiplied by alpha.
It computes alpha LN(y + f(y / alpha)), which is post-norm with the same sums. The last LayerNorm of a stack keeps its
output.

**Layers without cross-attention.** They get one whose output is zero. In pre-norm the state passes it unchanged. In
post-norm it meets a second LayerNorm in a row: the first one then only standardises, and the second one has the
weights of both. The first one's gain is large, so that the eps of the second one adds nothing. What remains is the
eps of the first one, undone by the second: a relative error of eps / (2 variance) of the state.

Legend: V vocabulary, D model width, E output width.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed_nmt.core.plain import (
    PlainAttention,
    PlainFeedForward,
    PlainLayer,
    PlainLinear,
    PlainNorm,
    PlainStack,
    PlainTransformer,
)

_STANDARD_GAIN = 1024.0
"""Gain of a LayerNorm that is followed by another one; a power of two, so that it adds no rounding."""


def fold_deepnorm(model: PlainTransformer) -> PlainTransformer:
    """Return the post-norm model that computes the same as a DeepNorm model; other models are returned unchanged."""
    if model.norm != "deepnorm":
        return model
    return replace(model, norm="post", encoder=_fold_alpha(model.encoder), decoder=_fold_alpha(model.decoder))


def _fold_alpha(stack: PlainStack) -> PlainStack:
    alpha = stack.alpha
    last = len(stack.layers) - 1

    def attention(part: PlainAttention, reads_state: bool) -> PlainAttention:
        return replace(
            part,
            norm=_scaled_norm(part.norm, alpha),
            query=_scaled_input(part.query, alpha),
            key=_scaled_input(part.key, alpha) if reads_state else part.key,
            value=_scaled_input(part.value, alpha) if reads_state else part.value,
        )

    layers = [
        PlainLayer(
            self_attention=attention(layer.self_attention, reads_state=True),
            cross_attention=None
            if layer.cross_attention is None
            else attention(layer.cross_attention, reads_state=False),
            feed_forward=PlainFeedForward(
                norm=layer.feed_forward.norm if number == last else _scaled_norm(layer.feed_forward.norm, alpha),
                up=_scaled_input(layer.feed_forward.up, alpha),
                down=layer.feed_forward.down,
            ),
        )
        for number, layer in enumerate(stack.layers)
    ]
    return PlainStack(tuple(layers), 1.0, stack.final_norm, stack.input_scale * alpha)


def _scaled_norm(norm: PlainNorm, factor: float) -> PlainNorm:
    return PlainNorm(norm.weight_D * factor, norm.bias_D * factor)


def _scaled_input(linear: PlainLinear, factor: float) -> PlainLinear:
    return PlainLinear(linear.weight_ED / factor, linear.bias_E)


def fill_cross_attention(model: PlainTransformer) -> PlainTransformer:
    """Give cross-attention with a zero output to decoder layers that have none. The model's norm is pre or post."""
    layers = [
        _with_zero_attention(layer, model.norm == "post") if layer.cross_attention is None else layer
        for layer in model.decoder.layers
    ]
    return replace(model, decoder=replace(model.decoder, layers=tuple(layers)))


def _with_zero_attention(layer: PlainLayer, post_norm: bool) -> PlainLayer:
    own = layer.self_attention
    dim = own.norm.weight_D.shape[0]
    zero = PlainLinear(torch.zeros(dim, dim), torch.zeros(dim))
    if not post_norm:
        norm = PlainNorm(torch.ones(dim), torch.zeros(dim))
        return replace(layer, cross_attention=PlainAttention(norm, zero, zero, zero, zero))
    standard = PlainNorm(torch.full((dim,), _STANDARD_GAIN), torch.zeros(dim))
    return replace(
        layer,
        self_attention=replace(own, norm=standard),
        cross_attention=PlainAttention(own.norm, zero, zero, zero, zero),
    )
