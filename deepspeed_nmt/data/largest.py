"""The largest sentences and micro-batches of the training text."""

from __future__ import annotations

import numpy as np

from deepspeed_nmt.data.batching import BatchConfig, Indices, Lengths, divide_update
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.windows import Window
from deepspeed_nmt.errors import ConfigError

_SAMPLED_UPDATES, _SAMPLE_MARGIN = 32, 1.1
"""Updates that are divided to estimate the size of micro-batches, and a factor for larger ones among the others."""


def check_lengths(corpora: Corpora, config: BatchConfig) -> int:
    """Refuse text with a sentence larger than a micro-batch, before training instead of in the middle of it.

    Returns:
        Tokens of the longest sentence.

    Raises:
        ConfigError: if there is one; the message names the longest sentence.
    """
    longest_of_all = 0
    for part in corpora.parts:
        worst = found = row = 0
        for segmentation in range(len(part.segmentations)):
            row = 0
            for source, target in part.all_lengths(segmentation):
                longest = np.maximum(source, target)
                if int(longest.max()) > found:
                    worst, found = row + int(longest.argmax()), int(longest.max())
                row += len(source)
        if found > config.micro_tokens:
            where = f" of {part.name}" if len(corpora.parts) > 1 else ""
            shorter = f", or prepare the data with --max-length {config.micro_tokens - 1}"
            raise ConfigError(
                f"batch.micro_tokens must be at least the longest training sentence, pair {worst + 1}{where} with "
                f"{found} tokens, but is {config.micro_tokens}; raise it{shorter if config.micro_tokens > 16 else ''}"
            )
        longest_of_all = max(longest_of_all, found)
    return longest_of_all


def largest_micro_batch(updates: Window, corpora: Corpora, ranks: int, config: BatchConfig) -> Indices:
    """Choose the sentences of the largest micro-batch that can be expected of any update.

    A sample of the updates gives its size: ``micro_tokens``, or less if updates are small or are divided finer
    because of padding. Of all sentences that fill at least 97% of that size, the longest are chosen.

    Args:
        updates: some updates of the run.
        corpora: the training text.
        ranks: number of data-parallel ranks.
        config: bounds of a micro-batch.

    Returns:
        Rows of the training text, the longest sentences first. Shape: (B,)
    """
    sample = range(0, len(updates), max(1, len(updates) // _SAMPLED_UPDATES))
    lengths = np.maximum(updates.source, updates.target)
    divided = (divide_update(updates[update], updates.source, updates.target, ranks, config) for update in sample)
    seen = max(
        len(group) * int(lengths[group].max())
        for update in divided
        for groups in update
        for group in groups
        if len(group)
    )
    counts: Indices = np.zeros(1, dtype=np.int64)
    for _, source, target in corpora.all_lengths():
        more = np.bincount(np.maximum(source, target))
        counts = np.pad(counts, (0, max(0, len(more) - len(counts))))
        counts[: len(more)] += more
    budget = max(len(counts) - 1, min(config.micro_tokens, int(_SAMPLE_MARGIN * seen)))
    # Candidates begin with the first sentence of a length, in order of length, and hold as many as fit.
    length = np.flatnonzero(counts)[::-1]
    rows = np.minimum(budget // length, np.cumsum(counts[length][::-1])[::-1])
    sizes = rows * length
    first = int((sizes >= 0.97 * sizes.max()).argmax())  # attention makes long sentences cost more than short ones
    chosen = int(rows[first])
    last = first + int(np.searchsorted(np.cumsum(counts[length[first:]]), chosen))
    return _rows_of_lengths(corpora, int(length[last]), int(length[first]))[:chosen]


def _rows_of_lengths(corpora: Corpora, low: int, high: int) -> Indices:
    """Return the rows whose longer side has ``low`` to ``high`` tokens, the longest first."""
    rows: list[Indices] = []
    lengths: list[Lengths] = []
    for row, source, target in corpora.all_lengths():
        longest = np.maximum(source, target)
        chosen = np.flatnonzero((longest >= low) & (longest <= high))
        rows.append(chosen + row)
        lengths.append(longest[chosen])
    order: Indices = np.concatenate(rows)[np.argsort(-np.concatenate(lengths).astype(np.int64), kind="stable")]
    return order
