"""Position-wise feed-forward network.

Legend: D model width, F inner width.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.nn.sublayer import Dropout

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
        self.up_proj = nn.Linear(dim, ffn_dim)
        self.down_proj = nn.Linear(ffn_dim, dim)
        self.activation = F.relu if activation == "relu" else F.gelu
        self.dropout = Dropout(dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (..., D) -> (..., D)"""
        out: Tensor = self.down_proj(self.dropout(self.activation(self.up_proj(x))))
        return out
