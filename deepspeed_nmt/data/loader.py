"""Micro-batches of one rank, made from a corpus and the updates of its epochs, and prepared in the background.

Legend: B sentences, S source length, T target length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from deepspeed_nmt.core.batch import Batch, UpdateInfo, packed_segments
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.corpus import Corpora, Corpus, Indices, Tokens, places
from deepspeed_nmt.data.packing import Ladder, PackedPart, largest_packed, pack_update, row_sizes
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, UpdateOrder, UpdatePlace, Window
from deepspeed_nmt.errors import ConfigError, DataError

_SAMPLED_UPDATES, _SAMPLE_MARGIN = 32, 1.1
"""Updates that are divided to estimate the size of micro-batches, and a factor for larger ones among the others."""


def check_lengths(corpora: Corpora, config: BatchConfig) -> int:
    """Return the tokens of the longest sentence; raise a ConfigError if it is larger than a micro-batch."""
    for part in corpora.parts:
        if (longest := max(part.longest)) > config.bound:
            where = f" of {part.name}" if len(corpora.parts) > 1 else ""
            tags = (part.source_tag, part.target_tag).count(None) < 2
            shorter = f", or prepare the data with --max-length {config.bound - 1 - tags}"
            raise ConfigError(
                f"the longest sentence{where} has {longest} tokens, but batch.micro_tokens is {config.bound}; "
                f"raise it{shorter if config.bound > 16 else ''}"
            )
    return max(corpora.longest)


def largest_micro_batch(updates: Window, longest: int, ranks: int, config: BatchConfig) -> tuple[Indices, int]:
    """Choose the sentences of the largest micro-batch to be expected of any update, and the tokens of their longest.

    A sample of the updates gives its size: ``micro_tokens``, or less if updates are small or are divided finer
    because of padding. Of all sentences that fill at least 97% of that size, the longest are chosen. The sample may
    lack the longest sentence of the text, of ``longest`` tokens: it stands in for that with its own. Shape: -> (B,).
    """
    sample = range(0, len(updates), max(1, len(updates) // _SAMPLED_UPDATES))
    lengths = np.maximum(updates.source, updates.target).astype(np.int64)
    divided = (divide_update(updates[update], updates.source, updates.target, ranks, config) for update in sample)
    seen = max(
        len(group) * int(lengths[group].max())
        for update in divided
        for groups in update
        for group in groups
        if len(group)
    )
    budget = max(longest, min(config.bound, int(_SAMPLE_MARGIN * seen)))
    ranked = np.argsort(-lengths, kind="stable")
    lengths = lengths[ranked]
    lengths[0] = longest
    # Candidates begin with a sentence, in order of length, and hold as many as fit.
    rows = np.minimum(budget // lengths, np.arange(len(ranked), 0, -1))
    sizes = rows * lengths
    first = int((sizes >= 0.97 * sizes.max()).argmax())  # attention makes long sentences cost more than short ones
    return updates.rows[ranked[first : first + int(rows[first])]], int(lengths[first])


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Update:
    """One rank's part of an update.

    Attributes:
        number: number of the update in the run, from 1.
        micro_batches: micro-batches of this rank; every rank has equally many.
        target_tokens: target tokens of the whole update, over all ranks; ``corpus_tokens`` of each corpus.
        padded_positions: source and target positions of this rank's micro-batches, ``real_positions`` not padded.
        after: position of the next update in the data.
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
    least: tuple[int, int] = (0, 0),
) -> Batch:
    """Pad sentence pairs, of indices (B,), into a batch. Sources may come from other pairs, ``source_indices``.

    Rows of source and target have at ``least`` these positions.

    No pairs give the smallest batch that a model can run: its source is one end-of-sentence token and its target only
    padding, so it weighs nothing.
    """
    sources, targets, common = _read(corpus, indices, vocabulary, update, source_indices)
    source_BS, _ = _padded(sources, vocabulary.source.eos, vocabulary.pad, least[0])
    output_BT, within = _padded(targets, _last(indices, vocabulary), vocabulary.pad, least[1])
    input_BT = np.full_like(output_BT, vocabulary.pad)
    input_BT[:, 0] = vocabulary.bos
    input_BT[:, 1:][within[:, :-1]] = targets.numbers
    return Batch(
        source_BS=torch.from_numpy(source_BS),
        target_input_BT=torch.from_numpy(input_BT),
        target_output_BT=torch.from_numpy(output_BT),
        **common,
    )


