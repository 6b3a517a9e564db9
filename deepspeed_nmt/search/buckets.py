"""Batches of sentences of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def length_buckets(lengths: Sequence[int], max_tokens: int, width: int = 1) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, the longest first.

    With the longest first, a batch that does not fit into memory fails at once and not after an hour.

    Args:
        lengths: length of each sentence in tokens.
        max_tokens: bound of sentences times the longest of a batch; a longer sentence gets a batch of its own.
        width: hypotheses of a sentence. Sentences times hypotheses have the same bound, so that a step of the search
            has an end soon, and fits into memory.

    Yields:
        The sentences' numbers, each once.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(1, width, lengths[order[start]]))
        yield order[start : start + size]
        start += size
