"""Comparison of a backend with torch on a few numbers, before it is used on a device for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.kernels.rows import ChunkRows

Function = Callable[..., Any]
Arguments = tuple[Any, ...]

ROWS, WIDTH = 10, 72
"""Not multiples of the kernels' block sizes."""


def compare(operation: str, ours: Function, theirs: Function, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference in results and gradients, in units of max(1, |expected|), without dropout.

    ``theirs`` computes in fp64. An infinity or a NaN differs by infinity.
    """
    worst = 0.0
    for arguments in cases(operation, device, dtype):
        found = _outcome(operation, ours, arguments, dtype)
        expected = _outcome(operation, theirs, arguments, torch.float64)
        for one, other in zip(found, expected, strict=True):
            error = ((one.double() - other).abs() / other.abs().clamp(min=1.0)).max()
            worst = max(worst, float(error) if bool(torch.isfinite(error)) else float("inf"))
    return worst


def cases(operation: str, device: torch.device, dtype: torch.dtype) -> Iterator[Arguments]:
    """Yield arguments of an operation, without dropout; tensors in ``dtype``."""
    generator = torch.Generator().manual_seed(1)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if operation == "layer_norm":
        yield of(ROWS, WIDTH), of(WIDTH), of(WIDTH), 1e-5
    elif operation == "bias_dropout_add":
        yield of(ROWS, WIDTH), of(WIDTH), of(ROWS, WIDTH), 0.0, 1.7
    elif operation == "bias_dropout_add_layer_norm":
        yield of(ROWS, WIDTH), of(WIDTH), of(ROWS, WIDTH), of(WIDTH), of(WIDTH), 0.0, 1.7, 1e-5
    elif operation in ("bias_relu_dropout", "bias_gelu_dropout"):
        yield of(ROWS, WIDTH), of(WIDTH), 0.0
    elif operation == "softmax":
        mask = torch.rand(4, 1, 1, WIDTH, generator=generator).to(device) < 0.8
        mask[1] = False  # a sentence that is all padding
        yield of(4, 4, 16, WIDTH), mask, False, 0.3
        yield of(4, 4, 16, 16), None, True, 0.3
    else:
        assert operation == "cross_entropy", operation
        index = torch.randint(0, WIDTH, (ROWS,), generator=generator).to(device)
        here = (torch.arange(ROWS) != 3).to(device)
        rows = ChunkRows(index, here, here.float() * 1.3, 0.1, WIDTH, 0.7, None)
        yield [of(ROWS, WIDTH)], rows
        yield [of(ROWS, WIDTH), of(ROWS, WIDTH)], rows


def _outcome(operation: str, function: Function, arguments: Arguments, dtype: torch.dtype) -> list[Tensor]:
    """Compute the results, and the gradients of every tensor argument that has one."""
    if operation == "cross_entropy":
        logits, rows = arguments
        result = function([z.to(dtype, copy=True) for z in logits], rows, True)
        sums = [result.loss_N * rows.weights_N, result.nll_N * rows.here_N, *result.gradients]
        return sums if result.divergence_N is None else [*sums, result.divergence_N]
    inputs = [x.to(dtype, copy=True) if _has_gradient(x) else x for x in arguments]
    leaves = [x.requires_grad_() for x in inputs if _has_gradient(x)]
    result = function(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    upstream = [torch.linspace(-1.0, 1.0, x.numel(), device=x.device).view_as(x).to(x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, upstream)]


def _has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
