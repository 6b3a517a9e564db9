"""The operations in plain torch: the reference for all other backends, and the backend of a CPU.

Statistics and sums are in fp32 or wider for every dtype. Outside training ``p``, the probability of dropping an
element, is 0. A bias or a mask may be None.

Legend: D model width, E output width, B batch, H heads, T queries, S keys, N rows of a chunk, V tokens of the
vocabulary that are held.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Taught = Literal["kl", "symmetric"]
"""Divergence of a prediction p from the q that teaches it: KL(q || p), or 1/2 [KL(p || q) + KL(q || p)]."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's ``mallopt``."""


@cache
def keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, up to half a GiB, if its C library is glibc.

    On a CPU an update, or a search, frees its tensors and takes as much again, and the system would fill their pages
    with zeros each time.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that there may be
        mallopt(_TRIM_THRESHOLD, 512 << 20)


class VocabularySlice(Protocol):
    """The rows of the output matrix that a rank holds, and communication with the ranks that hold the others.

    ``start`` is the index of the first token held; ``size`` and ``largest`` are the tokens of the whole vocabulary
    and of the largest slice.
    """

    start: int
    size: int
    largest: int

    def sum(self, x: Tensor) -> None:
        """Sum ``x`` over those ranks, in place."""

    def max(self, x: Tensor) -> None:
        """Take the maximum of ``x`` over those ranks, in place."""


class ChunkRows(NamedTuple):
    """Targets and options of a chunk of rows.

    Attributes:
        index_N: index of each row's target among the tokens held; any valid index where ``here_N`` is False.
        here_N: bool, True where the target is among the tokens held.
        weights_N: factor on each row's gradient, 0 for rows that do not count.
        smoothing: e of the label smoothing.
        size: tokens of the whole vocabulary.
        divergence_weight: factor on the divergence in the gradient, for two predictions.
        vocabulary: the slice that is held, or None for all of it.
        taught: divergence of the first of two predictions from the second, which is a constant without a loss of its
            own; None if both are alike.
    """

    index_N: Tensor
    here_N: Tensor
    weights_N: Tensor
    smoothing: float
    size: int
    divergence_weight: float
    vocabulary: VocabularySlice | None
    taught: Taught | None = None


class ChunkResult(NamedTuple):
    """Label-smoothed losses, negative log-likelihoods (means over predictions) and divergences, all without weights.

    ``gradients`` are those of the weighted sum of losses and divergences with respect to each prediction's logits
    (N,V), in their dtype and possibly their memory; empty unless requested. What teaches counts for no prediction.
    """

    loss_N: Tensor
    nll_N: Tensor
    divergence_N: Tensor | None
    gradients: list[Tensor]


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute x W^T + b. Shape: (..., D), (E,D), (E,) -> (..., E)."""
    return F.linear(x, weight_ED, bias_E)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension (Ba et al. 2016). Shape: (..., D), (D,), (D,) -> (..., D)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def branch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x and its LayerNorm; a fused kernel adds the gradients of both."""
    return x, layer_norm(x, weight, bias, eps)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, alpha: float = 1.0) -> Tensor:
    """Compute alpha residual + dropout(x + bias), in the wider dtype of ``x`` and ``residual``.

    Shape: (..., D), (D,), (..., D) -> (..., D)
    """
    x = _plus(x, bias)
    if p > 0.0 and alpha == 1.0 and not _has_fast_dropout(x) and x.dtype == residual.dtype:
        return torch.addcmul(residual, x, _mask(x, p))
    x = dropout(x, p)
    return residual + x if alpha == 1.0 else torch.add(x, residual, alpha=alpha)


