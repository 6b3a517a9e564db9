"""A kernel for CPUs behind torch's attention of variable lengths, so that a CPU takes, and traces, the path of a GPU.

torch's own function, autograd and rules for tracing are used; only the two kernels are replaced.

Legend: H heads, N queries, M keys, K head width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.choice import Kernels


def _weights(q_NHK: Tensor, k_MHK: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool) -> Tensor:
    """Compute attention weights between the bounds. Shape: (N,H,K), (M,H,K) -> (H,N,M)."""
    queries, keys = (torch.arange(x.shape[0], device=x.device, dtype=torch.int32) for x in (q_NHK, k_MHK))
    sentence_N, sentence_M = (
        torch.searchsorted(starts[1:], each, right=True) for starts, each in ((starts_q, queries), (starts_k, keys))
    )
    seen_NM = sentence_N.unsqueeze(1) == sentence_M
    if causal:
        seen_NM &= queries.unsqueeze(1) >= keys
    scores_HNM = torch.einsum("nhk,mhk->hnm", q_NHK, k_MHK) * q_NHK.shape[-1] ** -0.5
    return scores_HNM.masked_fill(~seen_NM, -torch.inf).softmax(dim=-1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, starts_q: Tensor, starts_k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    weights_HNM = _weights(query, key, starts_q, starts_k, rest[2])
    out = torch.einsum("hnm,mhk->nhk", weights_HNM, value).contiguous()
    return out, query.new_zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    weights_HNM = _weights(query, key, starts_q, starts_k, rest[2])
    pull_HNM = torch.einsum("nhk,mhk->hnm", gradient, value)
    pull_HNM = weights_HNM * (pull_HNM - (weights_HNM * pull_HNM).sum(-1, keepdim=True)) * query.shape[-1] ** -0.5
    return (
        torch.einsum("hnm,mhk->nhk", pull_HNM, key).contiguous(),
        torch.einsum("hnm,nhk->mhk", pull_HNM, query).contiguous(),
        torch.einsum("hnm,nhk->mhk", weights_HNM, gradient).contiguous(),
    )


def use_varlen_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models project and attend as on a GPU of sm_80."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
    monkeypatch.setattr(choice, "has_varlen", lambda x, dropout_p: dropout_p == 0.0)
    monkeypatch.setattr(Kernels, "joins_products", lambda self, x: torch.is_grad_enabled())
