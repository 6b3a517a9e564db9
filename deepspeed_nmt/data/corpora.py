"""The training text of a run: the sentence pairs of one or more corpora under common numbers, the *rows*.

A corpus may be segmented in several ways. Each segmentation of a pair has a row of its own, since its lengths differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt import randomness
from deepspeed_nmt.data.batching import Indices, Lengths
from deepspeed_nmt.data.corpus import Corpus, Tokens, places


@dataclass(frozen=True)
class CorpusPart:
    """A corpus of the training text.

    Attributes:
        name: of the corpus, for the log.
        segmentations: the corpus, segmented in one or more ways; each has the same pairs.
        source_tag: token in front of each source; None for none.
        target_tag: token in front of each target; None for none.
        key: part of the key of its shuffle, which tells it from other corpora.
    """

    name: str
    segmentations: tuple[Corpus, ...]
    source_tag: int | None = None
    target_tag: int | None = None
    key: int = 0

    def __len__(self) -> int:
        return len(self.segmentations[0])

    def segmentation(self, epoch: int) -> int:
        """Return the number of the segmentation that an epoch has: they follow one another."""
        return epoch % len(self.segmentations)

    def shuffled(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """Return the indices of the pairs at some positions of a shuffled epoch. Shape: (B,) -> (B,)."""
        return randomness.permuted(positions, len(self), seed, randomness.Purpose.SHUFFLE, self.key, epoch)

    def target_tokens(self, segmentation: int) -> int:
        """Return the target tokens of a segmentation, tags and EOS included."""
        tagged = self.target_tag is not None
        return self.segmentations[segmentation].target_tokens + tagged * len(self)

    @property
    def mean_target_tokens(self) -> float:
        """Target tokens of all pairs, tags and EOS included, as the mean of the segmentations."""
        return sum(map(self.target_tokens, range(len(self.segmentations)))) / len(self.segmentations)

    def all_lengths(self, segmentation: int) -> Iterator[tuple[Lengths, Lengths]]:
        """Yield source and target lengths of all pairs, tags and EOS included, for about a million at a time."""
        more = self.source_tag is not None, self.target_tag is not None
        for source, target in self.segmentations[segmentation].all_lengths():
            yield source + np.int32(more[0]), target + np.int32(more[1])


class Corpora:
    """Sentence pairs of all corpora.

    Args:
        parts: the corpora; at least one.
    """

    def __init__(self, parts: Sequence[CorpusPart]) -> None:
        self.parts = tuple(parts)
        self._corpora = [(number, corpus) for number, part in enumerate(parts) for corpus in part.segmentations]
        sizes = [len(corpus) for _, corpus in self._corpora]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._first = np.cumsum([0, *(len(part.segmentations) for part in parts)])

    @classmethod
    def of(cls, corpus: Corpus) -> Corpora:
        """Return the text of a single corpus; rows are its indices."""
        return cls([CorpusPart("train", (corpus,))])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def rows(self, part: int, segmentation: int, indices: Indices) -> Indices:
        """Return the rows of some pairs of a corpus. Shape: (B,) -> (B,)."""
        rows: Indices = indices + self._starts[self._first[part] + segmentation]
        return rows

    def source(self, row: int) -> NDArray[np.integer[Any]]:
        """Return the source tokens of a row, without EOS. Shape: -> (S-1,)."""
        number, corpus, index = self._find(row)
        tag = self.parts[number].source_tag
        return corpus.source(index) if tag is None else np.insert(corpus.source(index), 0, tag)

    def target(self, row: int) -> NDArray[np.integer[Any]]:
        """Return the target tokens of a row, without EOS. Shape: -> (T-1,)."""
        number, corpus, index = self._find(row)
        tag = self.parts[number].target_tag
        return corpus.target(index) if tag is None else np.insert(corpus.target(index), 0, tag)

    def sources(self, rows: Indices) -> Tokens:
        """Return a copy of the source tokens of some rows, tags included, without EOS. Shape: rows (B,)."""
        return self._copy_of(rows, Corpus.sources, [part.source_tag for part in self.parts])

    def targets(self, rows: Indices) -> Tokens:
        """Return a copy of the target tokens of some rows, tags included, without EOS. Shape: rows (B,)."""
        return self._copy_of(rows, Corpus.targets, [part.target_tag for part in self.parts])

    def lengths(self, rows: Indices) -> tuple[Lengths, Lengths]:
        """Return source and target lengths of some rows, tags and EOS included. Shape: (B,) -> (B,), (B,)."""
        source, target = np.empty(len(rows), dtype=np.int32), np.empty(len(rows), dtype=np.int32)
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        for place in np.unique(of_row).tolist():
            number, corpus = self._corpora[place]
            chosen = of_row == place
            sources, targets = corpus.lengths(rows[chosen] - self._starts[place])
            source[chosen] = sources + np.int32(self.parts[number].source_tag is not None)
            target[chosen] = targets + np.int32(self.parts[number].target_tag is not None)
        return source, target

    def weights_of(self, rows: Indices) -> NDArray[np.float32] | None:
        """Return the weights of some rows, 1 in corpora without; None if no corpus has weights. Shape: (B,) -> (B,).

        All segmentations of a pair have its weight.
        """
        of_part = [part.segmentations[0].weights for part in self.parts]
        if all(weights is None for weights in of_part):
            return None
        found = np.ones(len(rows), dtype=np.float32)
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        for place in np.unique(of_row).tolist():
            if (weights := of_part[self._corpora[place][0]]) is not None:
                chosen = of_row == place
                found[chosen] = weights[rows[chosen] - self._starts[place]]
        return found

    def part_of(self, rows: Indices) -> Indices:
        """Return the number of the corpus of each row. Shape: (B,) -> (B,)."""
        numbers = np.array([number for number, _ in self._corpora])
        found: Indices = numbers[np.searchsorted(self._starts, rows, side="right") - 1]
        return found

    def all_lengths(self) -> Iterator[tuple[int, Lengths, Lengths]]:
        """Yield the first row, and the source and target lengths, of about a million rows at a time, for all rows."""
        place = 0
        for part in self.parts:
            for segmentation in range(len(part.segmentations)):
                row = int(self._starts[place])
                for source, target in part.all_lengths(segmentation):
                    yield row, source, target
                    row += len(source)
                place += 1

    def _copy_of(
        self, rows: Indices, tokens_of: Callable[[Corpus, Indices], Tokens], tags: Sequence[int | None]
    ) -> Tokens:
        """Return the tokens of one side of some rows, with the tag of each row's corpus, or None."""
        if len(self._corpora) == 1 and tags[0] is None:
            return tokens_of(self._corpora[0][1], rows)
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        found, lengths = [], np.zeros(len(rows), dtype=np.int64)
        for place in np.unique(of_row).tolist():
            number, corpus = self._corpora[place]
            chosen, tag = np.flatnonzero(of_row == place), tags[number]
            tokens = tokens_of(corpus, rows[chosen] - self._starts[place])
            lengths[chosen] = tokens.lengths + (tag is not None)
            found.append((chosen, tag, tokens))
        starts, numbers = np.cumsum(lengths) - lengths, np.empty(int(lengths.sum()), dtype=np.int64)
        for chosen, tag, tokens in found:
            if tag is not None:
                numbers[starts[chosen]] = tag
            numbers[places(starts[chosen] + (tag is not None), tokens.lengths)] = tokens.numbers
        return Tokens(numbers, lengths)

    def _find(self, row: int) -> tuple[int, Corpus, int]:
        """Return the number of the corpus of a row, the corpus, and the index of the pair in it."""
        place = int(np.searchsorted(self._starts, row, side="right")) - 1 if len(self._corpora) > 1 else 0
        number, corpus = self._corpora[place]
        return number, corpus, row - int(self._starts[place])
