"""Normalisation, dropout and the residual connection around a sub-layer.

Legend: D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.nn.linear import Epilogue

NormStyle = Literal["pre", "post", "deepnorm"]


class Joining(NamedTuple):
    """What joins a residual branch: its weight ``alpha`` times it, plus dropout of output and bias."""

    output: Tensor
    bias: Tensor | None
    p: float
    training: bool
    alpha: float


class LayerNorm(nn.Module):
    """Layer normalisation with statistics in fp32. Shape: (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor, joining: Joining | None = None) -> Tensor:
        """Of ``x``, or of ``x`` as a residual branch joined by a sub-layer's output."""
        if joining is None:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        output, bias, p, training, alpha = joining
        return ops.bias_dropout_add_layer_norm(output, bias, x, self.weight, self.bias, p, training, alpha, self.eps)


class Dropout(nn.Module):
    """Dropout whose masks are cheap on a CPU. Shape: any -> the same."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return ops.dropout(x, self.p, self.training)


class Residual(nn.Module):
    """The connection around a sub-layer f.

    - pre:      x + dropout(f(norm(x)))
    - post:     norm(x + dropout(f(x)))
    - deepnorm: norm(alpha x + dropout(f(x)))   (Wang et al. 2022)

    Used in two halves, so that a sub-layer f can take further arguments: ``x = f(res.pre_norm(x), res.epilogue(x))``.
    f calls the epilogue inside its last matrix product, so that a fused kernel adds that product's bias.

    Args:
        dim: model width D.
        style: one of the three above.
        dropout_p: probability of dropping an element of the sub-layer's output.
        alpha: weight of the residual branch, for deepnorm.
        eps: of the LayerNorm.

    Attributes:
        watch: is shown every output of the sub-layer, before dropout; None: nobody looks.
    """

    def __init__(self, dim: int, style: NormStyle, dropout_p: float, alpha: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        assert style == "deepnorm" or alpha == 1.0
        self.norm = LayerNorm(dim, eps)
        self.dropout_p = dropout_p
        self.style = style
        self.alpha = alpha
        self.watch: Callable[[Tensor], None] | None = None

    def pre_norm(self, x: Tensor) -> Tensor:
        """What the sub-layer reads. Shape: (..., D) -> (..., D)."""
        normed: Tensor = self.norm(x) if self.style == "pre" else x
        return normed

    def epilogue(self, x: Tensor) -> Epilogue:
        """What joins a sub-layer's output with its input ``x``. Shape: (..., D) -> a function of (..., D)"""
        operation = "bias_dropout_add" if self.style == "pre" else "bias_dropout_add_layer_norm"
        return Epilogue(operation, lambda output, bias: self.add(x, output, bias))

    def add(self, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Join the sub-layer's output, plus a bias of it, with its input. Shape: (..., D), (..., D) -> (..., D)."""
        if self.watch is not None:
            self.watch(output if bias is None else output + bias)
        if self.style == "pre":
            return ops.bias_dropout_add(output, bias, x, self.dropout_p, self.training)
        normed: Tensor = self.norm(x, Joining(output, bias, self.dropout_p, self.training, self.alpha))
        return normed
