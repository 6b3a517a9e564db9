"""The order of the training text: which sentences make which update.

It is a pure function of (lengths, seed, epoch, update_tokens), and does not depend on GPUs, so a run resumed on
other hardware makes the same updates. Updates are made window by window, so that a run over a billion pairs starts,
and resumes anywhere, in seconds:

1. The sentences are shuffled by a permutation that needs no table, and divided into windows of equally many. All
   windows have equally many updates, so the window of an update is known without making those before it.
2. A window's sentences are sorted by length and divided into *grains* of about ``grain_tokens`` target tokens. The
   grains are shuffled, and each update takes the next few. Thus an update is a mixture of lengths, unless it has only
   one or two grains.

How an update is divided into micro-batches is the matter of :mod:`deepspeed_nmt.data.batching`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from deepspeed_nmt import randomness
from deepspeed_nmt.data.batching import by_length, grain_tokens
from deepspeed_nmt.data.corpus import Corpora, Indices, Lengths


@dataclass(frozen=True)
class Window:
    """Sentences of some updates, in the order of the updates.

    ``rows`` are numbers of sentences in the training text; update u has those of ``bounds[u] : bounds[u + 1]``.
    Shape: rows, source and target lengths (sentences,), bounds (updates + 1,).
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
        """Divide sentences, at least as many as there are updates, into updates. Shape of rows: (sentences,).

        They are sorted by length and divided into grains of about equal target tokens. The grains are shuffled by the
        key, and each update takes the next few.
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


_WINDOW_UPDATES = 256
"""Updates in a window, enough to find sentences of nearly equal length in both languages."""
_WINDOW_TOKENS, _LEAST_UPDATES = 1 << 24, 8
"""Target tokens of a window from which on it has fewer updates, and the fewest it then has."""
_SAMPLED_TOKENS, _SAMPLED_WINDOWS = 1 << 22, 8
"""Target tokens that stand for those of a run, and the most windows with them."""


@dataclass(frozen=True)
class Cursor:
    """A position in the data: the epoch, and the next update within it, both from 0."""

    epoch: int = 0
    update: int = 0


@dataclass(frozen=True)
class UpdatePlace:
    """The window of an update, by its key for :meth:`UpdateOrder.window`, and its index there."""

    window: tuple[int, int]
    index: int


def window_updates(update_tokens: int) -> int:
    """Compute the number of updates in a window: 256, or fewer if they are so large that a window takes seconds."""
    return max(_LEAST_UPDATES, min(_WINDOW_UPDATES, _WINDOW_TOKENS // update_tokens))


class UpdateOrder(ABC):
    """A division of the training text into updates of ``update_tokens`` target tokens, by the seed of the run."""

    def __init__(self, corpora: Corpora, seed: int, update_tokens: int) -> None:
        self.corpora, self.seed, self.update_tokens = corpora, seed, update_tokens

    @abstractmethod
    def updates_in(self, epoch: int) -> int:
        """Return the number of updates of an epoch."""

    @abstractmethod
    def place(self, cursor: Cursor, number: int) -> UpdatePlace:
        """Return the place of an update by its position in the data, and its number in the run, from 1."""

    @abstractmethod
    def window(self, key: tuple[int, int]) -> Window:
        """Make a window."""

    @abstractmethod
    def sample(self) -> Window:
        """Return updates that stand for those of the whole run, the same at any time."""

    def epochs(self, cursor: Cursor, number: int) -> list[float]:
        """Return the epochs of each corpus before an update; arguments as of :meth:`place`."""
        return [cursor.epoch + cursor.update / self.updates_in(cursor.epoch)] * len(self.corpora.parts)

    def after(self, cursor: Cursor) -> Cursor:
        """Return the position after an update."""
        if cursor.update + 1 < self.updates_in(cursor.epoch):
            return Cursor(cursor.epoch, cursor.update + 1)
        return Cursor(cursor.epoch + 1, 0)


class EpochOrder(UpdateOrder):
    """Epochs of one corpus: every sentence is in exactly one update of each."""

    def updates_in(self, epoch: int) -> int:
        """Return the number of updates of an epoch."""
        windows, updates = self._shape(epoch)
        return windows * updates

    def place(self, cursor: Cursor, number: int) -> UpdatePlace:
        """Return the place of an update, which its position in the data decides."""
        _, updates = self._shape(cursor.epoch)
        return UpdatePlace((cursor.epoch, cursor.update // updates), cursor.update % updates)

    def window(self, key: tuple[int, int]) -> Window:
        """Make a window of an epoch; its key is the epoch and its number there."""
        epoch, number = key
        windows, updates = self._shape(epoch)
        part = self.corpora.parts[0]
        pairs = len(part)
        positions = np.arange(pairs * number // windows, pairs * (number + 1) // windows)
        indices = part.shuffled(positions, self.seed, epoch)
        rows = self.corpora.rows(0, part.segmentation(epoch), indices)
        drawn = (self.seed, randomness.Purpose.GRAINS, epoch, number)
        return Window.divided(rows, self.corpora.lengths(rows), updates, self.update_tokens, *drawn)

    def sample(self) -> Window:
        """Return the first windows: one, or several if they are small."""
        windows, updates = self._shape(0)
        number = min(windows, _SAMPLED_WINDOWS, max(1, _SAMPLED_TOKENS // (updates * self.update_tokens)))
        return Window.joined([self.window((0, place)) for place in range(number)])

    def _shape(self, epoch: int) -> tuple[int, int]:
        """Return the number of windows of an epoch, and of updates in each."""
        part = self.corpora.parts[0]
        updates = part.target_tokens(part.segmentation(epoch)) / self.update_tokens
        windows = max(1, min(round(updates / window_updates(self.update_tokens)), len(part)))
        return windows, max(1, min(round(updates / windows), len(part) // windows))
