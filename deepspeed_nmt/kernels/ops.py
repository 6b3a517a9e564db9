"""The fused operations of the model: one public function each, its plain torch reference beside it.

Legend: N rows (sentence positions), D model width, V vocabulary, B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

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
    if x.device.type not in ("cpu", "meta"):
        return F.dropout(x, p, training=True)
    dropped = round(p * 65536)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64, device=x.device).random_(-(2**63), None)
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
    if q_BHTK.device.type == "meta":
        planned: Tensor = _PlannedAttention.apply(q_BHTK, k_BHSK, v_BHSK)  # type: ignore[no-untyped-call]
        return planned
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=causal, dropout_p=dropout_p
    )


class _PlannedAttention(torch.autograd.Function):
    """For counting on the meta device: keeps and multiplies what a fused attention kernel does on a GPU."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
        batch, heads, length, width = q_BHTK.shape
        # In the layout (B,T,H,K), as the kernels leave it, so that joining the heads copies nothing.
        out_BTHK = q_BHTK.new_empty(batch, length, heads, width)
        log_sums_BHT = q_BHTK.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BHSK, v_BHSK, out_BTHK, log_sums_BHT)
        _multiply(q_BHTK, k_BHSK, times=2)
        return out_BTHK.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_BHTK, k_BHSK, v_BHSK, _, _ = ctx.saved_tensors
        _multiply(q_BHTK, k_BHSK, times=4)
        return torch.empty_like(q_BHTK), torch.empty_like(k_BHSK), torch.empty_like(v_BHSK)


def _multiply(q_BHTK: Tensor, k_BHSK: Tensor, times: int) -> None:
    """The work of so many products like q k^T, without their memory: a kernel never holds all weights."""
    terms = times * q_BHTK.numel() * k_BHSK.shape[2]
    one = q_BHTK.detach().new_empty(())
    torch.mm(one.expand(1, terms), one.expand(terms, 1))


def touch(x: Tensor, touched: Tensor) -> Tensor:
    """``x`` itself, with ``touched`` in its history: whatever that came from gets a gradient of zero, not none.

    The value of ``touched`` is never used, so it cannot spoil ``x``. Shape: any, any -> that of x
    """
    result: Tensor = _Touch.apply(x, touched)  # type: ignore[no-untyped-call]
    return result


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, touched: Tensor) -> Tensor:
        ctx.like = (touched.shape, touched.dtype, touched.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)


class VocabularySlice(Protocol):
    """Which rows of the output matrix a rank holds, and how ranks that hold the others are asked.

    Attributes:
        start: number of the first token held.
        size: V, of the whole vocabulary.
    """

    start: int
    size: int

    def sum(self, x: Tensor) -> None:
        """Add ``x`` up over those ranks, in place."""

    def max(self, x: Tensor) -> None:
        """The greatest over those ranks, in place."""


def projected_cross_entropy(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float = 0.0,
    row_weights_N: Tensor | None = None,
    vocabulary: VocabularySlice | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Label-smoothed cross-entropy of p = softmax(states weight^T), summed over rows; all logits are never held.

    With e = ``smoothing``, a row's loss is (1 - e) (-log p_target) + e/V sum_v (-log p_v); the second result is each
    row's plain negative log-likelihood. Given two predictions p, q of the same targets, both results are their means,
    and ``divergence_weight`` times the third, 1/2 [KL(p || q) + KL(q || p)], is part of the loss; given one, it is 0.
    ``row_weights_N`` are factors on each row's part of the loss and of the divergence.

    With ``vocabulary``, ``weight_VD`` has only the rows of that slice. Ranks exchange a few numbers for each row, and
    the gradient of the states; no rank ever holds a row of all logits. Results are those of the whole, on every rank.

    Rows are taken in chunks; each chunk's gradient is formed while its logits are at hand, so the backward pass only
    scales. Only the first result carries a gradient.

    Shape: one or two (N,D), (V,D), (N,) -> scalar, (N,), scalar, fp32 or wider; rows whose target is ``ignore_index``
    count zero.
    """
    assert len(states) in (1, 2)
    arguments = (targets_N, smoothing, ignore_index, divergence_weight, row_weights_N, vocabulary)
    if not torch.is_grad_enabled():
        return _cross_entropy_chunks(states, weight_VD, *arguments, with_gradient=False, of_weight=False)[0]
    result: tuple[Tensor, Tensor, Tensor] = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        weight_VD, *arguments, *states
    )
    return result


def projected_cross_entropy_ref(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float = 0.0,
    row_weights_N: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`projected_cross_entropy` computes, with all logits at once and torch's own functions."""
    logits = [F.linear(x, weight_VD) for x in states]
    logits = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in logits]
    options = {"ignore_index": ignore_index, "reduction": "none"}
    loss_N, nll_N = (
        torch.stack([F.cross_entropy(x, targets_N, label_smoothing=e, **options) for x in logits]).mean(0)  # type: ignore[arg-type]
        for e in (smoothing, 0.0)
    )
    divergence_N = torch.zeros_like(nll_N)
    if len(logits) == 2:
        p, q = (torch.log_softmax(x, dim=1) for x in logits)
        there, back = (F.kl_div(b, a, log_target=True, reduction="none").sum(1) for a, b in ((p, q), (q, p)))
        divergence_N = torch.where(targets_N == ignore_index, 0.0, (there + back) / 2)
    if row_weights_N is not None:
        loss_N, divergence_N = loss_N * row_weights_N, divergence_N * row_weights_N
    return loss_N.sum() + divergence_weight * divergence_N.sum(), nll_N, divergence_N.sum()


