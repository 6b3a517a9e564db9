"""Position-wise feed-forward network.

Legend: D model width, F inner width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.nn.linear import Epilogue, Linear

Activation = Literal["relu", "gelu"]


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), or with GELU.

    Args:
        dim: model width D.
        ffn_dim: inner width F.
        activation: the non-linearity.
        dropout_p: dropout after the activation.
    """

    def __init__(self, dim: int, ffn_dim: int, activation: Activation = "relu", dropout_p: float = 0.0) -> None:
        super().__init__()
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)
        self.operation = f"bias_{activation}_dropout"
        self.activation = ops.bias_relu_dropout if activation == "relu" else ops.bias_gelu_dropout
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Shape: (..., D) -> (..., D), or what ``then`` makes of that."""
        out: Tensor = self.down_proj(self.inner(x), then)
        return out

    def inner(self, x: Tensor) -> Tensor:
        """The inner units' outputs. Shape: (..., D) -> (..., F)"""
        then = Epilogue(self.operation, lambda h, bias: self.activation(h, bias, self.dropout_p, self.training))
        active: Tensor = self.up_proj(x, then)
        return active
