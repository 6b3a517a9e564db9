"""Micro-batches of one rank, made from a corpus and the updates of its epochs, and prepared in the background.

Legend: B sentences, S source length, T target length.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo, packed_segments
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, Indices, divide_update
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.corpus import Corpus, Tokens, places
from deepspeed_nmt.data.largest import check_lengths, largest_micro_batch
from deepspeed_nmt.data.packing import Ladder, PackedPart, RowSizes, largest_packed, pack_update, row_sizes
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, TabulatedOrder, UpdateOrder, UpdatePlace
from deepspeed_nmt.data.windows import Window

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Update:
    """One rank's part of an update.

    Attributes:
        number: number of the update in the run, from 1.
        micro_batches: micro-batches of this rank; every rank has equally many.
        target_tokens: target tokens of the whole update, over all ranks.
        padded_positions: source and target positions of this rank's micro-batches, padding included.
        real_positions: the same without padding.
        after: position of the next update in the data.
        corpus_tokens: target tokens of each corpus in the whole update.
    """

    number: int
    micro_batches: list[Batch]
    target_tokens: int
    padded_positions: int
    real_positions: int
    after: Cursor
    corpus_tokens: tuple[int, ...] = ()


def collate(
    corpus: Corpus | Corpora,
    indices: Indices,
    vocabulary: Vocabulary,
    update: UpdateInfo | None = None,
    source_indices: Indices | None = None,
) -> Batch:
    """Pad sentence pairs into a batch.

    No pairs give the smallest batch that a model can run: its source is one end-of-sentence token and its target only
    padding, so it weighs nothing.

    Args:
        corpus: sentence pairs to choose from.
        indices: chosen pairs. Shape: (B,)
        vocabulary: special tokens of both sides.
        update: the update that the batch belongs to; needed in training.
        source_indices: pairs that the sources come from, if not the same ones. Shape: (B,)
    """
    update = update or UpdateInfo()
    pad, bos, eos, source_eos = vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.source.eos
    if len(indices) == 0:
        pad_11 = torch.full((1, 1), pad)
        return Batch(
            source_BS=torch.full((1, 1), source_eos),
            target_input_BT=pad_11,
            target_output_BT=pad_11,
            sentence_ids_B=torch.tensor([-1]),
            source_tokens=0,
            target_tokens=0,
            pad=pad,
            update=update,
            **_per_pair(corpus, indices),
        )
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
        source_BS=torch.from_numpy(source_BS),
        target_input_BT=torch.from_numpy(input_BT),
        target_output_BT=torch.from_numpy(output_BT),
        sentence_ids_B=torch.from_numpy(indices.copy()),
        source_tokens=sum(map(len, sources)) + rows,
        target_tokens=sum(map(len, targets)) + rows,
        pad=pad,
        update=update,
        **_per_pair(corpus, indices),
    )


def collate_packed(
    corpus: Corpus | Corpora, part: PackedPart, vocabulary: Vocabulary, update: UpdateInfo | None = None
) -> Batch:
    """Put sentence pairs end to end into a batch.

    No pairs give a sentence of one position on both sides, whose target is padding.

    Args:
        corpus: sentence pairs to choose from.
        part: chosen pairs, and the sizes of the rows.
        vocabulary: special tokens of both sides.
        update: the update that the batch belongs to.
    """
    indices = part.sentences
    pad, bos, eos, source_eos = vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.source.eos
    if len(indices):
        sources, targets = corpus.sources(indices), corpus.targets(indices)
        source_tokens, target_tokens = (len(side.numbers) + len(indices) for side in (sources, targets))
    else:
        sources = targets = Tokens(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
        source_tokens = target_tokens = 0
        eos = pad
    source_1N, input_1N, output_1N = (np.full((1, n), pad) for n in (part.source, part.target, part.target))
    ends, starts = _ends_and_starts(sources)
    source_1N[0, places(starts, sources.lengths)] = sources.numbers
    source_1N[0, ends] = source_eos
    ends, starts = _ends_and_starts(targets)
    within = places(starts, targets.lengths)
    output_1N[0, within] = targets.numbers
    output_1N[0, ends] = eos
    input_1N[0, starts] = bos
    input_1N[0, within + 1] = targets.numbers
    return Batch(
        source_BS=torch.from_numpy(source_1N),
        target_input_BT=torch.from_numpy(input_1N),
        target_output_BT=torch.from_numpy(output_1N),
        sentence_ids_B=torch.from_numpy(indices.copy()) if len(indices) else torch.tensor([-1]),
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        pad=pad,
        update=update or UpdateInfo(),
        source_segments=packed_segments(sources.lengths + 1, part.source),
        target_segments=packed_segments(targets.lengths + 1, part.target),
        **_per_pair(corpus, indices),
    )


def _ends_and_starts(sentences: Tokens) -> tuple[Indices, Indices]:
    """Return the places of the EOS, and of the first token, of sentences end to end. Shape: -> (N,), (N,)."""
    after: Indices = np.cumsum(sentences.lengths + 1)
    return after - 1, after - 1 - sentences.lengths


def _per_pair(corpus: Corpus | Corpora, indices: Indices) -> dict[str, Any]:
    """Return the weights of pairs, and what corpora they are of, as arguments of a batch."""
    found: dict[str, Any] = {}
    weights = corpus.weights_of(indices)
    if weights is not None and len(indices):
        found["weights_B"] = torch.from_numpy(weights)
    if isinstance(corpus, Corpora) and len(corpus.parts) > 1:
        numbers = corpus.part_of(indices) if len(indices) else np.zeros(1, dtype=np.int64)
        found |= {"corpora": len(corpus.parts), "corpora_B": torch.from_numpy(numbers)}
    return found


class TrainLoader:
    """All updates of a run from a given position on, without end.

    Args:
        order: which sentences make which update.
        config: batch sizes.
        rank: this process's number among the data-parallel ranks.
        ranks: number of data-parallel ranks.
        vocabulary: special tokens of both sides.

    Raises:
        ConfigError: if a sentence does not fit into a micro-batch.
    """

    def __init__(
        self, order: UpdateOrder, config: BatchConfig, rank: int, ranks: int, vocabulary: Vocabulary
    ) -> None:
        self.order = order
        self.corpora = order.corpora
        self.longest = check_lengths(self.corpora, config)
        self.config = config
        self.rank = rank
        self.ranks = ranks
        self.vocabulary = vocabulary
        self._sizes: RowSizes | Ladder | None = None

    @classmethod
    def of_corpus(
        cls, corpus: Corpus, config: BatchConfig, seed: int, rank: int, ranks: int, vocabulary: Vocabulary
    ) -> TrainLoader:
        """Return a loader of the epochs of one corpus; arguments as of the class."""
        return cls(epoch_order(Corpora.of(corpus), config, seed), config, rank, ranks, vocabulary)

    def updates(self, start: Cursor, number: int) -> Iterator[Update]:
        """Yield updates from ``start`` on, the first of which is the run's update ``number``."""
        cursor = start
        place = self.order.place(cursor, number)
        window = self.order.window(place.window)
        while True:
            before, place = place, self.order.place(cursor, number)
            if place.window != before.window:
                window = self.order.window(place.window)
            cursor = self.order.after(cursor)
            yield self._assemble(window, place, number, cursor)
            number += 1

    def largest(self) -> Batch:
        """Collate the largest micro-batch that can be expected, the same on every rank.

        It belongs to update 0, which is never trained. An objective computes all its regularizers in it, since 0 is a
        multiple of any number.
        """
        updates = self.order.sample()
        if self.config.layout == "packed":
            source, target = updates.source, updates.target
            part = largest_packed(updates[0], source, target, self.ranks, self.config, self.row_sizes)
            part = replace(part, sentences=updates.rows[part.sentences])
            return collate_packed(self.corpora, part, self.vocabulary, self._info(part.sentences, 0))
        rows = largest_micro_batch(updates, self.corpora, self.ranks, self.config)
        return collate(self.corpora, rows, self.vocabulary, self._info(rows, 0))

    @property
    def row_sizes(self) -> RowSizes | Ladder:
        """Sizes of the rows of micro-batches in the packed layout."""
        if self._sizes is None:
            self._sizes = row_sizes(self.order.sample(), self.longest, self.ranks, self.config)
        return self._sizes

    def _info(self, rows: Indices, number: int) -> UpdateInfo:
        tokens = int(self.corpora.lengths(rows)[1].sum())
        return UpdateInfo(seed=self.order.seed, number=number, tokens=tokens, sentences=len(rows))

    def _assemble(self, window: Window, place: UpdatePlace, number: int, after: Cursor) -> Update:
        positions = window[place.index]
        tokens = int(window.target[positions].sum())
        info = UpdateInfo(seed=self.order.seed, number=number, tokens=tokens, sentences=len(positions))
        makers = self._makers(window, positions)
        batches = [make(replace(info, micro_batch=which)) for which, make in enumerate(makers)]
        return Update(
            number=number,
            micro_batches=batches,
            target_tokens=tokens,
            padded_positions=sum(b.source_BS.numel() + b.target_input_BT.numel() for b in batches),
            real_positions=sum(b.source_tokens + b.target_tokens for b in batches),
            corpus_tokens=self._corpus_tokens(window, positions),
            after=after,
        )

    def _corpus_tokens(self, window: Window, positions: Indices) -> tuple[int, ...]:
        parts = self.corpora.part_of(window.rows[positions])
        tokens = np.bincount(parts, window.target[positions], minlength=len(self.corpora.parts))
        return tuple(map(int, tokens))

    def _makers(self, window: Window, positions: Indices) -> list[Callable[[UpdateInfo], Batch]]:
        """Cut an update, and return a function for each of this rank's micro-batches that makes it."""
        source, target, rows = window.source, window.target, window.rows
        if self.config.layout == "packed":
            parts = pack_update(positions, source, target, self.ranks, self.config, self.row_sizes)[self.rank]
            parts = [replace(part, sentences=rows[part.sentences]) for part in parts]
            return [partial(collate_packed, self.corpora, part, self.vocabulary) for part in parts]
        divided = divide_update(positions, source, target, self.ranks, self.config)
        return [partial(collate, self.corpora, rows[group], self.vocabulary) for group in divided[self.rank]]


def epoch_order(corpora: Corpora, config: BatchConfig, seed: int) -> UpdateOrder:
    """Return the order of a run on one corpus."""
    kind = EpochOrder if config.order == "windows" else TabulatedOrder
    return kind(corpora, seed, config.update_tokens)


class Prefetcher(Generic[T]):
    """An iterator that runs in a thread, a few items ahead.

    Exceptions of the thread are raised by :meth:`next`, in their place.

    Args:
        items: items to prepare.
        depth: number of items to hold ready.
    """

    def __init__(self, items: Iterator[T], depth: int = 4) -> None:
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), daemon=True, name="prefetch")
        self._thread.start()

    def next(self) -> T:
        """Return the next item, waiting for it if necessary.

        Raises:
            StopIteration: if the iterator has ended.
        """
        item, error = self._queue.get()
        if error is not None:
            raise error
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Stop the thread and drop the items that are ready."""
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
        except BaseException as error:  # handed to the consumer, which can act on it
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return
            except queue.Full:
                continue
