"""Operations that torch carries out on every device, so that there is nothing to choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.kernels import torch_ops


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by 1 / (1 - p). Shape: any -> the same."""
    return torch_ops.dropout(x, p) if training else x


def touch(x: Tensor, touched: Tensor) -> Tensor:
    """Return ``x`` with ``touched`` in its history, so that the origins of ``touched`` get zero gradients, not none.

    The value of ``touched`` is never used, so an infinity or a NaN in it does not reach ``x``.

    Shape: any, any -> that of x
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
