"""Position-wise feed-forward network.

Legend: D model width, F inner width.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.nn.fused import UsesKernels
from deepspeed_nmt.nn.linear import Epilogue, Linear

Activation = Literal["relu", "gelu", "swish"]


class FeedForward(nn.Module, UsesKernels):
    """max(0, x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), or with GELU or swish.

    Args:
        dim: model width D.
        ffn_dim: inner width F.
        activation: the non-linearity.
        dropout_p: probability of dropping an inner unit's output.
    """

    def __init__(self, dim: int, ffn_dim: int, activation: Activation = "relu", dropout_p: float = 0.0) -> None:
        super().__init__()
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)
        self.activation = activation
        self.dropout_p = dropout_p

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Apply the network, then the epilogue. Shape: (..., D) -> (..., D), or that of the epilogue's result."""
        out: Tensor = self.down_proj(self.inner(x), then)
        return out

    def inner(self, x: Tensor) -> Tensor:
        """Compute the outputs of the inner units. Shape: (..., D) -> (..., F)."""
        if self.activation == "swish":  # has no fused kernel: only imported models have it
            return ops.dropout(F.silu(self.up_proj(x)), self.dropout_p, self.training)
        active: Tensor = self.up_proj(x, Epilogue(f"bias_{self.activation}_dropout", self._activate, self.activation))
        return active

    def _activate(self, product: Tensor, bias: Tensor | None) -> Tensor:
        kernels = self.kernels
        carry_out = kernels.bias_relu_dropout if self.activation == "relu" else kernels.bias_gelu_dropout
        return carry_out(product, bias, self.dropout_p, self.training)
