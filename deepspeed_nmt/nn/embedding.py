"""Token and position embeddings, and the projection back to the vocabulary.

Legend: B sentences, T length, D model width, V vocabulary, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.nn.feedforward import Activation
from deepspeed_nmt.nn.linear import Linear
from deepspeed_nmt.nn.sublayer import Dropout, LayerNorm

S = TypeVar("S")
T = TypeVar("T")


def sinusoids(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Positions 0..length-1 as sines and cosines of wavelengths from 2 pi to 20000 pi. Shape: -> (length, dim), fp32.

    The first half of the columns are sines and the second half cosines (a permutation of Vaswani et al. 2017, 3.5).
    """
    half = dim // 2
    rates = torch.exp(
        torch.arange(half, device=device, dtype=torch.float32) * (-math.log(10000.0) / max(half - 1, 1))
    )
    angles = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(1) * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim % 2))


class TokenEmbedding(nn.Module):
    """Embedding of tokens times sqrt(D), plus sinusoidal positions, then dropout.

    Args:
        weight_VD: the embedding matrix, possibly shared with others.
        dropout_p: probability of dropping an element.

    Attributes:
        positions: the most that a sentence may have; None: any number.
    """

    positions: int | None = None

    def __init__(self, weight_VD: nn.Parameter, dropout_p: float) -> None:
        super().__init__()
        self.weight = weight_VD
        self.dropout = Dropout(dropout_p)
        self.scale = math.sqrt(weight_VD.shape[1])
        # Grown on demand; never saved, since it can be computed.
        self._positions_TD = torch.empty(0, weight_VD.shape[1])

    def forward(self, tokens_BT: Tensor, offset: int = 0) -> Tensor:
        """Embed tokens standing at positions ``offset``... Shape: (B,T) -> (B,T,D)"""
        end = offset + tokens_BT.shape[1]
        positions_TD = self._positions(end)[offset:end]
        embedded: Tensor = self.dropout(self.lookup(tokens_BT) * self.scale + positions_TD)
        return embedded

    def lookup(self, tokens_BT: Tensor) -> Tensor:
        """The embedding matrix's rows. Shape: (B,T) -> (B,T,D)"""
        return F.embedding(tokens_BT, self.weight)

    def _positions(self, length: int) -> Tensor:
        have = self._positions_TD
        if have.shape[0] < length or have.device != self.weight.device or have.dtype != self.weight.dtype:
            size = max(256, 1 << (length - 1).bit_length())
            have = sinusoids(size, self.weight.shape[1], self.weight.device).to(self.weight.dtype)
            self._positions_TD = have
        return have


class LearnedEmbedding(nn.Module):
    """Embedding of tokens plus learned positions plus a constant (BERT's token type 0), normalised, then dropout
    (Devlin et al. 2019).

    Args:
        weight_VD: the embedding matrix, possibly shared with others.
        positions: the most that a sentence may have.
        dropout_p: probability of dropping an element.
        eps: of the LayerNorm.
    """

    def __init__(self, weight_VD: nn.Parameter, positions: int, dropout_p: float, eps: float) -> None:
        super().__init__()
        dim = weight_VD.shape[1]
        self.weight = weight_VD
        self.positions = positions
        self.position_PD = nn.Parameter(torch.empty(positions, dim).normal_(0.0, 0.02))
        self.type_D = nn.Parameter(torch.zeros(dim))
        self.norm = LayerNorm(dim, eps)
        self.dropout = Dropout(dropout_p)

    def forward(self, tokens_BT: Tensor, offset: int = 0) -> Tensor:
        """Embed tokens standing at positions ``offset``... Shape: (B,T) -> (B,T,D)"""
        positions_TD = self.position_PD[offset : offset + tokens_BT.shape[1]]
        embedded: Tensor = self.dropout(self.norm(self.lookup(tokens_BT) + positions_TD + self.type_D))
        return embedded

    def lookup(self, tokens_BT: Tensor) -> Tensor:
        """The embedding matrix's rows. Shape: (B,T) -> (B,T,D)"""
        return F.embedding(tokens_BT, self.weight)


class PredictionTransform(nn.Module):
    """LayerNorm(GELU(x W + b)): what BERT does to a state before it reads a prediction from it (Devlin et al. 2019).

    Args:
        dim: model width D.
        activation: the non-linearity.
        eps: of the LayerNorm.
    """

    def __init__(self, dim: int, activation: Activation, eps: float) -> None:
        super().__init__()
        self.dense = Linear(dim, dim)
        self.norm = LayerNorm(dim, eps)
        self.activation = F.relu if activation == "relu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (..., D) -> (..., D)"""
        normed: Tensor = self.norm(self.activation(self.dense(x)))
        return normed


class Projection(nn.Module):
    """Reads decoder states with the output matrix, which is often the embedding matrix too.

    What is done with the matrix is passed in: ``projection(states)`` gives logits; a loss passes a function that
    takes (states, weight) and never forms all logits. It runs inside ``forward`` because ZeRO-3 makes a module's own
    parameters whole only there.

    Args:
        weight_VD: the output matrix.
        bias_V: added to the logits, or None.
    """

    def __init__(self, weight_VD: nn.Parameter, bias_V: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight_VD
        self.bias = bias_V

    def forward(self, states: S, consume: Callable[..., T] = F.linear) -> T:  # type: ignore[assignment]
        """Shape: (..., D) -> (..., V) by default; otherwise what ``consume(states, weight, bias=bias)`` returns, or
        ``consume(states, weight)`` where there is no bias.
        """
        if self.bias is None:
            return consume(states, self.weight)
        return consume(states, self.weight, bias=self.bias)
