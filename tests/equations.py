"""Sub-layers transcribed from the equations of the papers.

They read the weights of a model's modules, and share no code with it: one sentence at a time, so that nothing is
padded or masked; one position and one head at a time; causal attention by leaving out later positions.

Legend: S source length, T target length, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def linear(part: Any, x: Tensor) -> Tensor:
    return x @ part.weight.T + (0.0 if part.bias is None else part.bias)


def norm(part: Any, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * part.weight + part.bias


def network(part: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return linear(part.down_proj, activation(linear(part.up_proj, x)))


def attend(part: Any, heads: int, x_TD: Tensor, memory_SD: Tensor, causal: bool = False) -> Tensor:
    query, key, value = linear(part.q_proj, x_TD), linear(part.k_proj, memory_SD), linear(part.v_proj, memory_SD)
    width = x_TD.shape[1] // heads
    rows = []
    for place in range(len(x_TD)):
        seen = place + 1 if causal else len(memory_SD)
        found = []
        for head in range(heads):
            of = slice(head * width, (head + 1) * width)
            weights = torch.softmax(key[:seen, of] @ query[place, of] / math.sqrt(width), 0)
            found.append(weights @ value[:seen, of])
        rows.append(torch.cat(found))
    return linear(part.out_proj, torch.stack(rows))
