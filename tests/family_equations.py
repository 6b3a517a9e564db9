"""Transcriptions of GNMT, ConvS2S, merged attention, layer-wise coordination and MSC from equations.

As in :mod:`tests.transformer_equations`: one sentence and one position at a time, with the weights of a model's
modules and none of its code.

Legend: S source length, T target length, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests import transformer_equations
from tests.equations import attend, linear
from tests.transformer_equations import embed, network, norm, residual


def lstm(part: Any, x_TD: Sequence[Tensor]) -> list[Tensor]:
    """Run an LSTM from zeros (Hochreiter and Schmidhuber 1997, with forget gates)."""
    dim = part.weight_hh_l0.shape[1]
    h = c = torch.zeros(dim, dtype=torch.float64)
    outputs = []
    for x in x_TD:
        gates = part.weight_ih_l0 @ x + part.bias_ih_l0 + part.weight_hh_l0 @ h + part.bias_hh_l0
        i, f, g, o = (gates[n * dim : (n + 1) * dim] for n in range(4))
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    return outputs


def gnmt(model: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the decoder's top states (Wu et al. 2016, equations 4 and 6)."""
    x = [model.source_embedding.weight[token] for token in source]
    first, *upper = model.encoder.layers
    right, left = lstm(first.forwards, x), lstm(first.backwards, x[::-1])[::-1]
    x = [torch.cat(pair) for pair in zip(right, left, strict=True)]
    for number, layer in enumerate(upper, 2):
        outputs = lstm(layer.lstm, x)
        x = [m + below if number >= 3 else m for m, below in zip(outputs, x, strict=True)]
    lowest, *upper = model.decoder.layers
    attention = lowest.attention
    y = lstm(lowest.lstm, [model.target_embedding.weight[token] for token in target])
    contexts = []
    for query in y:
        hidden = [torch.tanh(linear(attention.q_proj, query) + linear(attention.k_proj, state)) for state in x]
        p = torch.softmax(torch.stack([attention.score_D @ h for h in hidden]), 0)
        contexts.append(sum(weight * state for weight, state in zip(p, x, strict=True)))
    for number, layer in enumerate(upper, 2):
        outputs = lstm(layer.lstm, [torch.cat(pair) for pair in zip(y, contexts, strict=True)])
        y = [m + below if number >= 3 else m for m, below in zip(outputs, y, strict=True)]
    return torch.stack(y)


def normalised(part: Any, x: Tensor) -> Tensor:
    weight = torch.stack([g * v / v.square().sum().sqrt() for g, v in zip(part.g_E, part.v_ED, strict=True)])
    return weight @ x + part.bias


def block(part: Any, h: Sequence[Tensor], place: int, before: int) -> Tensor:
    """Compute v(W [h_(place - before) ..] + b), with zeros outside the sentence (Gehring et al. 2017, 3.2)."""
    zero = torch.zeros_like(h[0])
    places = range(place - before, place - before + part.kernel_width)
    a, b = normalised(part.convolution, torch.cat([h[i] if 0 <= i < len(h) else zero for i in places])).chunk(2)
    return a * torch.sigmoid(b)


def summed(part: Any, output: Tensor, h: Tensor) -> Tensor:
    return (output + (h if part.residual is None else normalised(part.residual, h))) * math.sqrt(0.5)


