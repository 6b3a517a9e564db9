"""A toy search: greedy decoding of a fixed number of tokens.

The file shows what a search needs: a configuration class, the search, whose constructor is also the builder, and the
registry entry.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.registry import Entry
from deepspeed_nmt.search.base import Hypothesis


class FixedLengthConfig(SearchConfig):
    """Settings of the search."""

    name: Literal["fixed_length"] = "fixed_length"
    length: int = Field(default=5, ge=1, description="number of tokens of every translation")


class FixedLength:
    """Greedy search of a fixed length.

    Args:
        config: settings.
        model: model to decode with.
        vocabulary: vocabulary of the target.
    """

    def __init__(self, config: FixedLengthConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config, self.model, self.vocabulary = config, model, vocabulary

    @torch.inference_mode()
    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences.

        Args:
            source_BS: source tokens.
            padded: False if no position is padding.

        Returns:
            One hypothesis for each sentence.
        """
        memory, cache = self.model.encode(source_BS, padded), self.model.begin()
        tokens_B = source_BS.new_full((source_BS.shape[0],), self.vocabulary.bos)
        predicted: list[Tensor] = []
        log_prob_B = torch.zeros(source_BS.shape[0], device=source_BS.device)
        for _ in range(self.config.length):
            best = torch.log_softmax(self.model.step(tokens_B, memory, cache).float(), dim=1).max(dim=1)
            tokens_B = best.indices
            log_prob_B += best.values
            predicted.append(tokens_B)
        rows = torch.stack(predicted, dim=1).tolist()
        return [[Hypothesis(row, score, score)] for row, score in zip(rows, log_prob_B.tolist(), strict=True)]


ENTRY = Entry("fixed_length", FixedLengthConfig, FixedLength)
