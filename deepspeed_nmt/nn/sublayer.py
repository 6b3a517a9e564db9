"""Normalisation, dropout and the residual connection around a sub-layer.

Legend: D model width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops

NormStyle = Literal["pre", "post", "deepnorm"]


class LayerNorm(nn.Module):
    """Layer normalisation with statistics in fp32. Shape: (..., D) -> (..., D)."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


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

    Used in two halves, so that a sub-layer can take what arguments it needs: ``x = res.close(x, f(res.open(x)))``.

    Args:
        dim: model width D.
        style: one of the three above.
        dropout_p: probability of dropping an element of the sub-layer's output.
        alpha: weight of the residual branch, for deepnorm.
    """

    def __init__(self, dim: int, style: NormStyle, dropout_p: float, alpha: float = 1.0) -> None:
        super().__init__()
        assert style == "deepnorm" or alpha == 1.0
        self.norm = LayerNorm(dim)
        self.dropout = Dropout(dropout_p)
        self.style = style
        self.alpha = alpha

    def open(self, x: Tensor) -> Tensor:
        """What the sub-layer reads. Shape: (..., D) -> (..., D)."""
        normed: Tensor = self.norm(x) if self.style == "pre" else x
        return normed

    def close(self, x: Tensor, output: Tensor) -> Tensor:
        """Join the sub-layer's output with its input. Shape: (..., D), (..., D) -> (..., D)."""
        output = self.dropout(output)
        if self.style == "pre":
            return x + output
        residual = x if self.alpha == 1.0 else self.alpha * x
        normed: Tensor = self.norm(residual + output)
        return normed
