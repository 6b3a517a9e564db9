"""Micro-batches of the packed layout: sentences end to end in rows of constant size.

An update's sentences are divided among ranks x n micro-batches, each of which has one row of source tokens and one
of target tokens, of at most ``micro_tokens``. What the sentences leave empty is the row's tail. The sizes of the rows
are determined once for a run, so that kernels are chosen, and layers compiled, for two shapes.

Two are needed, because updates have equally many target tokens, but not source tokens: with the grains of
:mod:`deepspeed_nmt.data.batching` these vary by 15%, if lengths are those of news text. So a target's row has one
size, and a source's row is short or long. Each update takes as many micro-batches with long rows as its sources need.

Sentences of all lengths are mixed in a micro-batch, so ranks have nearly equal work. Within it they are sorted by
length.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt.data.batching import BatchConfig, EpochUpdates, Indices, Lengths, by_length
from deepspeed_nmt.errors import ConfigError

_SPARE = 1.004
"""Ratio of the size of rows to the tokens that are put into them: no division is exact."""
_MULTIPLE = 8
"""Number that divides the sizes: matrix products in 16 bit are fast for such."""
_QUANTILES = np.linspace(0.0, 1.0, 33)
"""Quantiles of the updates' source tokens for which the source's rows may be made."""
_TRIED = 64
"""Sentences of a micro-batch among which one to exchange is sought."""
_EXCHANGES = 300
"""Most exchanges of sentences between micro-batches until an update is divided in another way."""


@dataclass(frozen=True)
class RowSizes:
    """Sizes in tokens of the rows of a run's micro-batches.

    Attributes:
        target: of every target's row.
        short: of the source's rows of some micro-batches.
        long: of the source's rows of the others.
    """

    target: int
    short: int
    long: int

    def shapes(self, micro_batches: int, long: int) -> NDArray[np.int64]:
        """Return the sizes of rows, source and target, of micro-batches, ``long`` of which have long source rows.

        Shape: -> (micro_batches, 2)
        """
        sources = np.repeat([self.long, self.short], [long, micro_batches - long])
        return np.stack([sources, np.full(micro_batches, self.target)], axis=1)


def row_sizes(updates: EpochUpdates, source: Lengths, target: Lengths, ranks: int, config: BatchConfig) -> RowSizes:
    """Determine the sizes of the rows of a run, a function of the arguments alone.

    Args:
        updates: updates of the first epoch.
        source: source lengths, EOS included. Shape: (sentences,)
        target: target lengths, EOS included. Shape: (sentences,)
        ranks: number of data-parallel ranks.
        config: bounds of a micro-batch.
    """
    starts = updates.bounds[:-1]
    sources, targets = (np.add.reduceat(each[updates.order], starts, dtype=np.int64) for each in (source, target))
    bound, most = config.micro_tokens, max(int(sources.max()), int(targets.max()))
    count = ranks * max(1, -(-int(_SPARE * most) // (ranks * max(1, bound - _MULTIPLE))))

    def size(tokens: float) -> int:
        # One position at least is left for the tail, and the longest sentence fits.
        least = int(max(source.max(), target.max())) + 1
        return min(bound, _rounded(max(least, _SPARE * tokens / count + 1)))

    full = sources[targets > 0.9 * np.median(targets)]  # without the rest at the end of the epoch
    wanted = sorted({size(tokens) for tokens in np.quantile(full, _QUANTILES)})
    pairs = [(short, long) for short, long in itertools.product(wanted, wanted) if short <= long]
    rows = size(targets.max())

    def positions(pair: tuple[int, int]) -> float:
        """Return the mean number of positions in the rows of an update."""
        short, long = pair
        counts = np.where(_SPARE * full > count * long, count + ranks, count)
        longs = np.ceil((_SPARE * full - counts * short) / max(1, long - short)).clip(0, counts)
        return float((counts * (short + rows) + longs * (long - short)).mean())

    return RowSizes(rows, *min(pairs, key=positions))


@dataclass(frozen=True)
class PackedPart:
    """Sentences of a micro-batch, and the sizes of its rows.

    Attributes:
        sentences: indices of the sentences, which may be none.
        source: size of the source's row.
        target: size of the target's row.
    """

    sentences: Indices
    source: int
    target: int


def pack_update(
    indices: Indices, source: Lengths, target: Lengths, ranks: int, config: BatchConfig, sizes: RowSizes
) -> list[list[PackedPart]]:
    """Divide an update's sentences into micro-batches of packed rows, equally many for every rank.

    Args:
        indices: sentences of the update. Shape: (sentences,)
        source: source lengths of the corpus, EOS included. Shape: (corpus,)
        target: target lengths of the corpus, EOS included. Shape: (corpus,)
        ranks: number of data-parallel ranks.
        config: bounds of a micro-batch.
        sizes: sizes of the rows of the run.

    Returns:
        The micro-batches of each rank.

    Raises:
        ConfigError: if a single sentence does not fit.
    """
    indices = indices[by_length(source[indices], target[indices])]
    lengths = np.stack([source[indices], target[indices]], axis=1).astype(np.int64)
    if int(lengths.max()) >= config.micro_tokens:
        raise ConfigError(
            "batch.micro_tokens must be above the longest sentence in the packed layout, which has "
            f"{int(lengths.max())} tokens, but is {config.micro_tokens}; raise it, or set batch.layout=padded"
        )
    sources, targets = (int(_SPARE * total) for total in lengths.sum(axis=0))
    count = ranks * max(1, -(-max(-(-targets // sizes.target), -(-sources // sizes.long)) // ranks))
    long = max(0, -(-(sources - count * sizes.short) // max(1, sizes.long - sizes.short)))
    while (groups := _divide(lengths, shapes := sizes.shapes(count, long))) is None:
        if long < count:
            long += 1
        else:
            count, long = count + ranks, 0
    parts = [
        PackedPart(indices[groups == number], *(int(size) for size in shape)) for number, shape in enumerate(shapes)
    ]
    return [parts[rank::ranks] for rank in range(ranks)]


def _divide(lengths: NDArray[np.int64], shapes: NDArray[np.int64]) -> Indices | None:
    """Divide sentences, sorted by target length, among rows; return the number of each one's rows, or None.

    One sentence after another of nearly equal target length goes to each micro-batch, that with the longest source
    to where most room is left for sources. Then sentences are exchanged until all fit.

    Shape: (sentences, 2), (micro-batches, 2) -> (sentences,)
    """
    count, room = len(shapes), shapes - 1  # a position is left for the tail
    room = room.copy()
    group_of = np.empty(len(lengths), dtype=np.int64)
    for start in range(0, len(lengths), count):
        chunk = lengths[start : start + count]
        by_source, by_room = np.argsort(-chunk[:, 0], kind="stable"), np.argsort(-room[:, 0], kind="stable")
        chosen = by_room[: len(chunk)]
        group_of[start + by_source] = chosen
        room[chosen] -= chunk[by_source]
    for _ in range(_EXCHANGES):
        short = room.min(axis=1)
        giver = int(short.argmin())
        if short[giver] >= 0:
            return group_of
        if not _exchange(lengths, group_of, room, giver):
            return None
    return None


def _exchange(lengths: NDArray[np.int64], group_of: Indices, room: NDArray[np.int64], giver: int) -> bool:
    """Exchange a sentence of the fullest micro-batch, which is too full, for a sentence of the one with most room.

    That exchange is made after which least is missing. Return False if none helps.

    Args:
        lengths: of all sentences. Shape: (sentences, 2)
        group_of: micro-batch of each sentence; changed in place. Shape: (sentences,)
        room: tokens left in each micro-batch's rows; changed in place. Shape: (micro-batches, 2)
        giver: the fullest micro-batch.
    """
    side = int(room[giver].argmin())
    taker = int(room[:, side].argmax())
    given, taken = (_spread(np.flatnonzero(group_of == group)) for group in (giver, taker))
    moved = lengths[given][:, None] - lengths[taken][None]  # Shape: (given, taken, 2)
    missing = np.minimum(room[giver] + moved, 0).sum(axis=2) + np.minimum(room[taker] - moved, 0).sum(axis=2)
    best = int(missing.argmax())
    if taker == giver or missing.flat[best] <= np.minimum(room[[giver, taker]], 0).sum():
        return False
    one, other = given[best // len(taken)], taken[best % len(taken)]
    group_of[one], group_of[other] = taker, giver
    room[giver] += lengths[one] - lengths[other]
    room[taker] -= lengths[one] - lengths[other]
    return True


def _spread(sentences: Indices) -> Indices:
    """Return at most _TRIED of some sentences, of all lengths."""
    return sentences[:: max(1, -(-len(sentences) // _TRIED))]


def _rounded(size: float) -> int:
    """Round up to a multiple of _MULTIPLE."""
    return -(-int(np.ceil(size)) // _MULTIPLE) * _MULTIPLE
