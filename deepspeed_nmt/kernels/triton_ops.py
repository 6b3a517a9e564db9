"""The operations as Triton kernels: tensors kept for the backward pass, and launches.

Shapes and arguments are those of `torch_ops.py`. On the meta device nothing is launched, but the same memory is
allocated, so that a plan counts what a GPU will hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.kernels import triton_kernels as kernels
from deepspeed_nmt.kernels.choice import interpreting
from deepspeed_nmt.kernels.torch_ops import ChunkResult, ChunkRows, mean_of, smoothed_loss

IDENTITY, RELU, GELU = (constant.value for constant in (kernels.IDENTITY, kernels.RELU, kernels.GELU))
_WIDEST = 16384
"""Most elements of a row that fit a program's registers."""
_OFFSETS = 2**31
"""Bound on the elements of a tensor."""
_PROGRAMS = 4 if interpreting() else 512
"""Programs that share the rows where each writes a partial sum; the interpreter pays for each program."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension."""
    return _Norm.apply(x, None, None, weight, bias, 0.0, 1.0, eps, False)[1]  # type: ignore[no-any-return,no-untyped-call]


def branch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x and its LayerNorm, whose gradients are added in one kernel."""
    return _Norm.apply(x, None, None, weight, bias, 0.0, 1.0, eps, True)  # type: ignore[no-any-return,no-untyped-call]


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, alpha: float = 1.0) -> Tensor:
    """Compute alpha residual + dropout(x + bias)."""
    return _Pointwise.apply(x, bias, residual, p, alpha, IDENTITY)  # type: ignore[no-any-return,no-untyped-call]


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
    """Compute alpha residual + dropout(x + bias), and its LayerNorm."""
    return _Norm.apply(x, bias, residual, weight, norm_bias, p, alpha, eps, True)  # type: ignore[no-any-return,no-untyped-call]


def bias_relu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """Compute dropout(max(0, x + bias))."""
    return _Pointwise.apply(x, bias, None, p, 1.0, RELU)  # type: ignore[no-any-return,no-untyped-call]


def bias_gelu_dropout(x: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """Compute dropout(gelu(x + bias))."""
    return _Pointwise.apply(x, bias, None, p, 1.0, GELU)  # type: ignore[no-any-return,no-untyped-call]


def softmax(scores_BHTS: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Turn scores into attention weights over the visible keys; zeros for a query that sees none."""
    return _Softmax.apply(scores_BHTS, mask, causal, scale)  # type: ignore[no-any-return,no-untyped-call]


def cross_entropy(logits: list[Tensor], rows: ChunkRows, with_gradient: bool) -> ChunkResult:
    """Compute the losses of a chunk of rows and, if requested, the gradients of the logits, in their place.

    What lies between the rows of logits is set to zero with them.

    Shape: one or two (N,V) -> (N,) each, gradients (N,V)
    """
    count, held = logits[0].shape
    stride = logits[0].stride(0)
    assert all(z.stride() == (stride, 1) for z in logits), "predictions must have rows of the same layout"
    assert count * stride < _OFFSETS
    block = min(4096, _power_of_2(stride))
    launch = {"BLOCK": block, "num_warps": _warps(block)}
    places = torch.where(rows.here_N, rows.index_N, -1).to(torch.int32)
    log_totals, nlls, losses = [], [], []
    for z in logits:
        sums_4N = torch.empty(4, count, dtype=torch.float32, device=z.device)
        _launch(kernels.row_sums, (count,), z, places, sums_4N, count, held, stride, **launch)
        greatest_N, power_N = sums_4N[0], sums_4N[1]
        if rows.vocabulary is not None:
            top_N = greatest_N.clone()
            rows.vocabulary.max(top_N)
            power_N *= (greatest_N - top_N).exp()
            rows.vocabulary.sum(sums_4N[1:])
            greatest_N = top_N
        log_total_N = power_N.log() + greatest_N
        log_totals.append(log_total_N)
        nlls.append(log_total_N - sums_4N[2])
        losses.append(smoothed_loss(nlls[-1], sums_4N[3] - rows.size * log_total_N, rows))
    learning = len(logits) if rows.taught is None else 1
    loss_N, nll_N = mean_of(losses[:learning]), mean_of(nlls[:learning])
    divergence_N = divergences_2N = None
    if len(logits) == 2:
        divergences_2N = torch.empty(2, count, dtype=torch.float32, device=logits[0].device)
        pair = (*logits, *log_totals, divergences_2N)
        _launch(kernels.row_divergences, (count,), *pair, count, held, stride, **launch)
        if rows.vocabulary is not None:
            rows.vocabulary.sum(divergences_2N)
        divergence_N = divergences_2N[1] if rows.taught == "kl" else divergences_2N.mean(0)
    if not with_gradient:
        return ChunkResult(loss_N, nll_N, divergence_N, [])
    # In place: the logits are not needed any more.
    first, last = logits[0], logits[-1]
    tensors = (first, last, log_totals[0], log_totals[-1], divergences_2N, places, rows.weights_N)
    numbers = (count, held, stride, 1.0 - rows.smoothing, rows.smoothing / rows.size, rows.divergence_weight)
    kind = {"PAIR": len(logits) == 2, "TAUGHT": rows.taught is not None, "ONE_WAY": rows.taught == "kl"}
    _launch(kernels.row_gradients, (count,), *tensors, *numbers, **kind, **launch)
    return ChunkResult(loss_N, nll_N, divergence_N, logits[:learning])


