"""Batch arithmetic: micro-batches of the padded layout.

Which sentences make which update is decided by :mod:`deepspeed_nmt.data.update_order`, and does not depend on
GPUs. Ranks and memory matter only when an update is divided. In the padded layout it is sorted by length and divided
into ranks x n micro-batches of similar padded size, with the smallest n that keeps every one within ``micro_tokens``
and padding within ``max_padding``. For the packed layout see :mod:`deepspeed_nmt.data.packing`.

``micro_tokens`` counts rows x max(longest source, longest target).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from deepspeed_nmt.data.corpus import Indices, Lengths
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Section, number_or_auto

MAX_TOKENS = 1 << 30
"""Bound on the tokens of a batch or an update, far below those at which 64-bit sums of them overflow."""


class BatchConfig(Section):
    """Amounts of text in an update and on a GPU."""

    update_tokens: int = Field(
        default=32768,
        ge=1,
        le=MAX_TOKENS,
        description="target tokens in one update, over all GPUs (the papers' 8 x 4096)",
    )
    micro_tokens: Annotated[int | Literal["auto"], number_or_auto(1, MAX_TOKENS)] = Field(
        default=4096,
        description="tokens a GPU holds at once, padding included: of the longer of the two sides; auto: the largest "
        "power of two up to 65,536 that fits into a GPU and is at most twice its share of an update, and on a CPU "
        "4,096",
    )
    layout: Literal["auto", "padded", "packed"] = Field(
        default="auto",
        description="padded: a row for each sentence; packed: sentences end to end, without padding; auto: packed on "
        "GPUs in 16 bit where the model permits it",
    )
    max_padding: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description="share of padding above which an update is divided more finely; for the padded layout",
    )

    @property
    def bound(self) -> int:
        """``micro_tokens``; their default while "auto" is not resolved."""
        default: int = BatchConfig.model_fields["micro_tokens"].default
        return default if self.micro_tokens == "auto" else self.micro_tokens


def grain_tokens(update_tokens: int) -> int:
    """Compute the target tokens of a grain: an eighth of an update within 512 to 2048, at most an update."""
    return min(update_tokens, max(512, min(2048, update_tokens // 8)))


def by_length(source: Lengths, target: Lengths) -> Indices:
    """Sort sentences by target length, and those of equal target length by source length.

    Source lengths rise for even target lengths and fall for odd ones, which keeps neighbours similar in *both*
    lengths.
    """
    order: Indices = np.lexsort((np.where(target % 2 == 0, source, -source), target))
    return order


def lengths_of(indices: Indices, source: Lengths, target: Lengths, config: BatchConfig) -> Indices:
    """Return source and target lengths of sentences that all fit into a micro-batch. Shape: -> (sentences, 2)."""
    lengths: Indices = np.stack([source[indices], target[indices]], axis=1).astype(np.int64)
    if (longest := int(lengths.max())) > config.bound:
        raise ConfigError(
            f"a sentence has {longest} tokens, but batch.micro_tokens is {config.bound}; raise it, or "
            f"prepare the data with --max-length {config.bound - 1}"
        )
    return lengths


def divide_update(
    indices: Indices, source: Lengths, target: Lengths, ranks: int, config: BatchConfig
) -> list[list[Indices]]:
    """Divide an update's sentences into micro-batches, equally many for every rank; the last ones may be empty.

    Args:
        indices: sentences of the update. Shape: (sentences,)
        source: source lengths of the corpus, EOS included, and ``target`` those of the target. Shape: (corpus,)

    Raises:
        ConfigError: if a single sentence is larger than ``micro_tokens``.
    """
    indices = indices[by_length(source[indices], target[indices])]
    s, t = np.ascontiguousarray(lengths_of(indices, source, target, config).T)
    count = max(1, -(-int(np.maximum(s, t).sum()) // (ranks * config.bound)))
    while True:
        bounds = _balanced_cut(s, t, ranks * count)
        if _padded(s, t, bounds).max() > config.bound:
            # The search for the smallest size ends near it, perhaps above a bound that can be kept.
            exact = _greedy_cut(s, t, config.bound, ranks * count)
            bounds = bounds if exact is None else exact
        if _padded(s, t, bounds).max() <= config.bound and (
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
    best = np.array([0, len(s)], dtype=np.int64)  # of size ``high`` at most
    while low < high:
        middle = (low + high) // 2
        bounds = _greedy_cut(s, t, middle, groups)
        if bounds is None:
            low = middle + 1
        else:
            high, best = middle, bounds
            if high - low < high // 64:
                break
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
