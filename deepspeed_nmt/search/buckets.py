"""Batches of sentences of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_ROWS_PER_TOKEN = 4
"""Bound of the rows of a batch, sentences x hypotheses, for each of its tokens. Sentences have two tokens or more, so
up to 8 hypotheses it changes nothing."""


def length_buckets(lengths: Sequence[int], max_tokens: int, width: int = 1) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, the longest first.

    With the longest first, a batch that does not fit into memory fails at once and not after an hour.

    Args:
        lengths: length of each sentence in tokens.
        max_tokens: bound of sentences times the longest of a batch; a longer sentence gets a batch of its own.
        width: hypotheses of a sentence. If there are many, a batch has fewer sentences, so that a step of the search
            needs neither more memory nor much more time.

    Yields:
        The sentences' numbers, each once.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    most = max(1, _ROWS_PER_TOKEN * max_tokens // width)
    start = 0
    while start < len(order):
        size = min(most, max(1, max_tokens // max(1, lengths[order[start]])))
        yield order[start : start + size]
        start += size