def bias_dropout_add_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    p: float,
    alpha: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Compute alpha residual + dropout(x + bias), and its LayerNorm.

    Shape: (..., D), (D,), (..., D), (D,), (D,) -> (..., D), (..., D)
    """
    total = bias_dropout_add(x, bias, residual, p, alpha)
    return total, layer_norm(total, weight, norm_bias, eps)


def bias_relu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """Compute dropout(max(0, x + bias)). Shape: (..., D), (D,) -> (..., D)."""
    x = _plus(x, bias)
    if p > 0.0:
        return _ReluDropout.apply(x, p)  # type: ignore[no-any-return,no-untyped-call]
    return F.relu(x)


def bias_gelu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """Compute dropout(gelu(x + bias)), with the exact GELU (Hendrycks and Gimpel 2016)."""
    return dropout(F.gelu(_plus(x, bias)), p)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def softmax(scores_BHTS: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Turn scores, times ``scale``, into attention weights over the visible keys; zeros for a query without any.

    ``mask`` is bool, broadcastable to (B,H,T,S), True where a query sees a key. If ``causal``, which excludes it, a
    query sees the keys up to its own position; if S > T, the queries are at the last positions.
    """
    if causal:
        queries, keys = scores_BHTS.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores_BHTS.device).tril(keys - queries)
    if mask is None:
        return torch.softmax(scores_BHTS * scale, dim=-1)
    # Not -inf, which would make the weights of a query that sees nothing NaN; they are set to zero below. Not the
    # lowest number either, which could become -inf when a score is added.
    lowest = torch.finfo(scores_BHTS.dtype).min / 2
    hidden = torch.zeros(mask.shape, dtype=scores_BHTS.dtype, device=mask.device).masked_fill_(~mask, lowest)
    weights_BHTS = torch.softmax(torch.add(hidden, scores_BHTS, alpha=scale), dim=-1)
    sees = mask.any(dim=-1, keepdim=True)
    if sees.device.type == "cpu" and not torch.compiler.is_compiling() and bool(sees.all()):
        return weights_BHTS
    return weights_BHTS * sees.to(weights_BHTS.dtype)


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p)."""
    if p == 0.0:
        return x
    if _has_fast_dropout(x):
        return F.dropout(x, p, training=True)
    return x * _mask(x, p)


def _has_fast_dropout(x: Tensor) -> bool:
    """Return True if torch's dropout is fast on the device of ``x``; where it is planned for, ours counts memory."""
    return x.device.type not in ("cpu", "meta") or torch.compiler.is_compiling()


def _dropped(p: float) -> int:
    """Return how many of 65,536 elements are dropped; rounding must not drop all, whose scale would be infinite."""
    return min(round(p * 65536), 65535)


