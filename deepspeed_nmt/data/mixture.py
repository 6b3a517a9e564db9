"""Mixtures: updates that are drawn from several corpora, each with a share of the target tokens.

Each corpus is a stream of its epochs, one after another, each shuffled anew. The windows of a mixture take the next
sentences of each stream, as many as its share requires; within a window, sentences of all corpora are divided into
updates together. What a window takes is a function of its first update alone, so the updates of a mixture are a pure
function of (corpora, weights, seed, update).

Weights may change at given updates. They may also change when a run is resumed; then a new *phase* begins, in which
each corpus continues where it was. After a rollback one begins with the sentences after the window that failed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from deepspeed_nmt import randomness
from deepspeed_nmt.data.corpus import Corpora, Indices
from deepspeed_nmt.data.update_order import Cursor, UpdateOrder, UpdatePlace, Window, window_updates
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Config, Section

_SAMPLED_SEGMENTS = 4
"""Most segments whose first window stands for the run."""


class Weight(Config):
    """Weight of a corpus from update ``first`` on, up to ``last`` or without end."""

    value: float = Field(gt=0.0, allow_inf_nan=False)
    first: int = Field(default=1, ge=1)
    last: int | None = None

    def holds(self, update: int) -> bool:
        """Return True if it is the weight in an update."""
        return self.first <= update and (self.last is None or update <= self.last)

    def __str__(self) -> str:
        when = "" if (self.first, self.last) == (1, None) else f":{self.first}-{self.last or ''}"
        return f"{self.value:g}{when}"


class Stream(Config):
    """A corpus in a phase, identified with its tag by ``corpus``.

    ``tokens`` are the target tokens of its sentence pairs, the mean of its segmentations. ``weights`` are in order of
    updates; none in a phase without the corpus. ``start`` counts the sentences of its stream before the phase.
    """

    corpus: str
    pairs: int
    tokens: float
    weights: tuple[Weight, ...]
    start: int = 0

    @property
    def mean(self) -> float:
        """Mean target tokens of a sentence."""
        return self.tokens / self.pairs


class Phase(Config):
    """Updates with one mixture, from ``first`` on; ``absent`` are the corpora that the run had before it."""

    first: int
    temperature: float
    tag: str = "source"
    streams: tuple[Stream, ...]
    absent: tuple[Stream, ...] = ()

    def same_mixture(self, other: Phase) -> bool:
        """Return True if the other phase draws from the same corpora with the same shares and tags."""
        mine, theirs = ([(s.corpus, s.weights) for s in phase.streams] for phase in (self, other))
        return (self.temperature, self.tag, mine) == (other.temperature, other.tag, theirs)


class MixtureConfig(Section):
    """Training on several corpora."""

    temperature: float = Field(
        default=0.0,
        description="a corpus' share of the target tokens is its weight times its size to the power of "
        "1/temperature: 1 is in proportion to the sizes; 0: the weights alone; otherwise at least 0.1",
    )
    tag: Literal["source", "target"] = Field(
        default="source", description="side in front of which the tag of a corpus stands"
    )

    @field_validator("temperature")
    @classmethod
    def _is_in_range(cls, temperature: float) -> float:
        if temperature != 0.0 and not temperature >= 0.1:
            raise ValueError(f"{temperature:g} is neither 0 nor at least 0.1")
        return temperature


@dataclass(frozen=True)
class Segment:
    """Updates of a phase with constant shares of the target tokens, from ``first`` to before ``end``, if it ends.

    ``starts`` counts the sentences of each stream before ``first``. Shape of shares and starts: (corpora,).
    """

    first: int
    end: int | None
    shares: tuple[float, ...]
    starts: tuple[float, ...]


class Shares:
    """Shares of the corpora in each update of a phase, and their positions; weights change between ``segments``."""

    def __init__(self, phase: Phase, update_tokens: int) -> None:
        self.phase = phase
        self.update_tokens = update_tokens
        weights = [weight for stream in phase.streams for weight in stream.weights]
        changes = {phase.first, *(w.first for w in weights), *(w.last + 1 for w in weights if w.last)}
        firsts = sorted(change for change in changes if change >= phase.first)
        self.segments: list[Segment] = []
        starts = tuple(float(stream.start) for stream in phase.streams)
        for first, end in zip(firsts, [*firsts[1:], None], strict=True):
            self.segments.append(Segment(first, end, self._at(first), starts))
            if end is not None:
                starts = self._advanced(self.segments[-1], end)

    def check(self, max_updates: int) -> None:
        """Raise a ConfigError if an update up to ``max_updates`` has no corpus."""
        for segment in self.segments:
            if segment.first <= max_updates and not any(segment.shares):
                until = "on" if segment.end is None else f"to {segment.end - 1:,}"
                raise ConfigError(
                    f"from update {segment.first:,} {until} no --data has a weight; extend a schedule, as in =1:1- "
                    "for all updates"
                )

    def segment(self, update: int) -> int:
        """Return the number of the segment of an update."""
        return bisect_right(self.segments, update, key=lambda segment: segment.first) - 1

    def window_updates(self, segment: Segment) -> int:
        """Compute the number of updates in a window: so few that none has a sentence much more often than once.

        Copies of a sentence have the same lengths, so they would come together in one update.
        """
        whole = [
            stream.tokens / (share * self.update_tokens)
            for stream, share in zip(self.phase.streams, segment.shares, strict=True)
            if share
        ]
        return max(1, min(window_updates(self.update_tokens), int(min(whole, default=1.0))))

    def window(self, update: int) -> tuple[int, int]:
        """Return the key of the window of an update: the number of its segment, and its own number there."""
        segment = self.segments[which := self.segment(update)]
        return which, (update - segment.first) // self.window_updates(segment)

    def updates_of(self, window: tuple[int, int]) -> tuple[int, int]:
        """Return the first update of a window, and the one after its last."""
        which, number = window
        segment = self.segments[which]
        size = self.window_updates(segment)
        first = segment.first + number * size
        return first, first + size if segment.end is None else min(first + size, segment.end)

    def positions(self, update: int, segment: Segment | None = None) -> list[int]:
        """Return the sentences of each stream before an update, of a segment or just after it."""
        segment = segment or self.segments[self.segment(update)]
        return [int(position) for position in self._advanced(segment, update)]

    def _advanced(self, segment: Segment, update: int) -> tuple[float, ...]:
        tokens = (update - segment.first) * self.update_tokens
        streams = zip(segment.starts, segment.shares, self.phase.streams, strict=True)
        return tuple(start + share * tokens / stream.mean for start, share, stream in streams)

    def _at(self, update: int) -> tuple[float, ...]:
        """Return the share of each corpus in an update; all are 0 if none has a weight."""
        streams, temperature = self.phase.streams, self.phase.temperature
        total = sum(stream.tokens for stream in streams)
        sizes = [(stream.tokens / total) ** (1.0 / temperature) if temperature else 1.0 for stream in streams]
        values = [
            size * next((weight.value for weight in stream.weights if weight.holds(update)), 0.0)
            for size, stream in zip(sizes, streams, strict=True)
        ]
        return tuple(value / (sum(values) or 1.0) for value in values)


class MixtureOrder(UpdateOrder):
    """Updates of a mixture. An epoch has as many target tokens as all its corpora together.

    ``corpora`` has parts in the order of the phase's streams. If an update up to ``max_updates`` has no corpus, or
    updates are smaller than sentences, that is a ConfigError.
    """

    def __init__(self, corpora: Corpora, seed: int, update_tokens: int, phase: Phase, max_updates: int) -> None:
        super().__init__(corpora, seed, update_tokens)
        self.shares = Shares(phase, update_tokens)
        self.shares.check(max_updates)
        self._total = sum(stream.tokens for stream in phase.streams)
        # The numbers of sentences in a window are rounded down, by one of each corpus at most.
        least = (1 + len(phase.streams)) * max(stream.mean for stream in phase.streams)
        if update_tokens < least:
            raise ConfigError(
                f"batch.update_tokens is {update_tokens}, but a sentence of each --data and another have "
                f"{math.ceil(least)} tokens; raise it"
            )

    def updates_in(self, epoch: int) -> int:
        """Return the number of updates of an epoch, the same for all."""
        return max(1, round(self._total / self.update_tokens))

    def place(self, cursor: Cursor, number: int) -> UpdatePlace:
        """Return the place of an update, which its number in the run decides."""
        window = self.shares.window(number)
        return UpdatePlace(window, number - self.shares.updates_of(window)[0])

    def window(self, key: tuple[int, int]) -> Window:
        """Make a window; see :meth:`Shares.window` for its key."""
        segment = self.shares.segments[key[0]]
        first, stop = self.shares.updates_of(key)
        bounds = zip(*(self.shares.positions(update, segment) for update in (first, stop)), strict=True)
        rows = np.concatenate([self._rows(part, *ends) for part, ends in enumerate(bounds)])
        # Sentences of equal lengths stay in this order, in which no corpus may come first.
        rows = rows[randomness.permutation(len(rows), self.seed, randomness.Purpose.SHUFFLE, first)]
        drawn = (self.seed, randomness.Purpose.GRAINS, first)
        return Window.divided(rows, self.corpora.lengths(rows), stop - first, self.update_tokens, *drawn)

    def sample(self) -> Window:
        """Return the first window of each of the first segments."""
        segments = [which for which, segment in enumerate(self.shares.segments) if any(segment.shares)]
        return Window.joined([self.window((which, 0)) for which in segments[:_SAMPLED_SEGMENTS]])

    def epochs(self, cursor: Cursor, number: int) -> list[float]:
        """Return the epochs of each corpus before an update."""
        positions = self.shares.positions(number)
        return [position / len(part) for position, part in zip(positions, self.corpora.parts, strict=True)]

    def _rows(self, part: int, start: int, stop: int) -> Indices:
        """Return the rows of a piece of a corpus' stream."""
        corpus = self.corpora.parts[part]
        rows: list[Indices] = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // len(corpus), -(-stop // len(corpus))):
            first = epoch * len(corpus)
            positions = np.arange(max(start, first) - first, min(stop, first + len(corpus)) - first)
            indices = corpus.shuffled(positions, self.seed, epoch)
            rows.append(self.corpora.rows(part, corpus.segmentation(epoch), indices))
        return np.concatenate(rows)


