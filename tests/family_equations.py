"""Transcriptions of GNMT, ConvS2S, merged attention and layer-wise coordination, from the equations of the papers.

As in :mod:`tests.transformer_equations`: one sentence and one position at a time, with the weights of a model's
modules and none of its code.

Legend: S source length, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.equations import linear


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
