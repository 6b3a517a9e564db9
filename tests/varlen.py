"""Kernels for CPUs behind torch's attention of variable lengths, so that a CPU takes, and traces, the path of a GPU.

torch's own operators, their derivatives and rules for tracing are used; only the kernels are replaced.

Legend: H heads, N queries, M keys, K head width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.kernels import choice, segments
from deepspeed_nmt.kernels.choice import Kernels


def _weights(
    q_NHK: Tensor, k_MHK: Tensor, starts_q: Tensor, starts_k: Tensor, longest: tuple[int, int], causal: bool
) -> Tensor:
    """Compute attention weights between the bounds. Shape: (N,H,K), (M,H,K) -> (H,N,M)."""
    for starts, x, most in ((starts_q, q_NHK, longest[0]), (starts_k, k_MHK, longest[1])):
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[-1] == x.shape[0]
        assert int(starts.diff().max()) <= most and x.stride(-1) == 1
    queries, keys = (torch.arange(x.shape[0], device=x.device, dtype=torch.int32) for x in (q_NHK, k_MHK))
    sentence_N, sentence_M = (
        torch.searchsorted(starts[1:], each, right=True) for starts, each in ((starts_q, queries), (starts_k, keys))
    )
    seen_NM = sentence_N.unsqueeze(1) == sentence_M
    if causal:
        seen_NM &= queries.unsqueeze(1) >= keys
    scores_HNM = torch.einsum("nhk,mhk->hnm", q_NHK, k_MHK) * q_NHK.shape[-1] ** -0.5
    return scores_HNM.masked_fill(~seen_NM, -torch.inf).softmax(dim=-1)


def _kept(weights_HNM: Tensor, dropout_p: float, seed: Tensor) -> Tensor:
    """Draw the factors of dropout, 0 or 1 / (1 - p)."""
    generator = torch.Generator().manual_seed(int(seed.flatten()[0]))
    return (torch.rand(weights_HNM.shape, generator=generator) >= dropout_p).to(weights_HNM) / (1.0 - dropout_p)


def _forward(q: Tensor, k: Tensor, v: Tensor, *bounds_and_flags: Any) -> tuple[Tensor, Tensor]:
    *bounds, longest_q, longest_k, dropout_p, causal = bounds_and_flags
    seed = torch.randint(2**31, (2,))
    weights_HNM = _weights(q, k, *bounds, (longest_q, longest_k), bool(causal))
    return torch.einsum("hnm,mhk->nhk", weights_HNM * _kept(weights_HNM, dropout_p, seed), v).contiguous(), seed


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, seed: Tensor, *bounds_and_flags: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *bounds, longest_q, longest_k, dropout_p, causal = bounds_and_flags
    weights_HNM = _weights(q, k, *bounds, (longest_q, longest_k), bool(causal))
    kept_HNM = _kept(weights_HNM, dropout_p, seed)
    pull_HNM = torch.einsum("nhk,mhk->hnm", gradient, v) * kept_HNM
    pull_HNM = weights_HNM * (pull_HNM - (weights_HNM * pull_HNM).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return (
        torch.einsum("hnm,mhk->nhk", pull_HNM, k).contiguous(),
        torch.einsum("hnm,nhk->mhk", pull_HNM, q).contiguous(),
        torch.einsum("hnm,nhk->mhk", weights_HNM * kept_HNM, gradient).contiguous(),
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *flags: Any, **_: Any
) -> tuple[Tensor, ...]:
    out, seed = _forward(q, k, v, starts_q, starts_k, *flags[:4])
    return out, q.new_zeros(q.shape[1], q.shape[0]), seed.to(torch.uint64), torch.zeros(()), torch.zeros(())


def _flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, ...]:
    return _backward(gradient, q, k, v, rest[6].to(torch.int64), *rest[:6])


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: None, starts_q: Tensor, starts_k: Tensor, *flags: Any, **_: Any
) -> tuple[Any, ...]:
    assert bias is None and q.shape[0] == 1 and min(flags[:2]) > 0
    assert (starts_k.diff() > 0).all(), "the kernel is not known to support a tail without keys"
    out, seed = _forward(q[0], k[0], v[0], starts_q, starts_k, *flags[:4])
    kept = flags[4:] == (True,)  # an argument that has its default is left out
    sums = q.new_zeros(len(starts_q) - 1, q.shape[2], -(-flags[0] // 32) * 32 if kept else 0)
    return out.unsqueeze(0), sums, seed[0].clone(), torch.zeros((), dtype=torch.int64), *flags[:2]


def _efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, ...]:
    starts_q, starts_k, longest_q, longest_k, sums, dropout_p, seed, _, causal, _ = rest
    assert sums.numel(), "the sums are kept wherever there is a backward pass"
    assert longest_q <= q.shape[1] and longest_k <= k.shape[1], "the kernel refuses larger bounds"
    bounds_and_flags = (starts_q, starts_k, longest_q, longest_k, dropout_p, causal)
    of_q, of_k, of_v = _backward(gradient[0], q[0], k[0], v[0], seed, *bounds_and_flags)
    return of_q.unsqueeze(0), of_k.unsqueeze(0), of_v.unsqueeze(0), torch.zeros(())


_LIBRARY = torch.library.Library("aten", "IMPL")  # registered for the life of the process
for _name, _kernel in {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient_forward,
    "_efficient_attention_backward": _efficient_backward,
}.items():
    _LIBRARY.impl(_name, _kernel, "CPU")


def use_varlen_on_a_cpu(monkeypatch: pytest.MonkeyPatch, flash: bool = True) -> None:
    """Have models project and attend as on a GPU: of sm_80, or an older one."""
    monkeypatch.setattr(segments, "is_flash", lambda device: flash)
    monkeypatch.setattr(choice, "has_varlen", lambda x: True)
    monkeypatch.setattr(Kernels, "joins_products", lambda self, x: torch.is_grad_enabled())