_Sums = tuple[Tensor, Tensor, Tensor]


def _cross_entropy_chunks(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float,
    row_weights_N: Tensor | None,
    vocabulary: VocabularySlice | None,
    with_gradient: bool,
    of_weight: bool,
) -> tuple[_Sums, list[Tensor], Tensor | None]:
    """The three results and, if asked, d loss / d states (N,D) each; and d loss / d weight (V,D; fp32 or wider)."""
    rows, held = states[0].shape[0], weight_VD.shape[0]
    start_token, size = (0, held) if vocabulary is None else (vocabulary.start, vocabulary.size)
    accumulate = torch.promote_types(states[0].dtype, torch.float32)
    loss, divergence = (torch.zeros((), dtype=accumulate, device=weight_VD.device) for _ in range(2))
    nll_N = torch.zeros(rows, dtype=accumulate, device=weight_VD.device)
    d_states = [torch.empty_like(x) for x in states] if with_gradient else []
    d_weight = torch.zeros_like(weight_VD, dtype=accumulate) if of_weight else None
    share = 1.0 / len(states)
    step = max(1, _CHUNK_ELEMENTS // (held * len(states)))
    for start in range(0, rows, step):
        chunks, targets = [x[start : start + step] for x in states], targets_N[start : start + step]
        counted = targets != ignore_index
        # What each row's loss is multiplied with: nothing but its weight, unless it does not count.
        weights = counted.to(accumulate)
        if row_weights_N is not None:
            weights = weights * row_weights_N[start : start + step]
        local = targets - start_token
        here = counted & (local >= 0) & (local < held)
        index = torch.where(here, local, 0).unsqueeze(1)
        log_ps = []
        for x in chunks:
            log_p, chunk_nll, total = _log_softmax(F.linear(x, weight_VD).to(accumulate), index, here, vocabulary)
            log_ps.append(log_p)
            nll_N[start : start + step] += share * torch.where(counted, chunk_nll, 0.0)
            chunk_loss = (1.0 - smoothing) * chunk_nll
            if smoothing > 0.0:
                chunk_loss = chunk_loss - smoothing / size * total
            loss += share * torch.where(counted, chunk_loss * weights, 0.0).sum()
        pulls: list[Tensor] = []
        if len(states) == 2:
            divergence_N, pulls = _divergence(log_ps[0], log_ps[1], vocabulary, with_gradient)
            divergence += torch.where(counted, divergence_N * weights, 0.0).sum()
        for number, (x, log_p) in enumerate(zip(chunks, log_ps, strict=True)):
            if not with_gradient:
                continue
            # d loss / d logits = p - (1 - e) onehot - e/V, and zero for rows that do not count.
            d_logits = log_p.exp_()
            if smoothing > 0.0:
                d_logits -= smoothing / size
            d_logits.scatter_add_(1, index, here.to(accumulate).mul_(-(1.0 - smoothing)).unsqueeze(1))
            if share != 1.0:
                d_logits *= share
            if pulls:
                d_logits.add_(pulls[number], alpha=divergence_weight)
            d_logits *= weights.unsqueeze(1)
            d_logits = d_logits.to(x.dtype)
            torch.mm(d_logits, weight_VD, out=d_states[number][start : start + step])
            if d_weight is None:
                continue
            if d_weight.dtype == x.dtype:
                d_weight.addmm_(d_logits.t(), x)
            else:
                d_weight += d_logits.t() @ x
    if vocabulary is not None:
        for gradient in d_states:
            vocabulary.sum(gradient)
    return (loss + divergence_weight * divergence, nll_N, divergence), d_states, d_weight


def _log_softmax(
    logits_NV: Tensor, index_N1: Tensor, here_N: Tensor, vocabulary: VocabularySlice | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens held, -log p of the targets, and the sum of all log-probabilities of a row.

    Targets are given by their place among the tokens held, where they are ``here``. Shape: -> (N,V), (N,), (N,)
    """
    if vocabulary is None:
        log_p_NV = torch.log_softmax(logits_NV, dim=1)
        return log_p_NV, -log_p_NV.gather(1, index_N1).squeeze(1), log_p_NV.sum(dim=1)
    greatest_N = logits_NV.max(dim=1).values
    vocabulary.max(greatest_N)
    logits_NV -= greatest_N.unsqueeze(1)
    target_N = torch.where(here_N, logits_NV.gather(1, index_N1).squeeze(1), 0.0)
    sums_3N = torch.stack([logits_NV.exp().sum(dim=1), target_N, logits_NV.sum(dim=1)])
    vocabulary.sum(sums_3N)
    log_total_N = sums_3N[0].log()
    return logits_NV - log_total_N.unsqueeze(1), log_total_N - sums_3N[1], sums_3N[2] - vocabulary.size * log_total_N


def _divergence(
    log_p_NV: Tensor, log_q_NV: Tensor, vocabulary: VocabularySlice | None, with_gradient: bool
) -> tuple[Tensor, list[Tensor]]:
    """J = 1/2 [KL(p || q) + KL(q || p)] of each row and, if asked, dJ / d logits of p and of q.

    With r = log p - log q: dKL(p||q)/dz_p = p (r - KL(p||q)), and dKL(q||p)/dz_p = p - q. Shape: -> (N,), two (N,V)
    """
    p, q = log_p_NV.exp(), log_q_NV.exp()
    ratio = log_p_NV - log_q_NV
    both_2N1 = torch.stack([(p * ratio).sum(dim=1, keepdim=True), -(q * ratio).sum(dim=1, keepdim=True)])
    if vocabulary is not None:
        vocabulary.sum(both_2N1)
    forward_N1, backward_N1 = both_2N1
    divergence_N = 0.5 * (forward_N1 + backward_N1).squeeze(1)
    if not with_gradient:
        return divergence_N, []
    apart = p - q
    pull_p = (p.mul_(ratio - forward_N1) + apart).mul_(0.5)
    pull_q = (q.mul_(-ratio - backward_N1) - apart).mul_(0.5)
    return divergence_N, [pull_p, pull_q]


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_VD: Tensor,
        targets_N: Tensor,
        smoothing: float,
        ignore_index: int,
        divergence_weight: float,
        row_weights_N: Tensor | None,
        vocabulary: VocabularySlice | None,
        *states: Tensor,
    ) -> _Sums:
        arguments = (targets_N, smoothing, ignore_index, divergence_weight, row_weights_N, vocabulary)
        sums, d_states, d_weight = _cross_entropy_chunks(
            states, weight_VD, *arguments, with_gradient=True, of_weight=weight_VD.requires_grad
        )
        ctx.save_for_backward(d_weight, *d_states)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_weight, *d_states = ctx.saved_tensors
        scale = gradients[0]
        # The scale goes in before the weight's gradient is narrowed: with fp16's loss scale it belongs to the range.
        d_weight = None if d_weight is None else (d_weight * scale).to(ctx.weight_dtype)
        return d_weight, None, None, None, None, None, None, *(x * scale.to(x.dtype) for x in d_states)
