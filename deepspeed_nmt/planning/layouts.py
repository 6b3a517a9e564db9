"""Micro-batches that each layout of batches makes of a corpus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.packing import pack_update, row_sizes
from deepspeed_nmt.data.update_order import Window

_SAMPLED_UPDATES = 50
"""Updates that are divided in either layout."""
_MARGIN = 0.03
"""Share of positions by which packed micro-batches may have more padding, since they are fewer."""


@dataclass(frozen=True)
class LayoutEstimate:
    """Micro-batches of a layout.

    Attributes:
        micro_batches: of a rank in an update, on average.
        tokens: of both sides of a micro-batch, on average.
        padding: share of positions that hold padding or the tail of a row (padding fraction).
        shapes: number of different shapes among the micro-batches of the sample.
    """

    layout: str
    micro_batches: float
    tokens: float
    padding: float
    shapes: int

    def __str__(self) -> str:
        return (
            f"{self.layout}: {self.micro_batches:.1f} micro-batches of {self.tokens:,.0f} tokens an update and rank, "
            f"{self.padding:.1%} of positions empty, {self.shapes} shape{'s' if self.shapes > 1 else ''}"
        )


def estimates(
    updates: Window,
    longest: int,
    config: BatchConfig,
    ranks: int,
    layouts: Sequence[str] = ("padded", "packed"),
    updates_sampled: int = _SAMPLED_UPDATES,
) -> list[LayoutEstimate]:
    """Estimate the micro-batches of layouts on some data-parallel ranks.

    ``updates`` stand for those of the run; ``updates_sampled`` of them, or some more, are divided. ``longest`` is the
    number of tokens of the longest sentence of the training text.
    """
    # The last update of an epoch may be what is left.
    sample = range(0, max(1, len(updates) - 1), max(1, len(updates) // updates_sampled))
    made = []
    for layout in layouts:
        micro_batches = [*_micro_batches(layout, updates, longest, sample, config, ranks)]
        tokens, count = sum(tokens for *_, tokens in micro_batches), len(micro_batches)
        positions = sum(rows * (source + target) for rows, source, target, _ in micro_batches)
        shapes = len({tuple(shape) for *shape, _ in micro_batches})
        of = len(sample) * ranks
        made.append(LayoutEstimate(layout, count / of, tokens / count, 1.0 - tokens / positions, shapes))
    return made


def prefers_padded(padded: LayoutEstimate, packed: LayoutEstimate) -> bool:
    """Return True if the packed layout has clearly more padding than the padded one."""
    return packed.padding > padded.padding + _MARGIN


def _micro_batches(
    layout: str, updates: Window, longest: int, sample: range, config: BatchConfig, ranks: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows, positions of a source's and of a target's row, and tokens of both, of each micro-batch."""
    source, target = updates.source, updates.target
    sizes = row_sizes(updates, longest, ranks, config) if layout == "packed" else None
    for number in sample:
        if sizes is not None:
            for parts in pack_update(updates[number], source, target, ranks, config, sizes):
                for part in parts:
                    tokens = int(source[part.sentences].sum() + target[part.sentences].sum())
                    yield 1, part.source, part.target, tokens
        else:
            for groups in divide_update(updates[number], source, target, ranks, config):
                for group in filter(len, groups):
                    s, t = source[group], target[group]
                    yield len(group), int(s.max()), int(t.max()), int(s.sum() + t.sum())
