"""Projection to the vocabulary, softmax and cross-entropy in one operation that never holds all logits.

Legend: N rows (sentence positions), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.kernels.choice import DEFAULT, Kernels
from deepspeed_nmt.kernels.torch_ops import ChunkResult, ChunkRows, Taught, VocabularySlice

_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 2**30}
"""Bytes of logits in fp32 held at once: what fits a CPU's last-level cache; a bound on a GPU's memory."""
_GPU_ROWS = 4096
"""Most rows of a chunk on a GPU: a product of so many rows takes longer than the launches of a chunk's kernels."""
_GPU_MULTIPLE = 64
"""Number that divides the width of logits on a GPU: fast matrix products need rows, and inner dimensions, of whole
pieces of 16 bytes, and the row kernels load such pieces."""


def padded_width(logits: int, x: Tensor, kernels: Kernels) -> int:
    """Return the width of the matrix in which this many logits are computed on the device of ``x``."""
    return logits if kernels.device_type(x) == "cpu" else -(-logits // _GPU_MULTIPLE) * _GPU_MULTIPLE


def chunk_rows(logits: int, x: Tensor, kernels: Kernels) -> int:
    """Return the rows of a chunk, each of this many logits in all predictions together, on the device of ``x``."""
    on_cpu = kernels.device_type(x) == "cpu"
    size = _CHUNK_BYTES["cpu" if on_cpu else "cuda"]
    rows = max(1, size // (logits * torch.promote_types(x.dtype, torch.float32).itemsize))
    return rows if on_cpu else min(rows, _GPU_ROWS)


def projected_cross_entropy(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float = 0.0,
    row_weights_N: Tensor | None = None,
    vocabulary: VocabularySlice | None = None,
    bias: Tensor | None = None,
    kernels: Kernels = DEFAULT,
    taught: Taught | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the label-smoothed cross-entropy of p = softmax(states weight^T + bias) without holding all logits.

    With e = ``smoothing``, the loss of a row is (1 - e) (-log p_target) + e/V sum_v (-log p_v). Of two predictions
    p, q of the same targets it is the mean, and the divergence 1/2 [KL(p || q) + KL(q || p)], summed over rows and
    times ``divergence_weight``, is added to the sum. Rows whose target is ``ignore_index`` do not count. If p is
    ``taught`` by q, the loss is that of p alone, the divergence is as ``taught`` says, and q is a constant.

    Rows are taken in chunks. The gradient of a chunk is computed while its logits are held, so the backward pass only
    scales it. On a GPU the output matrix gets rows of zeros up to :func:`padded_width` for that time; their logits
    are left out of everything but the matrix products.

    Args:
        states: one or two predictions' states.
        weight_VD: the output matrix.
        row_weights_N: factors on each row's loss and divergence.
        vocabulary: the slice of the vocabulary whose rows ``weight_VD`` and ``bias`` are. Ranks then exchange a few
            numbers for each row, and the gradient of the states; results are those of the whole vocabulary.
        taught: divergence of the first prediction from the second, if that only teaches it.

    Returns:
        The loss summed over rows, each row's negative log-likelihood (the mean of those that learn), and the
        divergence summed over rows, 0 for one prediction; in fp32 or wider. Only the loss carries a gradient.

    Shape: one or two (N,D), (V,D), (N,), bias (V,) -> scalar, (N,), scalar
    """
    assert len(states) in (1, 2)
    options = (targets_N, smoothing, ignore_index, divergence_weight, row_weights_N, vocabulary, kernels, taught)
    if not torch.is_grad_enabled():
        return _in_chunks(states, weight_VD, bias, False, *options)[0]
    return _ProjectedCrossEntropy.apply(weight_VD, bias, options, *states)  # type: ignore[no-any-return,no-untyped-call]


_Sums = tuple[Tensor, Tensor, Tensor]


def _in_chunks(
    states: Sequence[Tensor],
    weight_VD: Tensor,
    bias_V: Tensor | None,
    with_gradient: bool,
    targets_N: Tensor,
    smoothing: float,
    ignore_index: int,
    divergence_weight: float,
    row_weights_N: Tensor | None,
    vocabulary: VocabularySlice | None,
    kernels: Kernels,
    taught: Taught | None,
) -> tuple[_Sums, list[Tensor | None], Tensor]:
    """Compute the three results and, if requested, the gradients of the first by the matrix, the bias and the states.

    Those of matrix and bias are in fp32 or wider, and None if they are not needed. All gradients lack a factor, which
    comes last.
    """
    of_weight, of_bias = (with_gradient and x is not None and x.requires_grad for x in (weight_VD, bias_V))
    rows, held = states[0].shape[0], weight_VD.shape[0]
    start_token, size = (0, held) if vocabulary is None else (vocabulary.start, vocabulary.size)
    accumulate = torch.promote_types(states[0].dtype, torch.float32)
    loss, divergence = (torch.zeros((), dtype=accumulate, device=weight_VD.device) for _ in range(2))
    nll_N = torch.zeros(rows, dtype=accumulate, device=weight_VD.device)
    d_states = [torch.empty_like(x) for x in (states if taught is None else states[:1])] if with_gradient else []
    top = loss.new_ones(())
    if row_weights_N is not None and rows and states[0].dtype == torch.float16:
        # A gradient of a logit is rounded before the loss scale brings it into fp16's range: with a small weight of
        # its row, much of it would be lost.
        top = row_weights_N.abs().amax().clamp(min=torch.finfo(torch.float32).tiny).to(accumulate)
        row_weights_N = row_weights_N / top
    padding = padded_width(held, weight_VD, kernels) - held
    matrix_VD = F.pad(weight_VD, (0, 0, 0, padding)) if padding else weight_VD
    shift_V = F.pad(bias_V, (0, padding)) if padding and bias_V is not None else bias_V
    d_matrix = torch.zeros_like(matrix_VD, dtype=accumulate) if of_weight else None
    d_bias = torch.zeros(held, dtype=accumulate, device=weight_VD.device) if of_bias else None
    # Ranks whose slices differ in size take the same chunks, since they exchange numbers in each.
    widest = held if vocabulary is None else vocabulary.largest
    step = chunk_rows(widest * len(states), states[0], kernels)
    for start in range(0, rows, step):
        chunks, targets = [x[start : start + step] for x in states], targets_N[start : start + step]
        counted = targets != ignore_index
        # The factor on each row's loss: its weight, or 0 if it does not count.
        weights = counted.to(accumulate)
        if row_weights_N is not None:
            weights = weights * row_weights_N[start : start + step]
        local = targets - start_token
        here = counted & (local >= 0) & (local < held)
        index = torch.where(here, local, 0)
        part = ChunkRows(index, here, weights, smoothing, size, divergence_weight, vocabulary, taught)
        padded = [kernels.linear(x, matrix_VD, shift_V) for x in chunks]
        logits = [z[:, :held] for z in padded] if padding else padded
        result: ChunkResult = kernels.implementation("cross_entropy", logits[0])(logits, part, with_gradient)
        nll_N[start : start + step] = torch.where(counted, result.nll_N, 0.0)
        loss += torch.where(counted, result.loss_N * weights, 0.0).sum()
        if result.divergence_N is not None:
            divergence += torch.where(counted, result.divergence_N * weights, 0.0).sum()
        for number, (x, d_logits) in enumerate(zip(chunks, result.gradients)):  # noqa: B905  # fewer without gradients
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=accumulate)
            if padding:  # the kernels that write in place set the padding to zero
                d_logits = padded[number] if d_logits is logits[number] else F.pad(d_logits, (0, padding))
            d_states[number][start : start + step] = kernels.linear(d_logits, matrix_VD.t())
            if d_matrix is not None and d_matrix.dtype == x.dtype:
                d_matrix.addmm_(d_logits.t(), x)
            elif d_matrix is not None:
                d_matrix += d_logits.t() @ x
    if vocabulary is not None:
        for gradient in d_states:
            vocabulary.sum(gradient)
    d_weight = None if d_matrix is None else d_matrix[:held]
    loss, divergence = loss * top, divergence * top
    return (loss + divergence_weight * divergence, nll_N, divergence), [d_weight, d_bias, *d_states], top


class _ProjectedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, bias_V: Tensor | None, options: Any, *states: Tensor) -> _Sums:
        sums, gradients, factor = _in_chunks(states, weight_VD, bias_V, True, *options)
        ctx.save_for_backward(factor, *gradients)
        ctx.dtype = weight_VD.dtype
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor, d_weight, d_bias, *d_states = ctx.saved_tensors
        # Scaled in fp32 and then rounded, because fp16's loss scale brings them into its range.
        scale = (gradients[0] * factor).reshape(1)  # a scalar would be rounded to the dtype of what it scales
        d_output = [None if x is None else (x * scale).to(ctx.dtype) for x in (d_weight, d_bias)]
        constant = [None] * (len(ctx.needs_input_grad) - 3 - len(d_states))
        return *d_output, None, *((x * scale).to(x.dtype) for x in d_states), *constant