def _mask(x: Tensor, p: float) -> Tensor:
    """Draw a dropout mask: 0 for a dropped element of ``x``, 1 / (1 - p) for a kept one.

    On a CPU, one random number for each element takes a seventh of a training step. Here one hashed counter
    (SplitMix64, Steele et al. 2014) decides four elements, at a resolution of 2^-16 in ``p``, which the scale uses.
    """
    dropped = _dropped(p)
    bits = torch.arange((x.numel() + 3) // 4, device=x.device)
    bits.mul_(-7046029254386353131).add_(int(torch.randint(-(2**63), 2**63 - 1, ())))
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        bits ^= (bits >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            bits *= factor
    mask = torch.empty_like(x, requires_grad=False)
    torch.ge(bits.view(torch.int16)[: x.numel()].view(x.shape), dropped - 32768, out=mask)
    return mask.mul_(65536.0 / (65536 - dropped))


class _ReluDropout(torch.autograd.Function):
    """ReLU and dropout. Only the result is kept for the backward pass: where it is 0, no gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        if _has_fast_dropout(x):
            y, ctx.scale = F.dropout(torch.relu(x), p, training=True), 1.0 / (1.0 - p)
        else:
            y, ctx.scale = torch.relu(x).mul_(_mask(x, p)), 65536.0 / (65536 - _dropped(p))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradients[0], y, 0).mul_(ctx.scale), None


def cross_entropy(logits: list[Tensor], rows: ChunkRows, with_gradient: bool) -> ChunkResult:
    """Compute the losses of a chunk of rows and, if requested, the gradients of the logits.

    Shape: one or two (N,V) -> (N,) each, gradients (N,V)
    """
    accumulate = torch.promote_types(logits[0].dtype, torch.float32)
    learning = len(logits) if rows.taught is None else 1
    share = 1.0 / learning
    log_ps, losses, nlls = [], [], []
    for z in logits:
        log_p, nll_N, total_N = _log_softmax(z.to(accumulate), rows)
        log_ps.append(log_p)
        nlls.append(nll_N)
        losses.append(smoothed_loss(nll_N, total_N, rows))
    divergence_N: Tensor | None = None
    pulls: list[Tensor] = []
    if len(logits) == 2:
        divergence_N, pulls = _divergence(log_ps[0], log_ps[1], rows, with_gradient)
    gradients = []
    for number, (z, log_p) in enumerate(zip(logits[:learning], log_ps, strict=False) if with_gradient else ()):
        # d loss / d logits = p - (1 - e) onehot - e/V, and zero for rows that do not count.
        gradient = log_p.exp_()
        if rows.smoothing > 0.0:
            gradient -= rows.smoothing / rows.size
        on_target = rows.here_N.to(accumulate).mul_(-(1.0 - rows.smoothing))
        gradient.scatter_add_(1, rows.index_N.unsqueeze(1), on_target.unsqueeze(1))
        if share != 1.0:
            gradient *= share
        if pulls:
            gradient.add_(pulls[number], alpha=rows.divergence_weight)
        gradient *= rows.weights_N.unsqueeze(1)
        gradients.append(gradient.to(z.dtype))
    return ChunkResult(mean_of(losses[:learning]), mean_of(nlls[:learning]), divergence_N, gradients)


def smoothed_loss(nll_N: Tensor, total_N: Tensor, rows: ChunkRows) -> Tensor:
    """Compute (1 - e) (-log p_target) + e/V sum_v (-log p_v), where ``total_N`` is sum_v log p_v."""
    loss_N = (1.0 - rows.smoothing) * nll_N
    return loss_N - rows.smoothing / rows.size * total_N if rows.smoothing > 0.0 else loss_N


def mean_of(rows_N: list[Tensor]) -> Tensor:
    """Return the mean of the values of one or two predictions."""
    return torch.stack(rows_N).mean(0) if len(rows_N) > 1 else rows_N[0]


def _log_softmax(logits_NV: Tensor, rows: ChunkRows) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the log-probabilities of the tokens held, -log p of the targets, and each row's sum over all tokens.

    Shape: (N,V) -> (N,V), (N,), (N,)
    """
    index_N1 = rows.index_N.unsqueeze(1)
    if rows.vocabulary is None:
        log_p_NV = torch.log_softmax(logits_NV, dim=1)
        return log_p_NV, -log_p_NV.gather(1, index_N1).squeeze(1), log_p_NV.sum(dim=1)
    greatest_N = logits_NV.max(dim=1).values
    rows.vocabulary.max(greatest_N)
    logits_NV -= greatest_N.unsqueeze(1)
    target_N = torch.where(rows.here_N, logits_NV.gather(1, index_N1).squeeze(1), 0.0)
    sums_3N = torch.stack([logits_NV.exp().sum(dim=1), target_N, logits_NV.sum(dim=1)])
    rows.vocabulary.sum(sums_3N)
    log_total_N = sums_3N[0].log()
    return logits_NV - log_total_N.unsqueeze(1), log_total_N - sums_3N[1], sums_3N[2] - rows.size * log_total_N


def _divergence(
    log_p_NV: Tensor, log_q_NV: Tensor, rows: ChunkRows, with_gradient: bool
) -> tuple[Tensor, list[Tensor]]:
    """Compute J = 1/2 [KL(p || q) + KL(q || p)] of each row and, if requested, dJ / d logits of p and of q.

    For ``rows.taught="kl"`` J is KL(q || p), and only its gradient by p is computed.
    With r = log p - log q: dKL(p||q)/dz_p = p (r - KL(p||q)), and dKL(q||p)/dz_p = p - q. Shape: -> (N,), two (N,V)
    """
    p, q = log_p_NV.exp(), log_q_NV.exp()
    ratio = log_p_NV - log_q_NV
    both_2N1 = torch.stack([(p * ratio).sum(dim=1, keepdim=True), -(q * ratio).sum(dim=1, keepdim=True)])
    if rows.vocabulary is not None:
        rows.vocabulary.sum(both_2N1)
    forward_N1, backward_N1 = both_2N1
    if rows.taught == "kl":
        return backward_N1.squeeze(1), [p - q] if with_gradient else []
    divergence_N = 0.5 * (forward_N1 + backward_N1).squeeze(1)
    if not with_gradient:
        return divergence_N, []
    apart = p - q
    pull_p = (p.mul_(ratio - forward_N1) + apart).mul_(0.5)
    pull_q = (q.mul_(-ratio - backward_N1) - apart).mul_(0.5)
    return divergence_N, [pull_p, pull_q]


def touch(x: Tensor, touched: Tensor) -> Tensor:
    """Return ``x`` with ``touched`` in its history, so that the origins of ``touched`` get zero gradients, not none.

    The value of ``touched`` is never used, so an infinity or a NaN in it does not reach ``x``.
    """
    return _Touch.apply(x, touched)  # type: ignore[no-any-return,no-untyped-call]


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, touched: Tensor) -> Tensor:
        ctx.like = (touched.shape, touched.dtype, touched.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradients[0], torch.zeros(shape, dtype=dtype, device=device)