def collate_packed(
    corpus: Corpus | Corpora, part: PackedPart, vocabulary: Vocabulary, update: UpdateInfo | None = None
) -> Batch:
    """Put sentence pairs end to end into a batch.

    No pairs give a sentence of one position on both sides, whose target is padding.
    """
    sources, targets, common = _read(corpus, part.sentences, vocabulary, update)
    source_1N, input_1N, output_1N = (
        np.full((1, n), vocabulary.pad) for n in (part.source, part.target, part.target)
    )
    ends, starts = _ends_and_starts(sources)
    source_1N[0, places(starts, sources.lengths)] = sources.numbers
    source_1N[0, ends] = vocabulary.source.eos
    ends, starts = _ends_and_starts(targets)
    within = places(starts, targets.lengths)
    output_1N[0, within] = targets.numbers
    output_1N[0, ends] = _last(part.sentences, vocabulary)
    input_1N[0, starts] = vocabulary.bos
    input_1N[0, within + 1] = targets.numbers
    return Batch(
        source_BS=torch.from_numpy(source_1N),
        target_input_BT=torch.from_numpy(input_1N),
        target_output_BT=torch.from_numpy(output_1N),
        source_segments=packed_segments(sources.lengths + 1, part.source),
        target_segments=packed_segments(targets.lengths + 1, part.target),
        **common,
    )


