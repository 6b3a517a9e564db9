"""Batches of a run: which sentences make which update, and the layout of its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora
from deepspeed_nmt.data.loader import check_lengths
from deepspeed_nmt.data.mixture import MixtureOrder, next_phase, taken
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, UpdateOrder
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.precision import Capability, Precision, capability_of
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.layouts import estimates, prefers_padded
from deepspeed_nmt.train.progress import Progress

_COMPARED_UPDATES = 12
"""Updates that are divided to compare layouts, so that a start takes no longer than a second or two for it."""


def update_order_of(
    corpora: Corpora, config: RunConfig, data: TrainingData, progress: Progress | None = None
) -> UpdateOrder:
    """Return which sentences make which update of a run."""
    phases = () if progress is None else progress.phases
    if not phases and not data.is_mixture:
        return EpochOrder(corpora, config.training.seed, config.batch.update_tokens)
    phase = phases[-1] if phases else data.phase(corpora, config.mixture, 1)
    training = config.training
    return MixtureOrder(corpora, training.seed, config.batch.update_tokens, phase, training.max_updates)


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
    config: RunConfig, micro_tokens: int, data: TrainingData, precision: Precision, world: World
) -> BatchConfig:
    """Return sizes of batches with their layout on these ranks."""
    layout = layout_on(config, precision, capability_of(world.device))
    batch = config.batch.model_copy(update={"layout": layout, "micro_tokens": micro_tokens})
    if config.batch.layout == "auto" and layout == "packed":
        return with_less_padding(batch, update_order_of(data.corpora(config.mixture), config, data), world)
    return batch


def with_less_padding(batch: BatchConfig, order: UpdateOrder, world: World) -> BatchConfig:
    """Return sizes of batches with the packed layout, or the padded one where that has clearly less padding."""
    longest = check_lengths(order.corpora, batch)
    padded, packed = estimates(order.sample(), longest, batch, world.data_ranks, updates_sampled=_COMPARED_UPDATES)
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
