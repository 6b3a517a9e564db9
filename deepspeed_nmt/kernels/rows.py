"""Types that the parts of the chunked cross-entropy exchange.

Legend: N rows of a chunk, V tokens of the vocabulary that are held.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class VocabularySlice(Protocol):
    """The rows of the output matrix that a rank holds, and communication with the ranks that hold the others.

    Attributes:
        start: index of the first token held.
        size: tokens of the whole vocabulary.
        largest: tokens of the largest slice, the same on all ranks.
    """

    start: int
    size: int
    largest: int

    def sum(self, x: Tensor) -> None:
        """Sum ``x`` over those ranks, in place."""

    def max(self, x: Tensor) -> None:
        """Take the maximum of ``x`` over those ranks, in place."""


class ChunkRows(NamedTuple):
    """Targets and options of a chunk of rows.

    Attributes:
        index_N: index of each row's target among the tokens held; any valid index where ``here_N`` is False.
        here_N: bool, True where the target is among the tokens held.
        weights_N: factor on each row's gradient, 0 for rows that do not count.
        smoothing: e of the label smoothing.
        size: tokens of the whole vocabulary.
        divergence_weight: factor on the divergence in the gradient, for two predictions.
        vocabulary: the slice that is held, or None for all of it.
    """

    index_N: Tensor
    here_N: Tensor
    weights_N: Tensor
    smoothing: float
    size: int
    divergence_weight: float
    vocabulary: VocabularySlice | None


class ChunkResult(NamedTuple):
    """Losses and gradients of a chunk of rows.

    Attributes:
        loss_N: label-smoothed loss, mean over the predictions, without weights.
        nll_N: negative log-likelihood, mean over the predictions, without weights.
        divergence_N: symmetric KL divergence between two predictions, without weights; None for one.
        gradients: of the weighted sum of losses and divergences with respect to each prediction's logits (N,V), in
            their dtype and possibly their memory; empty unless requested.
    """

    loss_N: Tensor
    nll_N: Tensor
    divergence_N: Tensor | None
    gradients: list[Tensor]
