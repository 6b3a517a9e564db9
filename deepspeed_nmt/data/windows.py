"""A window: some sentences, divided into updates of nearly equal size that mix lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_nmt import randomness
from deepspeed_nmt.data.batching import Indices, Lengths, by_length, grain_tokens


@dataclass(frozen=True)
class Window:
    """Sentences of some updates, in the order of the updates.

    Attributes:
        rows: numbers of the sentences in the training text. Shape: (sentences,)
        source: their source lengths. Shape: (sentences,)
        target: their target lengths. Shape: (sentences,)
        bounds: update u has the sentences ``bounds[u] : bounds[u + 1]``. Shape: (updates + 1,)
    """

    rows: Indices
    source: Lengths
    target: Lengths
    bounds: Indices

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, update: int) -> Indices:
        """Return the positions of an update's sentences in the window."""
        if not 0 <= update < len(self):
            raise IndexError(f"update {update} of {len(self)}")
        return np.arange(self.bounds[update], self.bounds[update + 1])

    @classmethod
    def divided(
        cls, rows: Indices, lengths: tuple[Lengths, Lengths], updates: int, update_tokens: int, *key: int
    ) -> Window:
        """Divide sentences into updates.

        They are sorted by length and divided into grains of about equal target tokens. The grains are shuffled, and
        each update takes the next few.

        Args:
            rows: numbers of the sentences; at least as many as there are updates. Shape: (sentences,)
            lengths: source and target length of each.
            updates: number of updates.
            update_tokens: target tokens of an update, which decide the size of grains.
            key: of the shuffle.
        """
        source, target = lengths
        order = by_length(source, target)
        ends = np.cumsum(target[order], dtype=np.int64)
        grains = updates * max(1, update_tokens // grain_tokens(update_tokens))
        grain_of = (ends - 1) * grains // ends[-1]
        starts = np.concatenate([[0], np.flatnonzero(np.diff(grain_of)) + 1])
        if len(starts) < updates:  # sentences are longer than updates
            starts = np.arange(updates) * len(rows) // updates
        counts = np.diff(starts, append=len(rows))
        drawn = randomness.permutation(len(starts), *key)
        ends = np.cumsum(counts[drawn])
        first = np.repeat(starts[drawn] - (ends - counts[drawn]), counts[drawn])
        order = order[first + np.arange(len(rows))]
        cuts = np.arange(updates + 1) * len(starts) // updates
        bounds = np.concatenate([[0], ends])[cuts].astype(np.int64)
        return cls(rows[order], source[order], target[order], bounds)

    @classmethod
    def joined(cls, windows: list[Window]) -> Window:
        """Return one window with the updates of several."""
        ends = np.cumsum([0, *(len(window.rows) for window in windows)])
        bounds = [window.bounds[1:] + end for window, end in zip(windows, ends, strict=False)]
        return cls(
            np.concatenate([window.rows for window in windows]),
            np.concatenate([window.source for window in windows]),
            np.concatenate([window.target for window in windows]),
            np.concatenate([[0], *bounds]).astype(np.int64),
        )
