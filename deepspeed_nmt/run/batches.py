"""Batches of a run: which sentences make which update, and the layout of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.corpus import Corpora
from deepspeed_nmt.data.loader import check_lengths
from deepspeed_nmt.data.mixture import MixtureOrder, Phase, next_phase, taken
from deepspeed_nmt.data.packing import pack_update, row_sizes
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, UpdateOrder, Window
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.precision import Capability, Precision, capability_of
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.progress import Progress

LAYOUTS = ("padded", "packed")
_COMPARED_UPDATES = 12
"""Updates that are divided to compare layouts, so that a start takes no longer than a second or two for it."""
_MARGIN = 0.03
"""Share of positions by which packed micro-batches may have more padding, since they are fewer."""


def update_order_of(
    corpora: Corpora, config: RunConfig, data: TrainingData, phases: Sequence[Phase] = (), first: int = 1
) -> UpdateOrder:
    """Return which sentences make which update of a run in its newest phase, or in one from update ``first`` on."""
    if not phases and not data.is_mixture:
        return EpochOrder(corpora, config.training.seed, config.batch.update_tokens)
    phase = phases[-1] if phases else data.phase(corpora, config.mixture, first)
    training = config.training
    return MixtureOrder(corpora, training.seed, config.batch.update_tokens, phase, training.max_updates)


def with_mixture(progress: Progress, corpora: Corpora, config: RunConfig, data: TrainingData) -> Progress:
    """Return the progress with the mixture of corpora with which the run continues, if it has any."""
    first = progress.update + 1
    if not data.is_mixture and not progress.phases:
        return progress
    before = {}
    if progress.phases:
        before = taken(progress.phases[-1], first, config.batch.update_tokens)
    elif progress.update:  # the run began with the first corpus alone
        alone = Corpora(corpora.parts[:1])
        order = EpochOrder(alone, config.training.seed, config.batch.update_tokens)
        epochs = order.epochs(Cursor(progress.epoch, progress.epoch_update), first)[0]
        before = {data.parts[0].identity: round(epochs * len(alone))}
    phases = next_phase(progress.phases, data.phase(corpora, config.mixture, first), before)
    if len(phases) > len(progress.phases):
        mixture = config.mixture
        how = f"{data}; temperature {mixture.temperature:g}, tags in front of {mixture.tag}s"
        if progress.update:
            logger.warning("from update %s on the run has another mixture: %s", f"{first:,}", how)
        else:
            logger.info("mixture: %s", how)
    return replace(progress, phases=phases)


def layout_on(config: RunConfig, precision: Precision, capability: Capability | None) -> Literal["padded", "packed"]:
    """Return the layout of batches on a device.

    "auto" is packed where attention within packed sentences has a fast kernel: on a GPU in 16 bit.
    """
    model, layout = config.model, config.batch.layout
    if layout == "packed" and not model.packed:
        raise ConfigError(
            f"batch.layout is packed, but model.name={model.name} has one sentence in a row; set batch.layout=auto"
        )
    if layout == "auto":
        layout = "packed" if precision != "fp32" and capability is not None and model.packed else "padded"
    return layout


def batch_on(
    config: RunConfig,
    micro_tokens: int,
    data: TrainingData,
    precision: Precision,
    world: World,
    first: int,
    so_far: str | None = None,
) -> BatchConfig:
    """Return sizes of batches from the update ``first`` on, with their layout on these ranks.

    With `auto`, packed batches have the layout of the run ``so_far``: with another its dropout masks would change.
    """
    layout = layout_on(config, precision, capability_of(world.device))
    batch = config.batch.model_copy(update={"layout": layout, "micro_tokens": micro_tokens})
    if config.batch.layout == "auto" and layout == "packed":
        if so_far in LAYOUTS:
            return batch.model_copy(update={"layout": so_far})
        order = update_order_of(data.corpora(config.mixture), config, data, first=first)
        return with_less_padding(batch, order, world)
    return batch


def with_less_padding(batch: BatchConfig, order: UpdateOrder, world: World) -> BatchConfig:
    """Return sizes of batches with the packed layout, or the padded one where that has clearly less padding."""
    padded, packed = estimates(order, batch, world.data_ranks, LAYOUTS, _COMPARED_UPDATES)
    if not prefers_padded(padded, packed):
        return batch
    if world.is_main:
        logger.info(
            "batch.layout=auto is padded: with these lengths %.1f%% of packed positions would be empty, and %.1f%% "
            "of padded ones are; batch.layout=packed packs all the same",
            100.0 * packed.padding,
            100.0 * padded.padding,
        )
    return batch.model_copy(update={"layout": "padded"})


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
    order: UpdateOrder, config: BatchConfig, ranks: int, layouts: Sequence[str], updates_sampled: int
) -> list[LayoutEstimate]:
    """Estimate the micro-batches of layouts on some data-parallel ranks, by at least ``updates_sampled`` updates."""
    longest, updates = check_lengths(order.corpora, config), order.sample()
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
