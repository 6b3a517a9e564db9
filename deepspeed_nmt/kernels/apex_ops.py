"""The operations for which NVIDIA apex has compiled kernels; used only where its extensions are installed.

Shapes and arguments are those of `torch_ops.py`. apex's fused
cross-entropy is not used: it supports neither a slice of the vocabulary nor a second prediction.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.kernels import torch_ops

_LONGEST = 2048
"""Keys that the softmax of every version of apex supports."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise over the last dimension."""
    fused = importlib.import_module("apex.normalization.fused_layer_norm").fused_layer_norm_affine
    normed: Tensor = fused(x, weight, bias, tuple(weight.shape), eps)
    return normed


def softmax(scores_BHTS: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Turn scores into attention weights; shapes that apex does not support fall back to torch."""
    batch, heads, queries, keys = scores_BHTS.shape
    # Rows come in blocks of 128 threads that must be full: of queries, or for causal softmax of sentences and heads.
    in_blocks, width = batch * heads if causal else queries, 1 << (keys - 1).bit_length()
    rows_per_block = 128 // min(width, 32) * (2 if width <= 128 else 1)
    fits = in_blocks % rows_per_block == 0 and (queries == keys if causal else queries > 1)
    if scores_BHTS.dtype == torch.float32 or keys > _LONGEST or not fits:
        return torch_ops.softmax(scores_BHTS, mask, causal, scale)
    if causal:
        flat = scores_BHTS.reshape(batch * heads, queries, keys)
        extension = "scaled_upper_triang_masked_softmax_cuda"
        return _Softmax.apply(extension, flat, scale).view_as(scores_BHTS)  # type: ignore[no-any-return,no-untyped-call]
    if mask is None:
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=scores_BHTS.device)
    if mask.shape[1] != 1:  # apex takes one mask for all heads
        return torch_ops.softmax(scores_BHTS, mask, causal, scale)
    hidden = (~mask.expand(batch, 1, queries, keys)).to(torch.uint8)
    weights: Tensor = _Softmax.apply("scaled_masked_softmax_cuda", scores_BHTS, scale, hidden)  # type: ignore[no-untyped-call]
    # The weights of a query that sees nothing differ between versions of apex.
    return weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)


class _Softmax(torch.autograd.Function):
    """The softmax of one of apex's extensions, which take scores, a mask or nothing, and the scale."""

    @staticmethod
    def forward(ctx: Any, extension: str, scores: Tensor, scale: float, *mask: Tensor) -> Tensor:
        ctx.extension, ctx.scale = importlib.import_module(extension), scale
        weights: Tensor = ctx.extension.forward(scores.contiguous(), *mask, scale)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        # apex overwrites the gradient that it is given.
        gradient = ctx.extension.backward(gradients[0].contiguous().clone(), weights, ctx.scale)
        return None, gradient, None, *(None for _ in ctx.needs_input_grad[3:])