def next_phase(phases: Sequence[Phase], mixture: Phase, before: Mapping[str, int]) -> tuple[Phase, ...]:
    """Return the phases of a run that continues with a mixture: those so far, and a new one if the mixture differs.

    ``before`` has the sentences that the run has taken of each corpus before the mixture's first update.
    """
    if phases and phases[-1].same_mixture(mixture):
        return tuple(phases)
    return _begun(phases, mixture, before)


def rolled_back(phases: Sequence[Phase], failed: int, first: int, update_tokens: int) -> tuple[Phase, ...]:
    """Return the phases of a run that failed at an update, and makes those from ``first`` on with later sentences.

    A window's sentences are divided among its updates at random, so the rest of the window that failed is left out.
    """
    if not phases:
        return ()
    shares = Shares(phases[-1], update_tokens)
    _, after = shares.updates_of(shares.window(failed))
    again = phases[-1].model_copy(update={"first": first})
    return _begun(phases, again, taken(phases[-1], after, update_tokens))


def _begun(phases: Sequence[Phase], mixture: Phase, before: Mapping[str, int]) -> tuple[Phase, ...]:
    known = [*phases[-1].streams, *phases[-1].absent] if phases else []
    streams = [stream.model_copy(update={"start": before.get(stream.corpus, 0)}) for stream in mixture.streams]
    now = {stream.corpus for stream in streams}
    absent = [
        stream.model_copy(update={"weights": (), "start": before[stream.corpus]})
        for stream in known
        if stream.corpus not in now
    ]
    return (*phases, mixture.model_copy(update={"streams": tuple(streams), "absent": tuple(absent)}))


def taken(phase: Phase, update: int, update_tokens: int) -> dict[str, int]:
    """Return the sentences that a run has taken of each corpus before an update of its last phase."""
    positions = Shares(phase, update_tokens).positions(update)
    now = {stream.corpus: position for stream, position in zip(phase.streams, positions, strict=True)}
    return {**{stream.corpus: stream.start for stream in phase.absent}, **now}
