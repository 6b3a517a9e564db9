"""What the parts of the chunked cross-entropy tell each other.

Legend: N rows of a chunk, V tokens of the vocabulary that are held.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class VocabularySlice(Protocol):
    """Which rows of the output matrix a rank holds, and how ranks that hold the others are asked.

    Attributes:
        start: number of the first token held.
        size: V, of the whole vocabulary.
    """

    start: int
    size: int

    def sum(self, x: Tensor) -> None:
        """Add ``x`` up over those ranks, in place."""

    def max(self, x: Tensor) -> None:
        """The greatest over those ranks, in place."""


class ChunkRows(NamedTuple):
    """Some rows of predictions, and what is asked of them.

    Attributes:
        index_N: place of each row's target among the tokens held; anything where it is not ``here``.
        here_N: bool, whether the target is among them.
        weights_N: factor on each row's gradient, 0 for rows that do not count.
        smoothing: e of the label smoothing.
        size: tokens of the whole vocabulary.
        divergence_weight: of J in the gradient, with two predictions.
        vocabulary: the slice that is held, or None for all.
    """

    index_N: Tensor
    here_N: Tensor
    weights_N: Tensor
    smoothing: float
    size: int
    divergence_weight: float
    vocabulary: VocabularySlice | None


class ChunkResult(NamedTuple):
    """What came of them.

    Attributes:
        loss_N: label-smoothed loss, mean over the predictions, not weighted.
        nll_N: negative log-likelihood, likewise.
        divergence_N: J, not weighted, with two predictions.
        gradients: of the weighted sum of losses and divergences with respect to each prediction's logits (N,V), in
            their dtype; possibly in their place. Empty if not asked for.
    """

    loss_N: Tensor
    nll_N: Tensor
    divergence_N: Tensor | None
    gradients: list[Tensor]
