"""Matrix products on a CPU by oneDNN.

torch multiplies fp32 matrices by the BLAS that it was built with, usually MKL, which is slower on CPUs of AMD
(:func:`deepspeed_nmt.kernels.choice.preferred_on_cpu`). All products of a run are of one library, however small, so
that rounding does not depend on how an update is divided into micro-batches.

A decoder multiplies rows by the same weights, one position after another. torch's BLAS rearranges the weights in
every call, which takes longer than the product of a few. oneDNN takes weights that are rearranged ("packed") already,
in fp32 or bf16; of few rows, and in int8, :mod:`deepspeed_nmt.native` is faster.

Legend: N rows, D input width, E output width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_STEP, _STEPS_BITS = 32, 4
"""Numbers of rows are multiples of 32, and have four significant bits: one of eight from 512 to 1,024."""


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute x W^T + b; torch does if ``x`` has another dtype than W."""
    if x.dtype != weight_ED.dtype:
        return F.linear(x, weight_ED, bias_E)
    if torch.is_grad_enabled() and (x.requires_grad or weight_ED.requires_grad):
        return _Linear.apply(x, weight_ED, bias_E)  # type: ignore[no-any-return,no-untyped-call]
    return _product(x, weight_ED, bias_E)


def _in_few_sizes(x: Tensor) -> Tensor:
    """Return x as rows (N,D); in bf16 with rows of zeros up to one of few numbers of rows.

    oneDNN makes machine code for each size of a product, which in bf16 takes longer than the products themselves.
    """
    rows = x.numel() // x.shape[-1]
    step = max(_LEAST_STEP, 1 << max(0, rows.bit_length() - _STEPS_BITS))
    size = -(-rows // step) * step if x.dtype == torch.bfloat16 else rows
    if size == rows:
        return x.reshape(rows, x.shape[-1])
    x_ND = x.new_zeros(size, x.shape[-1])
    x_ND[:rows] = x.reshape(rows, x.shape[-1])
    return x_ND


def _product(x: Tensor, weight_ED: Any, bias_E: Tensor | None = None) -> Tensor:
    # The operation by which torch's compiler calls oneDNN. It rearranges a weight that is not packed.
    return torch.ops.mkldnn._linear_pointwise(x, weight_ED, bias_E, "none", [], "")  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        x_ND = _in_few_sizes(x)
        ctx.save_for_backward(x_ND, weight_ED)
        ctx.shape = x.shape
        if x_ND.numel() == x.numel():  # no view, which nobody could change in place
            return _product(x, weight_ED, bias_E)
        return _product(x_ND, weight_ED, bias_E)[: x.shape[:-1].numel()].view(*x.shape[:-1], len(weight_ED))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED = ctx.saved_tensors
        (d_out,) = gradients
        d_out_NE, rows = _in_few_sizes(d_out), ctx.shape[:-1].numel()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _product(d_out_NE, weight_ED.t())[:rows].view(ctx.shape) if of_x else None,
            _product(d_out_NE.t(), x_ND.t()) if of_weight else None,
            d_out_NE.sum(0) if of_bias else None,
        )


def obstacle(precision: str) -> str | None:
    """Return the reason for which weights cannot be packed in this precision here, or None."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU does not multiply bf16 in hardware"
    return None


class PackedWeight:
    """A weight, in fp32 or bf16, and a bias or None, rearranged for fast products."""

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        self._bias = None if bias_E is None else bias_E.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b. Shape: (..., D) -> (..., E)."""
        return _product(x, self._weight, self._bias)
