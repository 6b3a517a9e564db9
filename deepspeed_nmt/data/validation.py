"""The validation set, or a slice of it, as the batches of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, Indices, divide_update
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import collate


class ValidationSet:
    """The validation corpus, shared among ranks.

    Unlike training, validation accepts sentences longer than ``micro_tokens``: it raises the bound to the longest.

    Args:
        corpus: validation corpus.
        vocabulary: special tokens of both sides.
        config: bounds of a batch.
        rank: number of this process.
        ranks: number of processes.
    """

    def __init__(self, corpus: Corpus, vocabulary: Vocabulary, config: BatchConfig, rank: int, ranks: int) -> None:
        self.corpus = corpus
        self.vocabulary = vocabulary
        self._rank = rank
        self._ranks = ranks
        longest = int(max(corpus.source_lengths.max(), corpus.target_lengths.max()))
        self._limits = config.model_copy(update={"micro_tokens": max(longest, config.micro_tokens)})

    def __len__(self) -> int:
        return len(self.corpus)

    def batches(
        self, sentences: Indices | None = None, source_of: Mapping[int, int] | None = None
    ) -> Iterator[Batch]:
        """Yield this rank's batches, as many as on any other rank.

        All batches belong to one update, so that means over its tokens or sentences do not depend on how it is
        divided.

        Args:
            sentences: pairs to take; default all. Shape: (N,)
            source_of: for each pair, the pair whose source replaces its own; default none. Batches hold the same
                targets with and without it.
        """
        if sentences is None:
            sentences = np.arange(len(self.corpus), dtype=np.int64)
        source, target = self.corpus.source_lengths, self.corpus.target_lengths
        info = UpdateInfo(tokens=int(target[sentences].sum()), sentences=len(sentences))
        for group in divide_update(sentences, source, target, self._ranks, self._limits)[self._rank]:
            sources = None if source_of is None else np.array([source_of[int(i)] for i in group], dtype=np.int64)
            yield collate(self.corpus, group, self.vocabulary, info, sources)
