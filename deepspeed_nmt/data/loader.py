"""From a corpus and a plan to micro-batches on a rank, prepared in the background.

Legend: B sentences, S source length, T target length.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import (
    BatchConfig,
    EpochUpdates,
    Indices,
    check_lengths,
    cut_update,
    epoch_updates,
    largest_micro_batch,
)
from deepspeed_nmt.data.corpus import Corpus

T = TypeVar("T")


@dataclass(frozen=True)
class Cursor:
    """A position in the data: the next update to make.

    Attributes:
        epoch: from 0.
        update: index within the epoch, from 0.
    """

    epoch: int = 0
    update: int = 0


@dataclass(frozen=True)
class Update:
    """One update's share of one rank.

    Attributes:
        number: of the update in the run, from 1.
        micro_batches: of this rank; every rank has equally many.
        target_tokens: of the whole update, over all ranks.
        padded_positions: source and target positions of this rank's micro-batches, padding included.
        real_positions: the same without padding.
        after: where the data continues.
    """

    number: int
    micro_batches: list[Batch]
    target_tokens: int
    padded_positions: int
    real_positions: int
    after: Cursor


def collate(
    corpus: Corpus,
    indices: Indices,
    vocabulary: Vocabulary,
    *,
    source_indices: Indices | None = None,
    seed: int = 0,
    update: int = 0,
    micro: int = 0,
    update_tokens: int = 0,
    update_sentences: int = 0,
) -> Batch:
    """Pad some sentence pairs into a batch. Without any, make the smallest batch that a model can run: its source is
    one end-of-sentence token, its target only padding, so it weighs nothing.

    Args:
        source_indices: where the sources come from, if not from the same pairs.
        seed, update, micro, update_tokens, update_sentences: see :class:`Batch`.
    """
    place = (vocabulary.pad, seed, update, micro, update_tokens, update_sentences)
    pad, bos, eos, source_eos = vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.source.eos
    if len(indices) == 0:
        eos_11 = torch.full((1, 1), source_eos)
        pad_11 = torch.full((1, 1), pad)
        return Batch(eos_11, pad_11, pad_11, torch.tensor([-1]), 0, 0, *place)
    sources = [corpus.source(int(i)) for i in (indices if source_indices is None else source_indices)]
    targets = [corpus.target(int(i)) for i in indices]
    rows, s_max, t_max = len(indices), max(map(len, sources)) + 1, max(map(len, targets)) + 1
    source_BS = np.full((rows, s_max), pad, dtype=np.int64)
    input_BT = np.full((rows, t_max), pad, dtype=np.int64)
    output_BT = np.full((rows, t_max), pad, dtype=np.int64)
    input_BT[:, 0] = bos
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        source_BS[row, : len(source)] = source
        source_BS[row, len(source)] = source_eos
        input_BT[row, 1 : len(target) + 1] = target
        output_BT[row, : len(target)] = target
        output_BT[row, len(target)] = eos
    return Batch(
        torch.from_numpy(source_BS),
        torch.from_numpy(input_BT),
        torch.from_numpy(output_BT),
        torch.from_numpy(indices.copy()),
        sum(map(len, targets)) + rows,
        sum(map(len, sources)) + rows,
        *place,
    )


class TrainLoader:
    """All updates of a run from a given position on, epoch after epoch, without end.

    Args:
        corpus: the training corpus.
        config: batch sizes.
        seed: of the run.
        rank, ranks: this process among the data-parallel ones.
        vocabulary: its special tokens.

    Raises:
        ConfigError: if a sentence does not fit into a micro-batch.
    """

    def __init__(
        self, corpus: Corpus, config: BatchConfig, seed: int, rank: int, ranks: int, vocabulary: Vocabulary
    ) -> None:
        check_lengths(corpus.source_lengths, corpus.target_lengths, config)
        self.corpus = corpus
        self.config = config
        self.seed = seed
        self.rank = rank
        self.ranks = ranks
        self.vocabulary = vocabulary

    def updates(self, start: Cursor, number: int) -> Iterator[Update]:
        """Updates from ``start`` on, the first of which is the run's update ``number``."""
        source, target = self.corpus.source_lengths, self.corpus.target_lengths
        epoch, index = start.epoch, start.update
        while True:
            plan = self._epoch(epoch)
            while index < len(plan):
                sentences = plan[index]
                cut = cut_update(sentences, source, target, self.ranks, self.config)
                index += 1
                after = Cursor(epoch, index) if index < len(plan) else Cursor(epoch + 1, 0)
                yield self._assemble(cut[self.rank], len(sentences), int(target[sentences].sum()), number, after)
                number += 1
            epoch, index = epoch + 1, 0

    def updates_per_epoch(self) -> int:
        """Updates in the first epoch; others differ by one at most, since grains are not all of one size."""
        return len(self._epoch(0))

    def largest(self) -> Batch:
        """The largest micro-batch that can be expected, the same on every rank. As part of update 0, which does not
        exist, it has every term of an objective: all are due in a multiple of any number.
        """
        source, target = self.corpus.source_lengths, self.corpus.target_lengths
        indices = largest_micro_batch(self._epoch(0), source, target, self.ranks, self.config)
        tokens = int(target[indices].sum())
        return collate(
            self.corpus,
            indices,
            self.vocabulary,
            seed=self.seed,
            update_tokens=tokens,
            update_sentences=len(indices),
        )

    def _epoch(self, epoch: int) -> EpochUpdates:
        source, target = self.corpus.source_lengths, self.corpus.target_lengths
        return epoch_updates(source, target, self.seed, epoch, self.config.update_tokens)

    def _assemble(
        self, groups: list[Indices], sentences: int, target_tokens: int, number: int, after: Cursor
    ) -> Update:
        batches = [
            collate(
                self.corpus,
                group,
                self.vocabulary,
                seed=self.seed,
                update=number,
                micro=micro,
                update_tokens=target_tokens,
                update_sentences=sentences,
            )
            for micro, group in enumerate(groups)
        ]
        return Update(
            number=number,
            micro_batches=batches,
            target_tokens=target_tokens,
            padded_positions=sum(b.source_BS.numel() + b.target_input_BT.numel() for b in batches),
            real_positions=sum(b.source_tokens + b.target_tokens for b in batches),
            after=after,
        )


class Prefetcher(Generic[T]):
    """Runs an iterator in a thread, a few items ahead. An exception there is raised here, in its place.

    Args:
        items: what to run ahead of.
        depth: items to hold ready.
    """

    def __init__(self, items: Iterator[T], depth: int = 4) -> None:
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True, name="prefetch")
        self._thread.start()

    def next(self) -> T:
        """The next item, waiting for it if need be.

        Raises:
            StopIteration: when the iterator has ended.
        """
        item, error = self._queue.get()
        if error is not None:
            raise error
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop the thread; what it had ready is dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if self._stop.is_set():
                    return
                self._put((item, None))
            self._put((None, None))
        except BaseException as error:  # handed to the consumer, who can act on it
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue
