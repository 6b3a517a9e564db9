"""The fused operations of the model, one public function each.

Each is carried out by the backend that :mod:`deepspeed_nmt.kernels.dispatch` chooses; `torch_ops.py` beside this file
has the plain torch references. Statistics and sums are in fp32 or wider whatever the dtype.

Legend: D model width, B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.dispatch import backend, implementation


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer normalisation over the last dimension (Ba et al. 2016). Shape: (..., D) -> (..., D)."""
    normed: Tensor = implementation("layer_norm", x)(x, weight, bias, eps)
    return normed


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p). Shape: any -> the same."""
    return torch_ops.dropout(x, p) if training else x


def takes_bias(operation: str, x: Tensor) -> bool:
    """Whether what follows a matrix product of ``x`` adds a bias at no cost, so that it had better be left to it."""
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    return backend(operation, x, torch.get_autocast_dtype(kind) if autocast else None) != "torch"


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, alpha: float = 1.0
) -> Tensor:
    """alpha residual + dropout(x + bias). Shape: (..., D), (D,), (..., D) -> (..., D), in the wider dtype of x and
    residual.
    """
    joined: Tensor = implementation("bias_dropout_add", x)(x, bias, residual, p if training else 0.0, alpha)
    return joined


def bias_dropout_add_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    p: float,
    training: bool,
    alpha: float,
    eps: float,
) -> Tensor:
    """layer_norm(alpha residual + dropout(x + bias)). Shape: (..., D), (D,), (..., D), (D,), (D,) -> (..., D)."""
    carry_out = implementation("bias_dropout_add_layer_norm", x)
    normed: Tensor = carry_out(x, bias, residual, weight, norm_bias, p if training else 0.0, alpha, eps)
    return normed


def bias_relu_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
    """dropout(max(0, x + bias)). Shape: (..., D), (D,) -> (..., D)."""
    active: Tensor = implementation("bias_relu_dropout", x)(x, bias, p if training else 0.0)
    return active


def bias_gelu_dropout(x: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
    """dropout(gelu(x + bias)), with the exact GELU (Hendrycks and Gimpel 2016). Shape: (..., D), (D,) -> (..., D)."""
    active: Tensor = implementation("bias_gelu_dropout", x)(x, bias, p if training else 0.0)
    return active


def scaled_masked_softmax(scores_BHTS: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale scores) over the keys that may be seen; zeros for a query that may see none.

    Args:
        mask: bool, broadcastable to (B, H, T, S), True where a query may look; None: everywhere.

    Shape: (B,H,T,S) -> (B,H,T,S)
    """
    weights: Tensor = implementation("softmax", scores_BHTS)(scores_BHTS, mask, False, scale)
    return weights


def scaled_causal_softmax(scores_BHTS: Tensor, scale: float) -> Tensor:
    """The same where a query sees keys up to its own position; of more keys than queries, the last belong to the
    queries. Shape: (B,H,T,S) -> (B,H,T,S)
    """
    weights: Tensor = implementation("softmax", scores_BHTS)(scores_BHTS, None, True, scale)
    return weights


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
