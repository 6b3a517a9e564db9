"""Transcriptions of the Transformer and of models made of Transformers, from the equations of the papers.

They read the weights of a model's modules, and share no code with it: one sentence at a time, so that nothing is
padded or masked; one position and one head at a time; causal attention by leaving out later positions.

Legend: S source length, T target length, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests import equations
from tests.equations import attend

Style = str
"""pre or post; of a model also the encoder's, a slash, and the decoder's."""


def norm(part: Any, x: Tensor) -> Tensor:
    return equations.norm(part, x, 1e-5)


def embed(weight_VD: Tensor, tokens: Sequence[int]) -> Tensor:
    """Embed tokens: scaled, plus sinusoids of geometric wavelengths from 2 pi to 10,000 x 2 pi."""
    dim = weight_VD.shape[1]
    rows = []
    for position, token in enumerate(tokens):
        angles = [position / 10000.0 ** (place / (dim // 2 - 1)) for place in range(dim // 2)]
        waves = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
        rows.append(weight_VD[token] * math.sqrt(dim) + torch.tensor(waves, dtype=torch.float64))
    return torch.stack(rows)


def residual(part: Any, style: Style, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    if style == "pre":
        return x + sublayer(norm(part.norm, x))
    return norm(part.norm, x + sublayer(x))


def style_of(side: str, style: Style) -> Style:
    return style.split("/")[0 if side == "encoder" else -1]


def network(part: Any, x: Tensor) -> Tensor:
    return equations.network(part, x, lambda h: h.clamp(min=0.0))


def encoder_layer(layer: Any, style: Style, heads: int, x: Tensor) -> Tensor:
    style = style_of("encoder", style)
    x = residual(layer.self_residual, style, x, lambda h: attend(layer.self_attention, heads, h, h))
    return residual(layer.feed_forward_residual, style, x, lambda h: network(layer.feed_forward, h))


def decoder_layer(layer: Any, style: Style, heads: int, y: Tensor, memory: Tensor) -> Tensor:
    style = style_of("decoder", style)
    y = residual(layer.self_residual, style, y, lambda h: attend(layer.self_attention, heads, h, h, causal=True))
    y = residual(layer.cross_residual, style, y, lambda h: attend(layer.cross_attention, heads, h, memory))
    return residual(layer.feed_forward_residual, style, y, lambda h: network(layer.feed_forward, h))


def encoder(stack: Any, style: Style, heads: int, x: Tensor) -> Tensor:
    for layer in stack.layers:
        x = encoder_layer(layer, style, heads, x)
    return norm(stack.final_norm, x) if style_of("encoder", style) == "pre" else x


def decoder(stack: Any, style: Style, heads: int, y: Tensor, memory: Tensor) -> Tensor:
    for layer in stack.layers:
        y = decoder_layer(layer, style, heads, y, memory)
    return norm(stack.final_norm, y) if style_of("decoder", style) == "pre" else y


def bottom(model: Any, style: Style, heads: int, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the states of a Transformer: dec(y, enc(x))."""
    memory = encoder(model.encoder, style, heads, embed(model.source_embedding.weight, source))
    return decoder(model.decoder, style, heads, embed(model.target_embedding.weight, target), memory)


def grown(
    model: Any, style: Style, heads: int, source: Sequence[int], target: Sequence[int], attend_to_input: bool
) -> Tensor:
    """Compute s2 of Wu et al. 2019: equations 1 to 3, with r on the embeddings."""
    x, y = embed(model.bottom.source_embedding.weight, source), embed(model.bottom.target_embedding.weight, target)
    r_x = norm(model.source_norm, x) if model.config.residual_norm else x
    r_y = norm(model.target_norm, y) if model.config.residual_norm else y
    h1 = encoder(model.bottom.encoder, style, heads, x)
    h2 = encoder(model.top_encoder, style, heads, r_x + h1)
    s1 = decoder(model.bottom.decoder, style, heads, y, h1 + r_x if attend_to_input else h1)
    return decoder(model.top_decoder, style, heads, r_y + s1, h2)


def transparent(model: Any, style: Style, heads: int, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the states of a Transformer with the transparent attention of Bapna et al. 2018."""
    states = [embed(model.source_embedding.weight, source)]
    for layer in model.encoder.layers:
        states.append(encoder_layer(layer, style, heads, states[-1]))
    if style_of("encoder", style) == "pre":
        states = [norm(model.encoder.final_norm, state) for state in states]
    y = embed(model.target_embedding.weight, target)
    for j, wrapped in enumerate(model.decoder.layers):
        column = model.mixtures.logits[:, j].exp()
        z = sum(weight / column.sum() * state for weight, state in zip(column, states, strict=True))
        y = decoder_layer(wrapped.layer, style, heads, y, z)
    return norm(model.decoder.final_norm, y) if style_of("decoder", style) == "pre" else y


def norms(style: Style) -> dict[str, str | None]:
    """Return the settings of a style."""
    encoder, decoder = style_of("encoder", style), style_of("decoder", style)
    return {"norm": encoder, "decoder_norm": None if encoder == decoder else decoder}


def log_probs(states_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """Compute log p of all tokens at each position. Shape: (T,D) -> (T,V)."""
    logits = states_TD @ weight_VD.T
    return logits - logits.exp().sum(1, keepdim=True).log()


def smoothed_loss(log_p_TV: Tensor, target: Sequence[int], smoothing: float) -> Tensor:
    """Compute the sum of the label-smoothed cross-entropy over a sentence."""
    rows = zip(log_p_TV, target, strict=True)
    return torch.stack([-(1 - smoothing) * row[token] - smoothing * row.mean() for row, token in rows]).sum()