def _read(
    corpus: Corpus | Corpora,
    indices: Indices,
    vocabulary: Vocabulary,
    update: UpdateInfo | None,
    source_indices: Indices | None = None,
) -> tuple[Tokens, Tokens, dict[str, Any]]:
    """Return sources and targets of some pairs, and what a batch of either layout has of them by its arguments.

    Without pairs, either side has a sentence without tokens.
    """
    if len(indices):
        of_sources = indices if source_indices is None else source_indices
        sources = _known(corpus.sources(of_sources), vocabulary.source, corpus, of_sources)
        targets = _known(corpus.targets(indices), vocabulary, corpus, indices)
    else:
        sources = targets = Tokens(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    common: dict[str, Any] = {
        "sentence_ids_B": torch.from_numpy(indices.copy()) if len(indices) else torch.tensor([-1]),
        "source_tokens": len(sources.numbers) + len(indices),
        "target_tokens": len(targets.numbers) + len(indices),
        "pad": vocabulary.pad,
        "update": update or UpdateInfo(),
    }
    if (links := corpus.links_of(indices)) is not None:
        common["links_L3"] = torch.from_numpy(links)
    weights = corpus.weights_of(indices)
    if weights is not None and len(indices):
        common["weights_B"] = torch.from_numpy(weights)
    if isinstance(corpus, Corpora) and len(corpus.parts) > 1:
        numbers = corpus.part_of(indices) if len(indices) else np.zeros(1, dtype=np.int64)
        common |= {"corpora": len(corpus.parts), "corpora_B": torch.from_numpy(numbers)}
    return sources, targets, common


def _known(sentences: Tokens, vocabulary: Vocabulary, corpus: Corpus | Corpora, indices: Indices) -> Tokens:
    """Return sentences; a token that the vocabulary lacks is a DataError. Hashes may still be being compared."""
    if len(numbers := sentences.numbers) and not 0 <= numbers.min() <= numbers.max() < vocabulary.size:
        of_token = np.repeat(indices, sentences.lengths)
        damaged = np.unique(of_token[(numbers < 0) | (numbers >= vocabulary.size)])
        raise DataError(
            f"the data has a token beyond the {vocabulary.size} of its vocabulary, in {corpus.named(damaged)}; it "
            "was damaged: run `prepare` again"
        )
    return sentences


def _last(indices: Indices, vocabulary: Vocabulary) -> int:
    """Return the token at the end of targets: EOS, or padding in a batch of no pairs."""
    return vocabulary.eos if len(indices) else vocabulary.pad


def _padded(sentences: Tokens, last: int, pad: int, least: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return sentences with their last token as rows, and the places of the others. Shape: -> (B, T), (B, T)."""
    rows, width = len(sentences.lengths), max(least, int(sentences.lengths.max()) + 1)
    within = np.arange(width) < sentences.lengths[:, None]
    padded = np.full((rows, width), pad, dtype=np.int64)
    padded[within] = sentences.numbers
    padded[np.arange(rows), sentences.lengths] = last
    return padded, within


def _ends_and_starts(sentences: Tokens) -> tuple[Indices, Indices]:
    """Return the places of the EOS, and of the first token, of sentences end to end. Shape: -> (N,), (N,)."""
    after: Indices = np.cumsum(sentences.lengths + 1)
    return after - 1, after - 1 - sentences.lengths


class TrainLoader:
    """All updates of a run from a given position on, without end, for one of some data-parallel ranks.

    A sentence that does not fit into a micro-batch is a ConfigError.
    """

    def __init__(
        self, order: UpdateOrder, config: BatchConfig, rank: int, ranks: int, vocabulary: Vocabulary
    ) -> None:
        self.order, self.corpora, self.config = order, order.corpora, config
        self.rank, self.ranks, self.vocabulary = rank, ranks, vocabulary
        self.longest = check_lengths(self.corpora, config)

    @classmethod
    def of_corpus(
        cls, corpus: Corpus, config: BatchConfig, seed: int, rank: int, ranks: int, vocabulary: Vocabulary
    ) -> TrainLoader:
        """Return a loader of the epochs of one corpus."""
        return cls(EpochOrder(Corpora.of(corpus), seed, config.update_tokens), config, rank, ranks, vocabulary)

    def of_rank(self, rank: int) -> TrainLoader:
        """Return the loader of another data-parallel rank."""
        other = copy(self)
        other.rank = rank
        return other

    def updates(self, start: Cursor, number: int) -> Generator[Update]:
        """Yield updates from ``start`` on, the first of which is the run's update ``number``.

        The next window is made while the updates of one are taken.
        """
        cursor, key = start, None
        with closing(Prefetcher(self._windows(start, number), depth=1)) as windows:
            while True:
                place = self.order.place(cursor, number)
                if place.window != key:
                    key, window = place.window, windows.next()
                cursor = self.order.after(cursor)
                yield self._assemble(window, place, number, cursor)
                number += 1

    def update(self, cursor: Cursor, number: int) -> Update:
        """Make the update at a position, which is the run's update ``number``."""
        place = self.order.place(cursor, number)
        return self._assemble(self.order.window(place.window), place, number, self.order.after(cursor))

    def _windows(self, cursor: Cursor, number: int) -> Generator[Window]:
        """Yield the windows of the updates from a position on."""
        key = None
        while True:
            place = self.order.place(cursor, number)
            if place.window != key:
                key = place.window
                yield self.order.window(key)
            cursor, number = self.order.after(cursor), number + 1

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
        rows, longest = largest_micro_batch(updates, self.longest, self.ranks, self.config)
        of_side = self.corpora.longest
        least = min(longest, of_side[0]), min(longest, of_side[1])
        return collate(self.corpora, rows, self.vocabulary, self._info(rows, 0), least=least)

    @cached_property
    def row_sizes(self) -> Ladder:
        """Sizes of the rows of micro-batches in the packed layout."""
        return row_sizes(self.order.sample(), self.longest, self.ranks, self.config)

    def _info(self, rows: Indices, number: int) -> UpdateInfo:
        tokens = int(self.corpora.lengths(rows)[1].sum())
        return UpdateInfo(seed=self.order.seed, number=number, tokens=tokens, sentences=len(rows))

    def _assemble(self, window: Window, place: UpdatePlace, number: int, after: Cursor) -> Update:
        positions = window[place.index]
        tokens, parts = int(window.target[positions].sum()), self.corpora.part_of(window.rows[positions])
        info = UpdateInfo(seed=self.order.seed, number=number, tokens=tokens, sentences=len(positions))
        makers = self._makers(window, positions)
        batches = [make(replace(info, micro_batch=which)) for which, make in enumerate(makers)]
        return Update(
            number=number,
            micro_batches=batches,
            target_tokens=tokens,
            padded_positions=sum(b.source_BS.numel() + b.target_input_BT.numel() for b in batches),
            real_positions=sum(b.source_tokens + b.target_tokens for b in batches),
            corpus_tokens=tuple(map(int, np.bincount(parts, window.target[positions], len(self.corpora.parts)))),
            after=after,
        )

    def _makers(self, window: Window, positions: Indices) -> list[Callable[[UpdateInfo], Batch]]:
        """Divide an update; return a function for each of this rank's micro-batches that makes it."""
        source, target, rows = window.source, window.target, window.rows
        if self.config.layout == "packed":
            parts = pack_update(positions, source, target, self.ranks, self.config, self.row_sizes)[self.rank]
            parts = [replace(part, sentences=rows[part.sentences]) for part in parts]
            self.corpora.read_ahead(np.concatenate([part.sentences for part in parts]))
            return [partial(collate_packed, self.corpora, part, self.vocabulary) for part in parts]
        groups = divide_update(positions, source, target, self.ranks, self.config)[self.rank]
        self.corpora.read_ahead(rows[np.concatenate(groups)])
        return [partial(collate, self.corpora, rows[group], self.vocabulary) for group in groups]


class Prefetcher(Generic[T]):
    """A generator that runs in a thread, up to ``depth`` items ahead; :meth:`next` raises its exceptions."""

    def __init__(self, items: Generator[T], depth: int = 4) -> None:
        self._items = items
        self._thread = ThreadPoolExecutor(1, "prefetch")
        self._ahead = deque(self._thread.submit(next, items) for _ in range(depth))

    def next(self) -> T:
        """Return the next item, waiting for it if necessary, or raise StopIteration."""
        future = self._ahead.popleft()
        self._ahead.append(self._thread.submit(next, self._items))
        return future.result()

    def close(self) -> None:
        """Stop the thread, drop the items that are ready, and close the generator."""
        self._thread.shutdown(cancel_futures=True)
        self._items.close()


class ValidationSet:
    """The validation corpus, shared among ranks.

    Unlike training, validation accepts sentences longer than ``micro_tokens``: it raises the bound to the longest.
    """

    def __init__(self, corpus: Corpus, vocabulary: Vocabulary, config: BatchConfig, rank: int, ranks: int) -> None:
        self.corpus, self.vocabulary = corpus, vocabulary
        self._rank, self._ranks = rank, ranks
        longest = int(max(corpus.source_lengths.max(), corpus.target_lengths.max()))
        self._limits = config.model_copy(update={"micro_tokens": max(longest, config.bound)})

    def __len__(self) -> int:
        return len(self.corpus)

    def batches(
        self, sentences: Indices | None = None, source_of: Mapping[int, int] | None = None
    ) -> Iterator[Batch]:
        """Yield this rank's batches, as many as on any other rank, of all ``sentences`` or those given. Shape: (N,).

        All batches belong to one update, so that means over its tokens or sentences do not depend on how it is
        divided. ``source_of`` has for each pair the one whose source replaces its own; targets stay the same.
        """
        if sentences is None:
            sentences = np.arange(len(self.corpus), dtype=np.int64)
        source, target = self.corpus.source_lengths, self.corpus.target_lengths
        info = UpdateInfo(tokens=int(target[sentences].sum()), sentences=len(sentences))
        for group in divide_update(sentences, source, target, self._ranks, self._limits)[self._rank]:
            sources = None if source_of is None else np.array([source_of[int(i)] for i in group], dtype=np.int64)
            yield collate(self.corpus, group, self.vocabulary, info, sources)
