"""The fused operations of the model: one public function each, its plain torch reference beside it.

Legend: N rows (sentence positions), D model width, V vocabulary, B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Logits held at once by the chunked projection: 16 MiB in fp32, small enough for a CPU's last-level cache."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer normalisation over the last dimension, statistics in fp32. Shape: (..., D) -> (..., D)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p). Shape: any -> the same.

    On a CPU, drawing one random number per element is a seventh of a training step. Here one 64-bit draw decides
    four elements, at a resolution of 2^-16 in ``p``; the scale uses the probability that is really applied.
    """
    if not training or p == 0.0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p, training=True)
    dropped = round(p * 65536)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - 32768
    return _MaskedScale.apply(x, kept, 65536.0 / (65536 - dropped))  # type: ignore[no-any-return,no-untyped-call]


class _MaskedScale(torch.autograd.Function):
    """x * mask * scale, remembering one byte an element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.scale = scale
        return (x * scale).mul_(kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return (gradients[0] * ctx.scale).mul_(kept), None, None


def attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v. Shape: (B,H,T,K), (B,H,S,K), (B,H,S,K) -> (B,H,T,K).

    Args:
        mask: bool, broadcastable to (B, H, T, S), True where a query may look; each query needs one such key.
        causal: query t sees keys 0..t only (T = S). Excludes ``mask``.
        dropout_p: probability of dropping an attention weight; pass 0 when not training.
    """
    assert not (causal and mask is not None), "padding is on the right, so causal attention needs no mask"
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=causal, dropout_p=dropout_p
    )


def projected_cross_entropy(
    states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Label-smoothed cross-entropy of softmax(states weight^T), summed over rows, without ever holding all logits.

    With e = ``smoothing``, a row's loss is (1 - e) (-log p_target) + e/V sum_v (-log p_v); the second result is the
    plain negative log-likelihood. Rows are taken in chunks; each chunk's gradient is formed while its logits are at
    hand, so the backward pass only scales. Only the first result carries a gradient.

    Shape: (N,D), (V,D), (N,) -> scalar, scalar, both fp32; rows whose target is ``ignore_index`` count zero.
    """
    if not torch.is_grad_enabled():
        loss, nll, _, _ = _cross_entropy_chunks(states_ND, weight_VD, targets_N, smoothing, ignore_index, False)
        return loss, nll
    result: tuple[Tensor, Tensor] = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states_ND, weight_VD, targets_N, smoothing, ignore_index
    )
    return result


def projected_cross_entropy_ref(
    states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """What :func:`projected_cross_entropy` computes, with all logits at once and torch's own functions."""
    logits_NV = F.linear(states_ND, weight_VD).float()
    loss = F.cross_entropy(
        logits_NV, targets_N, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )
    nll = F.cross_entropy(logits_NV, targets_N, ignore_index=ignore_index, reduction="sum")
    return loss, nll


def _cross_entropy_chunks(
    states_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums of loss and nll and, if asked, d loss / d states (N,D) and d loss / d weight (V,D; fp32 or wider)."""
    rows, vocabulary = states_ND.shape[0], weight_VD.shape[0]
    accumulate = torch.promote_types(states_ND.dtype, torch.float32)
    loss = torch.zeros((), dtype=accumulate, device=states_ND.device)
    nll = torch.zeros_like(loss)
    d_states = torch.empty_like(states_ND) if with_gradient else None
    d_weight = torch.zeros_like(weight_VD, dtype=accumulate) if with_gradient else None
    step = max(1, _CHUNK_ELEMENTS // vocabulary)
    for start in range(0, rows, step):
        states, targets = states_ND[start : start + step], targets_N[start : start + step]
        counted = targets != ignore_index
        index = torch.where(counted, targets, 0).unsqueeze(1)
        logits = F.linear(states, weight_VD).to(accumulate)
        log_p = torch.log_softmax(logits, dim=1)
        chunk_nll = -log_p.gather(1, index).squeeze(1)
        nll += torch.where(counted, chunk_nll, 0.0).sum()
        chunk_loss = (1.0 - smoothing) * chunk_nll
        if smoothing > 0.0:
            chunk_loss = chunk_loss - smoothing / vocabulary * log_p.sum(dim=1)
        loss += torch.where(counted, chunk_loss, 0.0).sum()
        if d_states is None or d_weight is None:
            continue
        # d loss / d logits = p - (1 - e) onehot - e/V, and zero for rows that do not count.
        d_logits = log_p.exp_()
        if smoothing > 0.0:
            d_logits -= smoothing / vocabulary
        d_logits.scatter_add_(1, index, torch.full_like(index, -(1.0 - smoothing), dtype=accumulate))
        d_logits *= counted.unsqueeze(1)
        d_logits = d_logits.to(states.dtype)
        torch.mm(d_logits, weight_VD, out=d_states[start : start + step])
        if d_weight.dtype == states.dtype:
            d_weight.addmm_(d_logits.t(), states)
        else:
            d_weight += d_logits.t() @ states
    return loss, nll, d_states, d_weight


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, smoothing: float, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        loss, nll, d_states, d_weight = _cross_entropy_chunks(
            states_ND, weight_VD, targets_N, smoothing, ignore_index, True
        )
        ctx.save_for_backward(d_states, d_weight)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_states, d_weight = ctx.saved_tensors
        scale = gradients[0]
        # The scale goes in before the weight's gradient is narrowed: with fp16's loss scale it belongs to the range.
        return d_states * scale.to(d_states.dtype), (d_weight * scale).to(ctx.weight_dtype), None, None, None