def convs2s(model: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the decoder's top states (Gehring et al. 2017, equations 1 and 2, and 3.4)."""
    half, layers = math.sqrt(0.5), len(model.decoder.layers)
    e, g = (
        [table.weight[token] + table.position_PD[place] for place, token in enumerate(tokens)]
        for table, tokens in ((model.source_embedding, source), (model.target_embedding, target))
    )
    z = [normalised(model.encoder_in, x) for x in e]
    for layer in model.encoder.layers:
        z = [summed(layer, block(layer, z, i, layer.kernel_width // 2), z[i]) for i in range(len(z))]
    z = [normalised(model.encoder_out, x) for x in z]
    z = [x / layers + (x - x / layers).detach() for x in z]  # the gradient is scaled
    h = [normalised(model.decoder_in, x) for x in g]
    for layer in model.decoder.layers:
        below, h = h, []
        for i in range(len(below)):
            v = block(layer, below[: i + 1], i, layer.kernel_width - 1)
            d = (normalised(layer.query, v) + g[i]) * half
            a = torch.softmax(torch.stack([d @ key for key in z]), 0)
            m = len(z)
            c = m * math.sqrt(1 / m) * sum(a[j] * (z[j] + e[j]) * half for j in range(m))
            h.append(summed(layer, (normalised(layer.out, c) + v) * half, below[i]))
    return torch.stack([normalised(model.decoder_out, x) for x in h])


def merged(model: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the decoder's top states with merged attention (Zhang et al. 2019, the sum of SAan and Att)."""
    decoder = model.decoder
    style, heads = decoder.layers[0].cross_residual.style, 4
    memory = transformer_equations.encoder(model.encoder, style, heads, embed(model.source_embedding.weight, source))
    y = embed(model.target_embedding.weight, target)
    for layer in decoder.layers:
        attention = layer.cross_attention

        def sublayer(h: Tensor, attention: Any = attention) -> Tensor:
            attended = attend(attention, heads, h, memory) - attention.out_proj.bias
            value = linear(attention.v_proj, h)
            average = torch.stack([value[: place + 1].mean(0) for place in range(len(h))])
            return attended + linear(attention.out_proj, average)

        y = residual(layer.cross_residual, style, y, sublayer)
        y = residual(layer.feed_forward_residual, style, y, partial(network, layer.feed_forward))
    return y if decoder.final_norm is None else norm(decoder.final_norm, y)


def coordination(model: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the decoder's top states (He et al. 2018): mixed attention of layer i to [h_i; s_(i-1)]."""
    style = model.decoder.layers[0].self_residual.style
    x, y = embed(model.source_embedding.weight, source), embed(model.target_embedding.weight, target)
    for layer in model.decoder.layers:
        x = transformer_equations.encoder_layer(layer, style, x.shape[1] // layer.self_attention.head_dim, x)
        y = residual(layer.self_residual, style, y, partial(mixed, layer, style, x))
        y = residual(layer.feed_forward_residual, style, y, partial(network, layer.feed_forward))
    return y if model.decoder.final_norm is None else norm(model.decoder.final_norm, y)


def mixed(layer: Any, style: str, x: Tensor, h: Tensor) -> Tensor:
    attention = layer.self_attention
    memory, heads = norm(layer.self_residual.norm, x) if style == "pre" else x, x.shape[1] // attention.head_dim
    rows = [attend(attention, heads, h[t : t + 1], torch.cat([memory, h[: t + 1]])) for t in range(len(h))]
    return torch.cat(rows)


def msc(model: Any, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Compute the decoder's top states (Wei et al. 2020): a layer a block, and a GRU from block to block."""
    x, y = embed(model.source_embedding.weight, source), embed(model.target_embedding.weight, target)
    carried, layers, cell = x, list(model.encoder.layers), model.context_cell.cell
    size = len(layers) // len(model.decoder.layers)
    for number, above in enumerate(model.decoder.layers):
        style, heads = above.self_residual.style, x.shape[1] // above.self_attention.head_dim
        for layer in layers[number * size : (number + 1) * size]:
            x = residual(layer.self_residual, style, x, partial(attend_to_itself, layer.self_attention, heads))
            x = residual(layer.context_residual, style, x, reading(layer.context_attention, heads, carried))
            x = residual(layer.feed_forward_residual, style, x, partial(network, layer.feed_forward))
        block = norm(model.block_norms[number], x) if style == "pre" else x
        carried = torch.stack([gru(cell, *pair) for pair in zip(block, carried, strict=True)])
        prefix = partial(attend_to_itself, above.self_attention, heads, causal=True)
        y = residual(above.self_residual, style, y, prefix)
        y = residual(above.cross_residual, style, y, reading(above.cross_attention, heads, block))
        y = residual(above.context_residual, style, y, reading(above.context_attention, heads, carried))
        y = residual(above.feed_forward_residual, style, y, partial(network, above.feed_forward))
    return y if model.decoder.final_norm is None else norm(model.decoder.final_norm, y)


def attend_to_itself(attention: Any, heads: int, h: Tensor, causal: bool = False) -> Tensor:
    return attend(attention, heads, h, h, causal)


def reading(attention: Any, heads: int, memory: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda h: attend(attention, heads, h, memory)


def gru(cell: Any, x: Tensor, h: Tensor) -> Tensor:
    """Compute the next state of a GRU (Cho et al. 2014), whose reset gate scales what its product has computed."""
    read, kept = cell.weight_ih @ x + cell.bias_ih, cell.weight_hh @ h + cell.bias_hh
    (r_x, z_x, n_x), (r_h, z_h, n_h) = read.chunk(3), kept.chunk(3)
    z = torch.sigmoid(z_x + z_h)
    return (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h
