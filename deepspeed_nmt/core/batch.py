"""A padded micro-batch of sentence pairs, and the update that it belongs to.

Legend: B sentences, S source length, T target length (both with one end-of-sentence token).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """The update that a micro-batch belongs to, and the micro-batch's place in it.

    Random choices in training are functions of these numbers. Outside of training all are 0, unless sums over the
    batch have to be turned into means over tokens or sentences.

    Attributes:
        seed: seed of the run.
        number: number of the update in the run, from 1.
        micro_batch: number of the micro-batch within the update on its rank, from 0.
        tokens: target tokens of the whole update, over all micro-batches and ranks.
        sentences: sentence pairs of the whole update.
    """

    seed: int = 0
    number: int = 0
    micro_batch: int = 0
    tokens: int = 0
    sentences: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch as one rank sees it.

    Attributes:
        source_BS: source tokens, each row ending in EOS, padded on the right.
        target_input_BT: BOS followed by the target tokens, padded on the right.
        target_output_BT: the target tokens followed by EOS, padded on the right.
        sentence_ids_B: numbers of the pairs in the corpus, -1 in an empty batch; random choices per sentence are
            functions of them.
        source_tokens: tokens of ``source_BS`` that are not padding; 0 in an empty batch.
        target_tokens: tokens of ``target_output_BT`` that are not padding; 0 in an empty batch.
        pad: padding token of both sides.
        update: the update that the batch belongs to.
    """

    source_BS: Tensor
    target_input_BT: Tensor
    target_output_BT: Tensor
    sentence_ids_B: Tensor
    source_tokens: int
    target_tokens: int
    pad: int
    update: UpdateInfo = UpdateInfo()

    @property
    def rows(self) -> int:
        """Number of sentence pairs, B."""
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
        """True if any source position is padding; known without waiting for the device."""
        return self.source_tokens != self.source_BS.numel()

    @property
    def target_mask(self) -> Tensor:
        """Bool, True for positions of ``target_output_BT`` that are not padding. Shape: -> (B,T)."""
        return self.target_output_BT.ne(self.pad)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to another device."""
        return replace(
            self,
            source_BS=self.source_BS.to(device, non_blocking=True),
            target_input_BT=self.target_input_BT.to(device, non_blocking=True),
            target_output_BT=self.target_output_BT.to(device, non_blocking=True),
            sentence_ids_B=self.sentence_ids_B.to(device, non_blocking=True),
        )
