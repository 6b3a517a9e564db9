"""Token and position embeddings, and the projection back to the vocabulary.

Legend: B sentences, T length, D model width, V vocabulary, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels.choice import UsesKernels
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.native.library import Lookup, Panels
from deepspeed_nmt.nn.layers import Activation, Dropout, LayerNorm, is_bare
from deepspeed_nmt.nn.linear import Linear, OneRank, Sliceable, UsesPackedWeights


def sinusoids(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Compute sinusoidal positions 0..length-1, of wavelengths from 2 pi to 20000 pi.

    The first half of the columns are sines, the second half cosines: a permutation of Vaswani et al. 2017, 3.5.

    Shape: -> (length, dim), fp32
    """
    half = dim // 2
    rates = torch.exp(
        torch.arange(half, device=device, dtype=torch.float32) * (-math.log(10000.0) / max(half - 1, 1))
    )
    angles = torch.arange(length, device=device, dtype=torch.float32).unsqueeze(1) * rates
    return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, dim % 2))


def marian_sinusoids(length: int, dim: int, device: torch.device | None = None) -> Tensor:
    """Compute the positions 0..length-1 of Marian NMT.

    The wavelengths are those of Vaswani et al. 2017, 3.5: 10000^(2i/D); :func:`sinusoids` has 10000^(i/(D/2 - 1)).
    """
    columns = torch.arange(dim, dtype=torch.float64)
    rates = 10000.0 ** (-2.0 * (columns // 2) / dim)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1).float().to(device)


PositionName = Literal["tensor2tensor", "marian", "fairseq", "none"]
POSITIONS: Mapping[PositionName, Callable[[int, int, torch.device | None], Tensor]] = {
    "tensor2tensor": sinusoids,
    "marian": marian_sinusoids,
    # From 2 on, above the number of padding.
    "fairseq": lambda length, dim, device: sinusoids(length + 2, dim, device)[2:],
    # For models that know positions otherwise, or not at all.
    "none": lambda length, dim, device: torch.zeros(length, dim, device=device),
}
"""Functions that compute positions, by name."""


class TokenEmbedding(nn.Module, Sliceable, UsesPackedWeights):
    """Embedding of tokens times sqrt(D), plus sinusoidal positions, then dropout.

    Attributes:
        positions: most positions of a sentence; None: any number.
    """

    positions: int | None = None

    def __init__(
        self, weight_VD: nn.Parameter, dropout_p: float, wavelengths: PositionName = "tensor2tensor"
    ) -> None:
        super().__init__()
        self.weight = weight_VD
        self.dropout = Dropout(dropout_p)
        self.wavelengths = wavelengths
        self.scale = math.sqrt(weight_VD.shape[1])
        # Grown on demand; not saved, since it can be computed again.
        self._positions_TD = torch.empty(0, weight_VD.shape[1])

    def forward(self, tokens_BT: Tensor, offset: int | Tensor = 0, segments: Segments | None = None) -> Tensor:
        """Embed tokens at the positions from ``offset`` on, (B,) if rows differ, or at those in their sentences.

        Shape: (B,T) -> (B,T,D)
        """
        if isinstance(offset, Tensor):
            positions_BT = _following(offset, tokens_BT.shape[1])
            positions_TD = F.embedding(positions_BT, self._positions(int(positions_BT.max()) + 1))
        elif segments is None:
            end = offset + tokens_BT.shape[1]
            positions_TD = self._positions(end)[offset:end]
        else:
            positions_TD = self._positions(segments.longest).index_select(0, segments.positions)
        if segments is None and tokens_BT.shape[1] == 1 and (lookup := self.natively(0, 1)) is not None:
            assert self.packed is not None and self.packed.native is not None
            positions_TD = positions_TD.reshape(-1, self.weight.shape[1])
            return self.packed.native.embed(tokens_BT, lookup._replace(positions_TD=positions_TD))
        embedded: Tensor = self.dropout(self.ranks.lookup(tokens_BT, self.weight) * self.scale + positions_TD)
        return embedded

    def natively(self, offset: int, steps: int) -> Lookup | None:
        """Return what native code embeds the next tokens of a search by, at as many positions; None if it must not.

        Operations of torch take three times as long.
        """
        weight, packed = self.weight, self.packed
        if packed is None or packed.native is None or self.training or type(self.ranks) is not OneRank:
            return None
        if weight.dtype != torch.float32 or not weight.is_contiguous():
            return None
        end = offset + steps
        return Lookup(weight, self.scale, self._positions(end)[offset:end])

    def _positions(self, length: int) -> Tensor:
        kept, weight = self._positions_TD, self.weight
        if kept.shape[0] < length or kept.device != weight.device or kept.dtype != weight.dtype:
            kept = self._positions_TD = self.table(max(256, 1 << (length - 1).bit_length())).to(weight.dtype)
        return kept  # another thread may have replaced the table by a shorter one

    def table(self, length: int) -> Tensor:
        """Compute the positions 0..length-1 on the embedding's device. Shape: -> (length, D), fp32."""
        return POSITIONS[self.wavelengths](length, self.weight.shape[1], self.weight.device)


class LearnedEmbedding(nn.Module, Sliceable):
    """Embedding of tokens plus learned positions plus token type 0, normalised, then dropout (Devlin et al. 2019)."""

    def __init__(self, weight_VD: nn.Parameter, positions: int, dropout_p: float, eps: float) -> None:
        super().__init__()
        dim = weight_VD.shape[1]
        self.weight = weight_VD
        self.positions = positions
        self.position_PD = nn.Parameter(torch.empty(positions, dim).normal_(0.0, 0.02))
        self.type_D = nn.Parameter(torch.zeros(dim))
        self.norm = LayerNorm(dim, eps)
        self.dropout = Dropout(dropout_p)

    def forward(self, tokens_BT: Tensor, offset: int | Tensor = 0, segments: Segments | None = None) -> Tensor:
        """Embed tokens; see :meth:`TokenEmbedding.forward`."""
        if isinstance(offset, Tensor):
            positions_TD = F.embedding(_following(offset, tokens_BT.shape[1]), self.position_PD)
        elif segments is None:
            positions_TD = self.position_PD[offset : offset + tokens_BT.shape[1]]
        else:
            positions_TD = F.embedding(segments.positions, self.position_PD)
        sum_BTD = self.ranks.lookup(tokens_BT, self.weight) + positions_TD + self.type_D
        embedded: Tensor = self.dropout(self.norm(sum_BTD))
        return embedded


def _following(offset_B: Tensor, length: int) -> Tensor:
    """Return the positions from different ones on. Shape: (B,) -> (B,T)."""
    return offset_B.unsqueeze(1) + torch.arange(length, device=offset_B.device)


class PredictionTransform(nn.Module):
    """LayerNorm(GELU(x W + b)), applied to states before the output projection of BERT (Devlin et al. 2019)."""

    def __init__(self, dim: int, activation: Activation, eps: float) -> None:
        super().__init__()
        self.dense = Linear(dim, dim)
        self.norm = LayerNorm(dim, eps)
        self.activation = F.relu if activation == "relu" else F.gelu

    def forward(self, x: Tensor) -> Tensor:
        """Transform states. Shape: (..., D) -> (..., D)."""
        normed: Tensor = self.norm(self.activation(self.dense(x)))
        return normed


class Projection(nn.Module, UsesKernels, UsesPackedWeights, Sliceable):
    """Projection of decoder states to the vocabulary; the output matrix is often the embedding matrix too.

    ``projection(states)`` gives logits. A loss passes a function that consumes states and output matrix without
    forming all logits. That runs inside ``forward`` because ZeRO-3 gathers a module's parameters only there.
    """

    def __init__(self, weight_VD: nn.Parameter, bias_V: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight_VD
        self.bias = bias_V

    def forward(self, states: Any, consume: Callable[..., Any] | None = None) -> Any:
        """Compute logits, or ``consume(states, weight, bias=bias, vocabulary=vocabulary, kernels=kernels)``.

        ``vocabulary`` is the slice of the vocabulary whose rows this rank holds; None if it holds all.

        Shape: (..., D) -> (..., V), or that of the result of ``consume``
        """
        vocabulary = self.ranks.vocabulary(self.weight)
        assert consume is not None or vocabulary is None, "no rank holds whole rows of logits"
        if consume is None and self.packed is not None:
            return self.packed.of(self)(states)
        if consume is None:
            return self.kernels.linear(states, self.weight, self.bias)
        return consume(states, self.weight, bias=self.bias, vocabulary=vocabulary, kernels=self.kernels)


def native_ends(
    embedding: nn.Module, projection: nn.Module, offset: int, steps: int, rows: int
) -> tuple[Lookup, Panels] | None:
    """Return what native code needs before and after the layers of a decoder; None if it must not compute that."""
    if type(embedding) is not TokenEmbedding or type(projection) is not Projection or projection.packed is None:
        return None
    lookup, panels = embedding.natively(offset, steps), projection.packed.of(projection).native(rows)
    return (lookup, panels) if lookup and panels and is_bare(embedding) and is_bare(projection) else None
