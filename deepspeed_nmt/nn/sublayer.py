"""Normalisation, dropout and the residual connection around a sub-layer.

Legend: D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.nn.fused import UsesKernels
from deepspeed_nmt.nn.linear import Epilogue

NormStyle = Literal["pre", "post", "deepnorm"]


class Joining(NamedTuple):
    """A sub-layer's output to be added to the residual branch x: alpha x + dropout(output + bias).

    Attributes:
        output: (..., D).
        bias: (D,), or None.
        p: probability of dropping an element.
        training: False turns dropout off.
        alpha: weight of the residual branch.
    """

    output: Tensor
    bias: Tensor | None
    p: float
    training: bool
    alpha: float


class LayerNorm(nn.Module, UsesKernels):
    """Layer normalisation (Ba et al. 2016) with statistics in fp32."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor, joining: Joining | None = None) -> Tensor:
        """Normalise ``x``, or the sum of the residual branch ``x`` and ``joining``. Shape: (..., D) -> (..., D)."""
        if joining is None:
            return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        output, bias, p, training, alpha = joining
        return self.kernels.bias_dropout_add_layer_norm(
            output, bias, x, self.weight, self.bias, p, training, alpha, self.eps
        )


class Dropout(nn.Module):
    """Dropout whose masks are cheap on a CPU."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training. Shape: any -> the same."""
        return ops.dropout(x, self.p, self.training)


class Residual(nn.Module, UsesKernels):
    """The residual connection around a sub-layer f.

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
        watch: called with every output of the sub-layer, before dropout; None: not called.
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
        """Return the input of the sub-layer: normalised in pre-norm, else ``x``. Shape: (..., D) -> (..., D)."""
        normed: Tensor = self.norm(x) if self.style == "pre" else x
        return normed

    def epilogue(self, x: Tensor) -> Epilogue:
        """Return the epilogue that adds a sub-layer's output to its input ``x``. Shape of both: (..., D)."""
        operation = "bias_dropout_add" if self.style == "pre" else "bias_dropout_add_layer_norm"
        return Epilogue(operation, lambda output, bias: self.add(x, output, bias))

    def add(self, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add the sub-layer's output, plus its bias, to its input. Shape: (..., D), (..., D), (D,) -> (..., D)."""
        if self.watch is not None:
            self.watch(output if bias is None else output + bias)
        if self.style == "pre":
            return self.kernels.bias_dropout_add(output, bias, x, self.dropout_p, self.training)
        normed: Tensor = self.norm(x, Joining(output, bias, self.dropout_p, self.training, self.alpha))
        return normed