class _Pointwise(torch.autograd.Function):
    """alpha residual + dropout(f(x + bias)); a ReLU keeps only its output, as the next product does anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, alpha: float, activation: int
    ) -> Tensor:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        width, rows = _sizes(x)
        y = torch.empty_like(x, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))
        seed = _seed(p)
        block = min(512, _power_of_2(width))
        # Four elements per thread: with eight, four rows at once exceed its registers.
        flags = _flags(bias, residual, p, block, _warps(2 * block)) | {"ACTIVATION": activation}
        grid = (_quotient(rows, 4), _quotient(width, block))
        _launch(kernels.pointwise_forward, grid, x, bias, residual, y, rows, width, alpha, p, seed, **flags)
        kept = {IDENTITY: None, RELU: y, GELU: x}[activation]
        ctx.save_for_backward(kept, bias)
        ctx.numbers, ctx.flags = (alpha, p, seed), flags
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_y = gradients[0].contiguous()
        kept, bias = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        width, rows = _sizes(d_y)
        d_x = torch.empty_like(d_y, dtype=x_dtype)
        # An unscaled residual has the gradient of the sum, which is not copied.
        is_same = residual_dtype == d_y.dtype and ctx.numbers[0] == 1.0
        scaled = None if residual_dtype is None or is_same else torch.empty_like(d_y, dtype=residual_dtype)
        flags = {**ctx.flags, "HAS_RESIDUAL": scaled is not None}
        programs, groups = _division(_quotient(rows, 4))
        partial = None if bias is None else d_y.new_empty(1, programs, width, dtype=torch.float32)
        grid = (programs, _quotient(width, flags["BLOCK"]))
        tensors = (d_y, kept, bias, d_x, scaled, partial)
        _launch(kernels.pointwise_backward, grid, *tensors, rows, width, groups, *ctx.numbers, **flags)
        d_bias = None if partial is None else _summed(partial, [bias.dtype])[0]
        return d_x, d_bias, d_y if is_same else scaled, None, None, None


class _Norm(torch.autograd.Function):
    """A sum alpha residual + dropout(x + bias) and its LayerNorm; without a residual, the sum is x.

    If the sum is not used, as ``branches`` says, it is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        norm_bias: Tensor,
        p: float,
        alpha: float,
        eps: float,
        branches: bool,
    ) -> tuple[Tensor | None, Tensor]:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        assert weight.is_contiguous() and norm_bias.is_contiguous()
        width, rows = _sizes(x)
        total = x if residual is None else torch.empty_like(x, dtype=torch.promote_types(x.dtype, residual.dtype))
        normed = torch.empty_like(total)
        statistics_2N = torch.empty(2, rows, dtype=torch.float32, device=x.device)
        seed = _seed(p)
        block = _block(width)
        flags = _flags(bias, residual, p, block, _warps(block))
        programs, count = _division(rows) if interpreting() else (rows, 1)
        tensors = (x, bias, residual, weight, norm_bias, total, normed, *statistics_2N.unbind())
        _launch(kernels.norm_forward, (programs,), *tensors, rows, width, count, alpha, p, seed, eps, **flags)
        ctx.save_for_backward(total, weight, statistics_2N)
        ctx.set_materialize_grads(False)  # A sum that only the norm uses has no gradient of its own.
        ctx.numbers, ctx.flags = (alpha, p, seed), flags
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (x, residual, weight, norm_bias, bias)]
        if not branches:
            return None, normed
        return x.view_as(x) if residual is None else total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, statistics_2N = ctx.saved_tensors
        d_total, d_normed = (None if gradient is None else gradient.contiguous() for gradient in gradients)
        if d_normed is None:
            d_normed = torch.zeros_like(total)
        x_dtype, residual_dtype, weight_dtype, norm_bias_dtype, bias_dtype = ctx.dtypes
        parameter_dtypes = [dtype for dtype in (weight_dtype, norm_bias_dtype, bias_dtype) if dtype is not None]
        width, rows = _sizes(total)
        d_x = torch.empty_like(total, dtype=x_dtype)
        d_residual = None if residual_dtype is None else torch.empty_like(total, dtype=residual_dtype)
        programs, count = _division(rows)
        partial = total.new_empty(len(parameter_dtypes), programs, width, dtype=torch.float32)
        tensors = (d_normed, d_total, total, weight, *statistics_2N.unbind(), d_x, d_residual, *partial.unbind())
        if bias_dtype is None:
            tensors += (None,)
        # Four elements per thread: with eight, its registers do not suffice.
        flags = {**ctx.flags, "HAS_D_TOTAL": d_total is not None, "num_warps": _warps(2 * ctx.flags["BLOCK"])}
        _launch(kernels.norm_backward, (programs,), *tensors, rows, width, count, *ctx.numbers, **flags)
        d_weight, d_norm_bias, *d_bias = _summed(partial, parameter_dtypes)
        return d_x, d_bias[0] if d_bias else None, d_residual, d_weight, d_norm_bias, None, None, None, None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BHTS: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        scores_BHTS = scores_BHTS.contiguous()
        batch, heads, queries, keys = scores_BHTS.shape
        count = _sizes(scores_BHTS)[1]
        strides: tuple[int, ...] = (0, 0, 0)
        if mask is not None:
            if mask.shape[-1] != keys or mask.stride(-1) != 1:
                mask = mask.expand(*mask.shape[:-1], keys).contiguous()
            strides = mask.expand(batch, heads, queries, keys).stride()[:3]
        weights_BHTS = torch.empty_like(scores_BHTS)
        launch = _tile(count, keys)
        tensors, numbers = (scores_BHTS, mask, weights_BHTS), (count, keys, queries, heads, *strides, scale)
        flags = {"HAS_MASK": mask is not None, "CAUSAL": causal}
        _launch(kernels.softmax_forward, (_quotient(count, launch["ROWS"]),), *tensors, *numbers, **flags, **launch)
        ctx.save_for_backward(weights_BHTS)
        ctx.scale = scale
        return weights_BHTS

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weights_BHTS,) = ctx.saved_tensors
        keys, count = _sizes(weights_BHTS)
        d_scores_BHTS = torch.empty_like(weights_BHTS)
        launch = _tile(count, keys)
        tensors = (gradients[0].contiguous(), weights_BHTS, d_scores_BHTS)
        grid = (_quotient(count, launch["ROWS"]),)
        _launch(kernels.softmax_backward, grid, *tensors, count, keys, ctx.scale, **launch)
        return d_scores_BHTS, None, None, None


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on tensors that are contiguous, as the caller knows: checking each takes half a launch."""
    if min(grid) > 0 and not arguments[0].is_meta:
        kernel[grid](*arguments, **options)


def _flags(bias: Tensor | None, residual: Tensor | None, p: float, block: int, warps: int) -> dict[str, int]:
    assert bias is None or bias.is_contiguous()
    present = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "DROPOUT": p > 0.0}
    return {**present, "BLOCK": block, "num_warps": warps}


def _sizes(x: Tensor) -> tuple[int, int]:
    """Return the width and the number of rows of the widest tensor of a launch."""
    width, numbers = x.shape[-1], x.numel()
    assert numbers < _OFFSETS, "offsets have 32 bits: use smaller micro-batches"
    return width, numbers // max(1, width)


def _quotient(number: int, divisor: int) -> int:
    """Divide, rounding up. Triton's own functions, which kernels call too, take the host five microseconds a call."""
    return -(-number // divisor)


def _power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def _division(rows: int) -> tuple[int, int]:
    """Return the number of programs, and the rows (or groups of rows) of each."""
    share = max(1, _quotient(rows, _PROGRAMS))
    return _quotient(rows, share), share


def _summed(partial: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Add up the partial sums that programs wrote of each parameter's gradient, in its dtype."""
    parameters, programs, width = partial.shape
    common = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
    sums = torch.empty(parameters, width, dtype=common, device=partial.device)
    block = min(32, _power_of_2(width))
    grid = (_quotient(width, block), parameters)
    _launch(kernels.column_sums, grid, partial, sums, programs, width, ROWS=64, BLOCK=block)
    return [total.to(dtype) for total, dtype in zip(sums.unbind(), dtypes, strict=True)]


def _block(width: int) -> int:
    """Return the elements that a program holds of a row: at least the four that it draws at a time."""
    assert width <= _WIDEST, f"rows of up to {_WIDEST} elements fit a program, but these have {width}"
    return _power_of_2(max(4, width))


def _warps(block: int) -> int:
    """Return the warps that leave about eight elements for each thread."""
    return min(16, max(1, block // 256))


def _tile(rows: int, keys: int) -> dict[str, int]:
    """Return the launch options of a row-wise kernel: short rows share a program, more of them in the interpreter."""
    block = _block(keys)
    size = 65536 if interpreting() else 2048
    together = min(max(1, size // block), _power_of_2(max(1, rows)))
    return {"ROWS": together, "BLOCK": block, "num_warps": _warps(together * block)}


def _seed(p: float) -> int:
    """Draw a seed from the CPU's generator: the device is not waited for, and recomputation draws the same again."""
    return int(torch.randint(2**31 - 1, ())) if p > 0.0 else 0
