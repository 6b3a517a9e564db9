"""Batch arithmetic: the sentences of each update, and the micro-batches of each rank.

The updates of an epoch are a pure function of (lengths, seed, epoch, update_tokens). They do not depend on GPUs, so a
run resumed on other hardware makes the same updates. Ranks and memory matter only when an update is cut.

1. The corpus is shuffled and taken in windows.
2. Within a window, sentences are sorted by length and cut into *grains* of about ``grain_tokens`` target tokens.
3. The window's grains are shuffled, and each update takes the next few. Thus an update is a mixture of lengths,
   unless it has only one or two grains.
4. In the padded layout an update is sorted by length and cut into ranks x n micro-batches of similar padded size,
   with the smallest n that keeps every one within ``micro_tokens`` and padding within ``max_padding``. For the packed
   layout see :mod:`deepspeed_nmt.data.packing`.

``micro_tokens`` counts rows x max(longest source, longest target).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepspeed_nmt import randomness
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Config

Lengths = NDArray[np.int32]
Indices = NDArray[np.int64]

MAX_TOKENS = 1 << 30
"""Bound on the tokens of a batch or an update, far below those at which 64-bit sums of them overflow."""
_WINDOW_UPDATES = 256
"""Updates in a window, enough to find sentences of nearly equal length in both languages."""
_SAMPLED_UPDATES, _SAMPLE_MARGIN = 32, 1.1
"""Updates that are cut to estimate the size of micro-batches, and a factor for larger ones among the others."""


class BatchConfig(Config):
    """Amounts of text in an update and on a GPU."""

    update_tokens: int = Field(
        default=32768,
        ge=1,
        le=MAX_TOKENS,
        description="target tokens in one update, over all GPUs (the papers' 8 x 4096)",
    )
    micro_tokens: int = Field(
        default=4096,
        ge=1,
        le=MAX_TOKENS,
        description="tokens a GPU holds at once, padding included: of the longer of the two sides",
    )
    layout: Literal["auto", "padded", "packed"] = Field(
        default="auto",
        description="padded: a row for each sentence; packed: sentences end to end, without padding; auto: packed on "
        "GPUs from sm_80 up in 16 bit where the model permits it",
    )
    max_padding: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="share of padding above which an update is cut finer; for the padded layout",
    )


def grain_tokens(update_tokens: int) -> int:
    """Compute the target tokens of a grain: an eighth of an update within 512 to 2048, at most an update."""
    return min(update_tokens, max(512, min(2048, update_tokens // 8)))


@dataclass(frozen=True)
class EpochUpdates:
    """The updates of one epoch.

    Attributes:
        order: sentence indices. Shape: (sentences,)
        bounds: update u is ``order[bounds[u] : bounds[u + 1]]``. Shape: (updates + 1,)
    """

    order: Indices
    bounds: Indices

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, update: int) -> Indices:
        return self.order[self.bounds[update] : self.bounds[update + 1]]


def epoch_updates(source: Lengths, target: Lengths, seed: int, epoch: int, update_tokens: int) -> EpochUpdates:
    """Divide the sentences of an epoch into updates; every sentence is in exactly one.

    Args:
        source: source lengths, EOS included. Shape: (sentences,)
        target: target lengths, EOS included. Shape: (sentences,)
        seed: seed of the run.
        epoch: number of the epoch, from 0.
        update_tokens: target tokens in one update.
    """
    shuffled = randomness.permutation(len(target), seed, randomness.Purpose.SHUFFLE, epoch)
    grain = grain_tokens(update_tokens)
    window_of = (np.cumsum(target[shuffled], dtype=np.int64) - 1) // (_WINDOW_UPDATES * update_tokens)
    cuts = np.flatnonzero(np.diff(window_of)) + 1
    pieces: list[Indices] = []
    sizes: list[Indices] = []
    for number, window in enumerate(np.split(shuffled, cuts)):
        window = window[by_length(source[window], target[window])]
        grain_of = (np.cumsum(target[window], dtype=np.int64) - 1) // grain
        _, starts, counts = np.unique(grain_of, return_index=True, return_counts=True)
        drawn = randomness.permutation(len(starts), seed, randomness.Purpose.GRAINS, epoch, number)
        pieces.extend(window[starts[g] : starts[g] + counts[g]] for g in drawn)
        sizes.append(counts[drawn])
    ends = np.cumsum(np.concatenate(sizes))
    grains_per_update = max(1, update_tokens // grain)
    inner = ends[grains_per_update - 1 : -1 : grains_per_update]
    bounds = np.concatenate([[0], inner, ends[-1:]]).astype(np.int64)
    return EpochUpdates(np.concatenate(pieces), bounds)


def largest_micro_batch(
    updates: EpochUpdates, source: Lengths, target: Lengths, ranks: int, config: BatchConfig
) -> Indices:
    """Choose the sentences of the largest micro-batch that can be expected of any update.

    A sample of the updates gives its size: ``micro_tokens``, or less if updates are small or are cut finer because of
    padding. Of all sentences that fill at least 97% of that size, the longest are chosen.

    Args:
        updates: updates of any epoch.
        source: source lengths, EOS included. Shape: (sentences,)
        target: target lengths, EOS included. Shape: (sentences,)
        ranks: number of data-parallel ranks.
        config: bounds of a micro-batch.

    Returns:
        Sentence indices, the longest first. Shape: (B,)
    """
    longest = np.maximum(source, target).astype(np.int64)
    sample = range(0, len(updates), max(1, len(updates) // _SAMPLED_UPDATES))
    cuts = (cut_update(updates[update], source, target, ranks, config) for update in sample)
    seen = max(
        len(group) * int(longest[group].max()) for cut in cuts for groups in cut for group in groups if len(group)
    )
    budget = max(int(longest.max()), min(config.micro_tokens, int(_SAMPLE_MARGIN * seen)))
    order: Indices = np.argsort(-longest, kind="stable")
    # Candidates are neighbours in this order: from each sentence on, as many as fit.
    rows = np.minimum(budget // longest[order], np.arange(len(order), 0, -1))
    sizes = rows * longest[order]
    first = int((sizes >= 0.97 * sizes.max()).argmax())  # attention makes long sentences cost more than short ones
    return order[first : first + int(rows[first])]


def by_length(source: Lengths, target: Lengths) -> Indices:
    """Sort sentences by target length, and those of equal target length by source length.

    Source lengths rise for even target lengths and fall for odd ones, which keeps neighbours similar in *both*
    lengths.
    """
    order: Indices = np.lexsort((np.where(target % 2 == 0, source, -source), target))
    return order


def cut_update(
    indices: Indices, source: Lengths, target: Lengths, ranks: int, config: BatchConfig
) -> list[list[Indices]]:
    """Cut an update's sentences into micro-batches, equally many for every rank.

    Args:
        indices: sentences of the update. Shape: (sentences,)
        source: source lengths of the corpus, EOS included. Shape: (corpus,)
        target: target lengths of the corpus, EOS included. Shape: (corpus,)
        ranks: number of data-parallel ranks.
        config: bounds of a micro-batch.

    Returns:
        For each rank the indices of each micro-batch's sentences; the last ones may be empty.

    Raises:
        ConfigError: if a single sentence is larger than ``micro_tokens``.
    """
    indices = indices[by_length(source[indices], target[indices])]
    s, t = source[indices].astype(np.int64), target[indices].astype(np.int64)
    longest = int(max(s.max(), t.max()))
    if longest > config.micro_tokens:
        raise ConfigError(
            f"batch.micro_tokens must be at least the longest sentence, which has {longest} tokens, but is "
            f"{config.micro_tokens}; raise it, or prepare the data with --max-length {config.micro_tokens - 1}"
        )
    count = max(1, -(-int(np.maximum(s, t).sum()) // (ranks * config.micro_tokens)))
    while True:
        bounds = _balanced_cut(s, t, ranks * count)
        if _padded(s, t, bounds).max() > config.micro_tokens:
            # The search for the smallest size ends near it, perhaps above a bound that can be kept.
            exact = _greedy_cut(s, t, config.micro_tokens, ranks * count)
            bounds = bounds if exact is None else exact
        if _padded(s, t, bounds).max() <= config.micro_tokens and (
            _padding(s, t, bounds) <= config.max_padding or ranks * count >= len(indices)
        ):
            break
        count += max(1, count // 8)
    groups = np.split(indices, bounds[1:-1])
    empty = indices[:0]
    groups.extend([empty] * (ranks * count - len(groups)))
    # Neighbours in length go to different ranks, so that ranks have similar work at the same time.
    return [groups[rank::ranks] for rank in range(ranks)]


def _balanced_cut(s: Indices, t: Indices, groups: int) -> Indices:
    """Cut into at most ``groups`` contiguous groups whose largest padded size is (nearly) as small as possible."""
    low, high = int(np.maximum(s, t).max()), int(max(s.max(), t.max())) * len(s)
    best = np.array([0, len(s)], dtype=np.int64) if groups == 1 else None
    while low < high:
        middle = (low + high) // 2
        bounds = _greedy_cut(s, t, middle, groups)
        if bounds is None:
            low = middle + 1
        else:
            high, best = middle, bounds
            if high - low < high // 64:
                break
    if best is None:
        best = _greedy_cut(s, t, high, groups)
        assert best is not None
    return best


def _greedy_cut(s: Indices, t: Indices, budget: int, groups: int) -> Indices | None:
    """Fill groups up to ``budget`` padded tokens; return None if more than ``groups`` are needed."""
    bounds = [0]
    while bounds[-1] < len(s):
        if len(bounds) > groups:
            return None
        start = bounds[-1]
        # No group is longer than if it held only sentences as short as its first (t is sorted).
        stop = min(len(s), start + budget // int(t[start]) + 1)
        longest = np.maximum.accumulate(np.maximum(s[start:stop], t[start:stop]))
        sizes = longest * np.arange(1, stop - start + 1)
        bounds.append(start + max(1, int(np.searchsorted(sizes, budget, side="right"))))
    return np.array(bounds, dtype=np.int64)


def _padded(s: Indices, t: Indices, bounds: Indices) -> Indices:
    """Compute rows x max(longest source, longest target) of each group."""
    longest = np.maximum(np.maximum.reduceat(s, bounds[:-1]), np.maximum.reduceat(t, bounds[:-1]))
    sizes: Indices = longest * np.diff(bounds)
    return sizes


def _padding(s: Indices, t: Indices, bounds: Indices) -> float:
    """Compute the share of positions, source and target together, that hold padding."""
    widths = np.maximum.reduceat(s, bounds[:-1]) + np.maximum.reduceat(t, bounds[:-1])
    return 1.0 - float(s.sum() + t.sum()) / float((widths * np.diff(bounds)).sum())


def check_lengths(source: Lengths, target: Lengths, config: BatchConfig) -> None:
    """Refuse a corpus with a sentence larger than a micro-batch, before training instead of in the middle of it.

    Raises:
        ConfigError: if there is one; the message names the longest sentence.
    """
    longest = np.maximum(source, target)
    if len(longest) and int(longest.max()) > config.micro_tokens:
        worst = int(longest.argmax())
        shorter = f", or prepare the data with --max-length {config.micro_tokens - 1}"
        raise ConfigError(
            f"batch.micro_tokens must be at least the longest training sentence, pair {worst + 1} with "
            f"{int(longest.max())} tokens, but is {config.micro_tokens}; raise it"
            f"{shorter if config.micro_tokens > 16 else ''}"
        )


def shares(count: int, ranks: int) -> Sequence[range]:
    """Divide 0..count-1 into contiguous ranges of nearly equal size, one for each rank."""
    bounds = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]
