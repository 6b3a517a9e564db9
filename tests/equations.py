"""Sub-layers transcribed from the equations of the papers.

They read the weights of a model's modules, and share no code with it: one sentence at a time, so that nothing is
padded or masked; one position and one head at a time; causal attention by leaving out later positions.

Legend: S source length, T target length, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
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


def projected_cross_entropy_ref(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float = 0.0,
    row_weights_N: Tensor | None = None,
    bias: Tensor | None = None,
    taught: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `projected_cross_entropy` from all logits at once, with torch's own functions."""
    logits = [F.linear(x, weight_VD, bias) for x in states]
    logits = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in logits]
    learning = logits
    if taught is not None:
        learning, logits = logits[:1], [logits[0], logits[1].detach()]
    options = {"ignore_index": ignore_index, "reduction": "none"}
    loss_N, nll_N = (
        torch.stack([F.cross_entropy(x, targets_N, label_smoothing=e, **options) for x in learning]).mean(0)  # type: ignore[arg-type]
        for e in (smoothing, 0.0)
    )
    divergence_N = torch.zeros_like(nll_N)
    if len(logits) == 2:
        p, q = (torch.log_softmax(x, dim=1) for x in logits)
        there, back = (F.kl_div(b, a, log_target=True, reduction="none").sum(1) for a, b in ((p, q), (q, p)))
        divergence_N = torch.where(targets_N == ignore_index, 0.0, back if taught == "kl" else (there + back) / 2)
    if row_weights_N is not None:
        loss_N, divergence_N = loss_N * row_weights_N, divergence_N * row_weights_N
    return loss_N.sum() + divergence_weight * divergence_N.sum(), nll_N, divergence_N.sum()
