"""A micro-batch of sentence pairs, and the update that it belongs to.

In the padded layout each sentence has a row. In the packed layout the sentences of a side are end to end in one row
(:class:`~deepspeed_nmt.kernels.segments.Segments`): where a shape has B, S and T, it is then 1, and the tokens of the
source's and the target's row.

Legend: B sentences, S source length, T target length (both with one end-of-sentence token), D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.kernels.segments import Segments

CORPUS_SUM = "corpus/"
"""Beginning of the names of sums over the pairs of one corpus; its number follows."""


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """The update that a micro-batch belongs to, and the micro-batch's place in it.

    Random choices in training are functions of these numbers. Outside of training all are 0, unless sums over the
    batch have to be turned into means over tokens or sentences.

    Attributes:
        seed: seed of the run.
        number: number of the update in the run, from 1.
        micro_batch: number of the micro-batch within the update on its rank, from 0.
        tokens: target tokens of the whole update, over all micro-batches and ranks; pairs of any weight count.
        sentences: sentence pairs of the whole update.
    """

    seed: int = 0
    number: int = 0
    micro_batch: int = 0
    tokens: int = 0
    sentences: int = 0


def packed_segments(lengths: NDArray[np.int64], size: int) -> Segments:
    """Return the segments of one side of a packed batch, of sentences of (B,) tokens in a row of ``size``."""
    return Segments.of(lengths, size)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch as one rank sees it.

    Attributes:
        source_BS: source tokens, each row ending in EOS, padded on the right.
        target_input_BT: BOS followed by the target tokens, padded on the right.
        target_output_BT: the target tokens followed by EOS, padded on the right.
        sentence_ids_B: numbers of the pairs in the corpus, -1 in an empty batch.
        source_tokens: tokens of ``source_BS`` that are not padding; 0 in an empty batch.
        target_tokens: tokens of ``target_output_BT`` that are not padding; 0 in an empty batch.
        source_segments: sentences of the source's row in the packed layout; None in the padded layout.
        weights_B: factor on each pair's loss; None if all are 1. See :meth:`weighted` and :attr:`token_weights`.
        links_L3: L links of tokens: the pair's number in the batch, position in the target, and position in the
            source, each from 0 in either layout; None if the data has no word alignments.
        corpora: number of corpora that the run is trained on.
        corpora_B: number of the corpus of each pair; None if there is one.
    """

    source_BS: Tensor
    target_input_BT: Tensor
    target_output_BT: Tensor
    sentence_ids_B: Tensor
    source_tokens: int
    target_tokens: int
    pad: int
    update: UpdateInfo = UpdateInfo()
    source_segments: Segments | None = None
    target_segments: Segments | None = None
    weights_B: Tensor | None = None
    links_L3: Tensor | None = None
    corpora: int = 1
    corpora_B: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows of either side: sentence pairs in the padded layout, 1 in the packed layout."""
        return self.source_BS.shape[0]

    @property
    def longest(self) -> int:
        """The longer of the two padded lengths."""
        return max(self.source_BS.shape[1], self.target_input_BT.shape[1])

    @property
    def padded_tokens(self) -> int:
        """Rows times the longer of the two padded lengths, which is bounded by ``micro_tokens``."""
        return self.rows * self.longest

    @property
    def source_padded(self) -> bool:
        """True if a mask of source positions is needed in the padded layout; known without waiting for the device."""
        return self.source_tokens != self.source_BS.numel()

    # Weights of pairs. Without them nothing is computed.

    @property
    def token_weights(self) -> Tensor | None:
        """The pair's weight at each position of the target, (B,T) in the batch's layout; None if all are 1."""
        return None if self.weights_B is None else self._at_positions(self.weights_B)

    def weighted(self, losses_B: Tensor) -> Tensor:
        """Multiply the loss of each pair by its weight. Shape: (B,) -> (B,)."""
        return losses_B if self.weights_B is None else losses_B * self.weights_B

    def sums_by_corpus(self, nll_N: Tensor) -> dict[str, Tensor]:
        """Sum (N,) values at each position of the target, 0 in padding, over the pairs of each of several corpora."""
        if self.corpora_B is None:
            return {}
        corpora_N = self._at_positions(self.corpora_B).flatten()
        return {f"{CORPUS_SUM}{k}": torch.where(corpora_N == k, nll_N, 0.0).sum() for k in range(self.corpora)}

    def _at_positions(self, values_B: Tensor) -> Tensor:
        """Return the value of a position's pair, in the batch's layout; arbitrary in padding. Shape: -> (B,T)."""
        if self.target_segments is None:
            return values_B.unsqueeze(1).expand(self.target_output_BT.shape)
        rows_BT = values_B.unsqueeze(1).expand(-1, self.target_segments.longest)
        return self.target_segments.from_rows(rows_BT, 0).unsqueeze(0)

    # Random choices for sentences, functions of (seed, purpose, update, number of the pair).

    def uniforms(self, count: int, purpose: int) -> Tensor:
        """Draw ``count`` numbers in [0, 1) for each pair. Shape: -> fp64 (B, count)."""
        update = self.update
        return randomness.uniforms(self.sentence_ids_B, count, update.seed, purpose, update.number)

    def random_ranks(self, chosen_BT: Tensor, purpose: int) -> Tensor:
        """Rank each sentence's chosen positions in a random order, from 0; the others come last. Shape: -> (B,T)."""
        draws_BT = self.uniforms(chosen_BT.shape[1], purpose)
        return draws_BT.masked_fill(~chosen_BT, 2.0).argsort(dim=1).argsort(dim=1)

    # Sentences as rows, in either layout: B and S or T are then those of the padded layout.

    @property
    def target_mask(self) -> Tensor:
        """Bool, True for positions of sentences' rows of the target that are not padding. Shape: -> (B,T)."""
        real_BT = self.target_rows(self.target_output_BT).ne(self.pad)
        return real_BT if self.target_segments is None else real_BT & self.target_segments.real_positions

    def source_rows(self) -> Tensor:
        """Return the source tokens with a padded row for each sentence. Shape: -> (B,S)."""
        if self.source_segments is None:
            return self.source_BS
        rows_BS = self.source_segments.to_rows(self.source_BS[0], 0)
        return rows_BS.masked_fill(~self.source_segments.real_positions, self.pad)

    def laid_out_source(self, rows_BS: Tensor) -> Tensor:
        """Return source tokens in the batch's layout, the reverse of :meth:`source_rows`; a tail is arbitrary."""
        return rows_BS if self.source_segments is None else self.source_segments.from_rows(rows_BS, 0).unsqueeze(0)

    def target_rows(self, x_BT: Tensor) -> Tensor:
        """Return values at target positions with a row for each sentence; padding is arbitrary.

        Shape: (B,T) or (B,T,D), in the batch's layout -> the same, in that of :attr:`target_mask`
        """
        return x_BT if self.target_segments is None else self.target_segments.to_rows(x_BT[0], 0)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to another device."""
        moved: dict[str, Any] = {
            name: x.to(device, non_blocking=True)
            for name, x in vars(self).items()
            if isinstance(x, Tensor | Segments)
        }
        return replace(self, **moved)
