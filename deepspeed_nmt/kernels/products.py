"""Matrix products on a CPU, by oneDNN where it is faster than the BLAS that torch was built with.

torch multiplies fp32 matrices by its BLAS, which is MKL in the usual builds. On some CPUs, those of AMD among them,
oneDNN takes half the time for the same products. A short timed trial decides, once for each process. All products are
then of one library, however small, so that rounding does not depend on how an update is divided into micro-batches.
Products in bf16 are oneDNN's on every CPU for which it has them.

Legend: N rows, D input width, E output width.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.errors import ConfigError, shown

ENVIRONMENT = "DEEPSPEED_NMT_CPU_PRODUCTS"
"""Environment variable that names the library, blas or onednn; auto: the one that a trial finds faster."""

Library = Literal["blas", "onednn"]

_FASTER = 1.25
"""oneDNN must be so many times as fast in the trial: two trials on one machine then choose alike."""
_LEAST_STEP, _STEPS_BITS = 32, 4
"""Numbers of rows are multiples of 32, and have four significant bits: one of eight from 512 to 1,024."""
_TRIAL_SHAPE, _TRIAL_ROUNDS = (512, 256, 256), 10


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute x W^T + b. Shape: (..., D), (E,D), (E,) -> (..., E)."""
    if not _by_onednn(x, weight_ED):
        return F.linear(x, weight_ED, bias_E)
    if torch.is_grad_enabled() and (x.requires_grad or weight_ED.requires_grad):
        found: Tensor = _Linear.apply(x, weight_ED, bias_E)  # type: ignore[no-untyped-call]
        return found
    return _product(x, weight_ED, bias_E)


def product(x_ND: Tensor, weight_DE: Tensor) -> Tensor:
    """Compute x W, without a gradient. Shape: (N,D), (D,E) -> (N,E)."""
    return _product(x_ND, weight_DE.t()) if _by_onednn(x_ND, weight_DE.t()) else x_ND @ weight_DE


@cache
def library() -> Library:
    """Return the library for products in fp32 on this CPU.

    Raises:
        ConfigError: if the environment variable names another one.
    """
    named = os.environ.get(ENVIRONMENT, "auto")
    if named not in ("auto", "blas", "onednn"):
        raise ConfigError(f"{ENVIRONMENT} must be auto, blas or onednn, but is {shown(named)}; unset it")
    if named != "auto":
        return "onednn" if named == "onednn" else "blas"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "blas"
    with torch.inference_mode():
        rows, width, inner = _TRIAL_SHAPE
        x, weight = torch.ones(rows, inner), torch.ones(width, inner)
        blas, onednn = _seconds([lambda: F.linear(x, weight), lambda: _product(x, weight)])
    return "onednn" if onednn * _FASTER < blas else "blas"


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype
        and not torch.compiler.is_compiling()
        and (library() == "onednn" if x.dtype == torch.float32 else x.dtype == torch.bfloat16 and _has_bf16())
    )


@cache
def _has_bf16() -> bool:
    """Return True if oneDNN multiplies bf16 on this CPU."""
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def _in_few_sizes(x: Tensor) -> Tensor:
    """Return x as rows; in bf16 with rows of zeros up to one of few numbers of rows.

    oneDNN makes machine code for each size of a product, and micro-batches have hundreds of sizes. In bf16 the
    products themselves take no longer than that.

    Shape: (..., D) -> (N,D)
    """
    rows = x.numel() // x.shape[-1]
    step = max(_LEAST_STEP, 1 << max(0, rows.bit_length() - _STEPS_BITS))
    size = -(-rows // step) * step if x.dtype == torch.bfloat16 else rows
    if size == rows:
        return x.reshape(rows, x.shape[-1])
    x_ND = x.new_zeros(size, x.shape[-1])
    x_ND[:rows] = x.reshape(rows, x.shape[-1])
    return x_ND


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute x W^T + b by oneDNN. Shape: (..., D), (E,D), (E,) -> (..., E)."""
    # The operation by which torch's compiler calls oneDNN. It rearranges a weight that is not packed.
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ED, bias_E, "none", [], "")
    return found


def _seconds(products: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least processor time of each of some products, in seconds.

    They take turns, and time in which other processes had the processor does not count: a process that starts again
    on a busy machine must choose alike, or it would round otherwise.
    """
    found: list[list[float]] = [[] for _ in products]
    for number in range(_TRIAL_ROUNDS + 1):
        for multiply, seconds in zip(products, found, strict=True):
            started = time.process_time()
            multiply()
            if number:  # the first one prepares the library
                seconds.append(time.process_time() - started)
    return [min(seconds) for seconds in found]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        x_ND = _in_few_sizes(x)
        ctx.save_for_backward(x_ND, weight_ED)
        ctx.shape = x.shape
        return _product(x_ND, weight_ED, bias_E)[: x.shape[:-1].numel()].view(*x.shape[:-1], len(weight_ED))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_ED = ctx.saved_tensors
        (d_out,) = gradients
        d_out_NE, rows = _in_few_sizes(d_out), ctx.shape[:-1].numel()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(d_out_NE, weight_ED)[:rows].view(ctx.shape) if of_x else None,
            product(d_out_NE.t(), x_ND) if of_weight else None,
            d_out_NE.sum(0) if of_bias else None,
        )
