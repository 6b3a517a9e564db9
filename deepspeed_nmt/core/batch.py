"""A padded micro-batch of sentence pairs.

Legend: B sentences, S source length, T target length (both with one end-of-sentence token).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch as one rank sees it.

    Attributes:
        source_BS: source tokens, each row ending in EOS, padded on the right.
        target_input_BT: BOS followed by the target tokens, padded on the right.
        target_output_BT: the target tokens followed by EOS, padded on the right.
        sentence_ids_B: each pair's number in the corpus, -1 in an empty batch; per-sentence randomness comes from it.
        target_tokens: tokens of ``target_output_BT`` that are not padding; 0 in an empty batch.
        source_tokens: tokens of ``source_BS`` that are not padding; 0 in an empty batch.
        pad: the padding token of both sides.
        seed: the run's seed.
        update: number of the update this micro-batch belongs to, from 1.
        micro: number of this micro-batch within its update on its rank, from 0.
        update_tokens: target tokens of the whole update, over all micro-batches and ranks; 0 outside of training.
        update_sentences: its sentence pairs; 0 outside of training.
    """

    source_BS: Tensor
    target_input_BT: Tensor
    target_output_BT: Tensor
    sentence_ids_B: Tensor
    target_tokens: int
    source_tokens: int
    pad: int
    seed: int = 0
    update: int = 0
    micro: int = 0
    update_tokens: int = 0
    update_sentences: int = 0

    @property
    def source_padded(self) -> bool:
        """Whether any source position is padding; known without asking the device."""
        return self.source_tokens != self.source_BS.numel()

    @property
    def padded_tokens(self) -> int:
        """Rows times the longer of the two padded lengths: what ``micro_tokens`` bounds."""
        return self.rows * self.longest

    @property
    def rows(self) -> int:
        """Sentence pairs, B."""
        return self.source_BS.shape[0]

    @property
    def longest(self) -> int:
        """The longer of the two padded lengths."""
        return max(self.source_BS.shape[1], self.target_input_BT.shape[1])

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return replace(
            self,
            source_BS=self.source_BS.to(device, non_blocking=True),
            target_input_BT=self.target_input_BT.to(device, non_blocking=True),
            target_output_BT=self.target_output_BT.to(device, non_blocking=True),
            sentence_ids_B=self.sentence_ids_B.to(device, non_blocking=True),
        )
