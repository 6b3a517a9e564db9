"""Micro-batches of the packed layout: sentences end to end in rows of few sizes.

An update's sentences are divided among ranks x n micro-batches, each of which has one row of source tokens and one
of target tokens, of at most ``micro_tokens``. What the sentences leave empty is the row's tail, one position at
least, so that queries of a tail have a key; a row that sentences fill gets a few positions more. The sizes of rows
are determined once for a run, so that kernels are chosen, and layers compiled, for few shapes:

- Two shapes, if lengths are even. Updates have equally many target tokens, but not source tokens: with the grains of
  :mod:`deepspeed_nmt.data.batching` these vary by 15%, if lengths are those of news text. So a target's row has one
  size, and a source's row is short or long. Each update takes as many micro-batches with long rows as its sources
  need (``two_shapes``).
- More, if the updates of a sample show that two leave more empty than a few percent: where the ratio of the lengths
  varies, or sentences are nearly as long as a row. Then sentences are divided evenly, and each row has the smallest
  of several sizes that holds them (:class:`Ladder`).

Sentences of all lengths are mixed in a micro-batch, so ranks have nearly equal work. Within it they are sorted by
length.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt.data.batching import BatchConfig, by_length, lengths_of
from deepspeed_nmt.data.corpus import Indices, Lengths
from deepspeed_nmt.data.update_order import Window

Sizes = NDArray[np.int64]

_TRIED = 64
"""Sentences of a row among which one to exchange is sought."""
_EXCHANGES = 100
"""Most exchanges of sentences between rows until a division is given up."""


def divide(lengths: Sizes, room: Sizes) -> Indices | None:
    """Divide sentences among rows with room for source and target, or return None if no division was found.

    Shape: (sentences, 2), (rows, 2) -> (sentences,).
    """
    left = room.copy()
    # Sides count by the share of their room that is needed.
    weights = lengths * (lengths.sum(axis=0) / (1.0 + room.sum(axis=0)) / room.mean(axis=0) ** 2)
    row_of = np.empty(len(lengths), dtype=np.int64)
    for sentence in np.argsort(-weights.max(axis=1), kind="stable").tolist():
        length = lengths[sentence]
        useful = left @ weights[sentence]
        row = int(useful.argmax())
        if left[row, 0] < length[0] or left[row, 1] < length[1]:
            fits = (left >= length).all(axis=1)
            if fits.any():
                row = int(np.where(fits, useful, -np.inf).argmax())
        row_of[sentence] = row
        left[row] -= length
    if np.count_nonzero(left.min(axis=1) < 0) > _EXCHANGES:
        return None
    for _ in range(_EXCHANGES):
        fullest = int(left.min(axis=1).argmin())
        if left[fullest].min() >= 0:
            return row_of
        if not _exchange(lengths, row_of, left, fullest):
            return None
    return None


def _exchange(lengths: Sizes, row_of: Indices, left: Sizes, giver: int) -> bool:
    """Exchange a sentence of the fullest row, which is too full, for a sentence of the one with most room.

    That exchange is made after which least is missing: ``row_of`` (sentences,) and ``left`` (rows, 2) change in
    place. Return False if none helps.
    """
    side = int(left[giver].argmin())
    taker = int(left[:, side].argmax())
    sides = (np.flatnonzero(row_of == row) for row in (giver, taker))
    given, taken = (sentences[:: max(1, -(-len(sentences) // _TRIED))] for sentences in sides)  # of all lengths
    if taker == giver or not len(taken):
        return False
    moved = lengths[given][:, None] - lengths[taken][None]  # Shape: (given, taken, 2)
    missing = np.minimum(left[giver] + moved, 0).sum(axis=2) + np.minimum(left[taker] - moved, 0).sum(axis=2)
    best = int(missing.argmax())
    if missing.flat[best] <= np.minimum(left[[giver, taker]], 0).sum():
        return False
    one, other = given[best // len(taken)], taken[best % len(taken)]
    row_of[one], row_of[other] = taker, giver
    left[giver] += lengths[one] - lengths[other]
    left[taker] -= lengths[one] - lengths[other]
    return True


_SPARE = 1.004
"""Ratio of the size of rows to the tokens that are put into them: no division is exact."""
_MULTIPLE = 8
"""Number that divides the sizes: matrix products in 16 bit are fast for such."""
_QUANTILES = np.linspace(0.0, 1.0, 33)
"""Quantiles of the updates' source tokens for which the source's rows may be made."""
_SAMPLED_UPDATES, _SAMPLED_TOKENS = 24, 2**20
"""Most updates that are divided to determine the sizes, and most target tokens of these, but at least four."""
_FAILED = 2
"""Updates of the sample that cannot be divided into two shapes, from which on a ladder is taken."""
_GAIN, _RUNGS_GAIN = 0.04, 0.02
"""Shares of positions that a ladder must save to be taken for two shapes, and the most rungs for fewer."""
_LOADS = np.linspace(0.0, 1.0, 97)
"""Quantiles of the rows' tokens that may be rungs."""
_RUNGS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of rungs, for either side, that are tried."""
_STEPS = 16
"""Sizes above a ladder, which are multiples of ``micro_tokens`` / _STEPS."""


@dataclass(frozen=True)
class Ladder:
    """Sizes of rows, ascending, among which each row takes the smallest that holds its sentences.

    With ``two_shapes``, these are tried first: two sizes of the source's rows, and one of the target's.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    two_shapes: bool = False

    def shapes(self, loads: Sizes, bound: int) -> Sizes:
        """Return the sizes of rows that hold some tokens, of at most ``bound``. Shape: (micro_batches, 2) -> same.

        An empty micro-batch has two positions on either side, one of which is its tail.
        """
        shapes = []
        for load, rungs in zip(loads.T, (self.source, self.target), strict=True):
            # A load above those of the sample takes a coarser size, so that few are added.
            above = np.arange(1, _STEPS + 1) * -(-bound // _STEPS)
            sizes = np.array([*rungs, *above[above > rungs[-1]].clip(max=bound)])
            shapes.append(np.where(load > 0, sizes[np.searchsorted(sizes, np.minimum(load + 1, bound))], 2))
        return np.stack(shapes, axis=1)


def row_sizes(updates: Window, longest: int, ranks: int, config: BatchConfig) -> Ladder:
    """Determine the sizes of a run's rows from a sample of its updates and the length of its longest sentence."""
    starts = updates.bounds[:-1]
    totals = np.stack([np.add.reduceat(side, starts, dtype=np.int64) for side in (updates.source, updates.target)])
    full = np.flatnonzero(totals[1] > 0.9 * np.median(totals[1]))  # without the rest at the end of the epoch
    # The sample has updates with few and with many source tokens.
    number = max(4, min(_SAMPLED_UPDATES, _SAMPLED_TOKENS // max(1, int(np.median(totals[1])))))
    ranked = full[np.argsort(totals[0, full], kind="stable")]
    sample = [
        lengths_of(updates[update], updates.source, updates.target, config)
        for update in ranked[np.unique(np.linspace(0, len(ranked) - 1, number).astype(int))].tolist()
    ]
    even = [_loads(lengths, *_divide_evenly(lengths, ranks, config.bound)) for lengths in sample]
    ladder, needed = _ladder(np.concatenate(even), config.bound)
    two = _two_shapes(totals[0, full], totals, longest, ranks, config)
    taken = failed = 0
    for lengths in sample:
        if (division := _divide_into_two_shapes(lengths, ranks, config.bound, two)) is not None:
            taken += int(division[1].sum())
        elif (failed := failed + 1) >= _FAILED:
            return ladder
    return ladder if needed * (len(sample) - failed) < (1.0 - _GAIN) * taken * len(sample) else two


def _two_shapes(full: Indices, totals: Sizes, longest: int, ranks: int, config: BatchConfig) -> Ladder:
    """Choose the sizes for two shapes, which need the fewest positions if sentences can be divided at will.

    ``full`` has the source tokens of all updates but the rest of the epoch, ``totals`` the source and target tokens
    of all updates. Shape: (updates,), (2, updates).
    """
    bound = config.bound
    count = ranks * max(1, -(-int(_SPARE * totals.max()) // (ranks * max(1, bound - _MULTIPLE))))

    def size(tokens: float) -> int:
        return min(bound, -(-int(np.ceil(max(longest, _SPARE * tokens / count) + 1)) // _MULTIPLE) * _MULTIPLE)

    candidates = sorted({size(tokens) for tokens in np.quantile(full, _QUANTILES)})
    pairs = itertools.combinations_with_replacement(candidates, 2)
    rows = size(totals[1].max())

    def positions(pair: tuple[int, int]) -> float:
        """Return the mean number of positions in the rows of an update."""
        short, long = pair
        counts = np.maximum(count, ranks * np.ceil(_SPARE * full / (ranks * long)))
        longs = np.ceil((_SPARE * full - counts * short) / max(1, long - short)).clip(0, counts)
        return float((counts * (short + rows) + longs * (long - short)).mean())

    best: tuple[int, int] = min(pairs, key=positions)
    return Ladder(best, (rows,), two_shapes=True)


def _ladder(loads: Sizes, bound: int) -> tuple[Ladder, int]:
    """Choose the sizes of rows for some micro-batches, as few as waste little, and count the positions needed.

    Shape: (micro_batches, 2). ``bound`` is the largest size.
    """
    source, target = loads.T
    ladders = [Ladder(_rungs(source, number, bound), _rungs(target, number, bound)) for number in _RUNGS]
    needed = [int(ladder.shapes(loads, bound).sum()) for ladder in ladders]
    return next(pair for pair in zip(ladders, needed, strict=True) if (1.0 - _RUNGS_GAIN) * pair[1] <= needed[-1])


def _rungs(loads: Indices, number: int, bound: int) -> tuple[int, ...]:
    """Return at most ``number`` sizes up to ``bound`` that hold some loads with the fewest positions in all.

    They are found by dynamic programming over the quantiles of the loads. Shape: (micro_batches,)
    """
    loads = np.minimum(loads + 1, bound)
    needed = np.minimum(bound, -(-np.quantile(loads, _LOADS).astype(np.int64) // _MULTIPLE) * _MULTIPLE)
    sizes = np.unique(np.maximum(needed, min(bound, _MULTIPLE)))
    counts = np.bincount(np.searchsorted(sizes, np.minimum(loads, sizes[-1])), minlength=len(sizes))
    before = np.concatenate([[0], np.cumsum(counts)])
    # costs[i, j]: positions of the loads above sizes[i - 1] up to sizes[j], in rows of sizes[j].
    places = np.arange(len(sizes))
    costs = np.where(places[:, None] <= places, (before[None, 1:] - before[:-1, None]) * sizes, np.inf)
    best, previous = costs[0], [np.zeros(len(sizes), dtype=np.int64)]
    for _ in range(min(number, len(sizes)) - 1):
        options = np.concatenate([[0.0], best[:-1]])[:, None] + costs
        previous.append(options.argmin(axis=0))
        best = options.min(axis=0)
    rungs, last = [], len(sizes)
    for first in reversed(previous):
        if last == 0:
            break
        rungs.append(int(sizes[last - 1]))
        last = int(first[last - 1])
    return tuple(reversed(rungs))


@dataclass(frozen=True)
class PackedPart:
    """Sentences of a micro-batch, which may be none, and the sizes of its rows."""

    sentences: Indices
    source: int
    target: int


def pack_update(
    indices: Indices, source: Lengths, target: Lengths, ranks: int, config: BatchConfig, sizes: Ladder
) -> list[list[PackedPart]]:
    """Divide an update's sentences into micro-batches of packed rows, equally many for every rank.

    Arguments and errors are as of :func:`~deepspeed_nmt.data.batching.divide_update`; ``sizes`` are those of the run.
    """
    indices = indices[by_length(source[indices], target[indices])]
    lengths = lengths_of(indices, source, target, config)
    division = None
    if sizes.two_shapes:
        division = _divide_into_two_shapes(lengths, ranks, config.bound, sizes)
    if division is None:
        row_of, count = _divide_evenly(lengths, ranks, config.bound)
        shapes = sizes.shapes(_loads(lengths, row_of, count), config.bound)
    else:
        row_of, shapes = division
    shapes = np.where(_loads(lengths, row_of, len(shapes)) < shapes, shapes, shapes + _MULTIPLE)
    parts = [PackedPart(indices[row_of == row], *map(int, shape)) for row, shape in enumerate(shapes)]
    if division is None:  # ranks have micro-batches of like size at the same time
        parts.sort(key=lambda part: part.source + part.target, reverse=True)
    return [parts[rank::ranks] for rank in range(ranks)]


def largest_packed(
    indices: Indices, source: Lengths, target: Lengths, ranks: int, config: BatchConfig, sizes: Ladder
) -> PackedPart:
    """Return a micro-batch of an update in rows of the largest sizes."""
    first = pack_update(indices, source, target, ranks, config, sizes)[0][0]
    most = [last + (_MULTIPLE if last == config.bound else 0) for *_, last in (sizes.source, sizes.target)]
    return replace(first, source=max(first.source, most[0]), target=max(first.target, most[1]))


def _divide_into_two_shapes(lengths: Sizes, ranks: int, bound: int, sizes: Ladder) -> tuple[Indices, Sizes] | None:
    """Divide sentences among the fewest rows of two shapes: their rows, and the sizes; None if they do not fit."""
    (short, long), (target,) = sizes.source, sizes.target
    sources, targets = (int(_SPARE * total) for total in lengths.sum(axis=0))
    count = ranks * max(1, -(-max(-(-targets // target), -(-sources // long)) // ranks))
    least = min(count, max(0, -(-(sources - count * short) // max(1, long - short))))
    more = 0
    while True:
        longs = min(count, least + more)
        shapes = np.stack([np.repeat([long, short], [longs, count - longs]), np.full(count, target)], axis=1)
        if (row_of := divide(lengths, np.where(shapes < bound, shapes - 1, bound))) is not None:
            return row_of, shapes
        if least + more >= count:
            return None
        more = max(1, 2 * more)


def _divide_evenly(lengths: Sizes, ranks: int, bound: int) -> tuple[Indices, int]:
    """Divide sentences among few rows of at most ``bound`` tokens: the row of each, and the number of rows."""
    total = int(lengths.sum(axis=0).max())
    count = max(1, -(-total // (ranks * bound)))
    while (row_of := divide(lengths, np.full((ranks * count, 2), bound))) is None:
        count += max(1, count // 8)  # ends at the latest when each sentence has a row
    return row_of, ranks * count


def _loads(lengths: Sizes, row_of: Indices, count: int) -> Sizes:
    """Return the source and target tokens in each of some rows. Shape: -> (count, 2)."""
    sides = (np.bincount(row_of, weights=side, minlength=count) for side in lengths.T)
    return np.stack(list(sides), axis=1).astype(np.int64)
