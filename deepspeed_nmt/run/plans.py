"""Plans of runs on GPUs that need not be present."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from deepspeed_nmt.build import build_kernels, build_meta_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine_for
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.planning.counting import Counts, count_model, count_rates, sizes
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.planner import Planner, layout_of
from deepspeed_nmt.run.batches import (
    LAYOUTS,
    LayoutEstimate,
    estimates,
    layout_on,
    prefers_padded,
    update_order_of,
)
from deepspeed_nmt.train.goodput import STARTING, Entry

VOCAB_SIZE = "32000"
"""Size of a vocabulary that nothing determines."""
_SAMPLED_UPDATES = 50
"""Updates that are divided in either layout."""


class Planned(NamedTuple):
    """A planner of a run, and the resolved settings and the kernels that it plans with."""

    planner: Planner
    engine: EngineSettings
    kernels: Kernels


class Plans:
    """Plans of several configurations. Models that are equal are built and counted once."""

    def __init__(self) -> None:
        self._parameters: dict[str, tuple[int, int, int]] = {}
        self._counts: dict[tuple[int, int], dict[str, Counts]] = {}
        self._flops: dict[str, float] = {}

    def parameters(self, config: RunConfig, vocabulary: Vocabulary) -> tuple[int, int, int]:
        """Return the number of trained parameters, of all, and of elements of the optimizer's states."""
        added = [part for part in config.objective.values() if getattr(part, "adds_exits", False)]
        key = repr((config.model, config.layer, added, config.optimizer.name, vocabulary))
        if key not in self._parameters:
            model = build_meta_model(config, vocabulary)
            trained, frozen = sizes(model)
            self._parameters[key] = trained, trained + frozen, config.optimizer.state_elements(model)
        return self._parameters[key]

    def flops(self, config: RunConfig, vocabulary: Vocabulary) -> dict[int, float]:
        """Return the operations for each target token and the source token beside it, as the mean over updates.

        They hold up to the update that is their key, the last of the run or one after which the model grows.
        """
        last = config.training.max_updates
        ends = (*(at for at in config.growth.at if at < last), last)
        return {end: self._flops_of(config.for_update(end), vocabulary) for end in ends}

    def _flops_of(self, config: RunConfig, vocabulary: Vocabulary) -> float:
        key = repr((config.model, config.layer, config.objective, vocabulary))
        if key not in self._flops:
            model, objective = build_meta_model(config, vocabulary), build_objective(config, vocabulary)
            self._flops[key] = sum(count_rates(model, objective, vocabulary))
        return self._flops[key]

    def on(self, gpu: Gpu, ranks: int, config: RunConfig, vocabulary: Vocabulary) -> Planned:
        """Return the planner of a run on ``ranks`` GPUs."""
        kernels = build_kernels(config).planned_for(gpu.capability)
        engine = resolve_engine_for(
            config.engine,
            config.optimizer,
            ranks=ranks,
            data_ranks=data_ranks_of(config, ranks),
            native=gpu.precision,
        )
        counts = self._counts.setdefault(gpu.capability, {})
        return Planned(make_planner(config, vocabulary, engine, ranks, kernels, counts), engine, kernels)


def data_ranks_of(config: RunConfig, ranks: int) -> int:
    """Return the data-parallel ranks on so many GPUs; refuse a number that tensor-parallel ranks do not divide."""
    tensor_ranks = config.engine.tensor_parallel
    if ranks % tensor_ranks:
        raise ConfigError(f"engine.tensor_parallel is {tensor_ranks}, which does not divide --num-gpus {ranks}")
    return ranks // tensor_ranks


def make_planner(
    config: RunConfig,
    vocabulary: Vocabulary,
    engine: EngineSettings,
    ranks: int,
    kernels: Kernels,
    counts: MutableMapping[str, Counts] | None = None,
) -> Planner:
    """Return a planner of a run.

    ``kernels`` are planned for the GPUs' capability; ``counts``, of models for it, are used and added to.
    """
    tensor_ranks = config.engine.tensor_parallel
    counts = {} if counts is None else counts
    choice = (config.engine.kernels, config.engine.attention, tensor_ranks, engine.precision)
    key = repr((config.model, config.layer, config.objective, config.optimizer.name, vocabulary, choice))
    if key not in counts:
        model, objective = build_meta_model(config, vocabulary, kernels), build_objective(config, vocabulary)
        counted = count_model(model, objective, vocabulary, engine.precision, tensor_ranks)
        states = config.optimizer.state_elements(model) / max(1, counted.trained)
        counts[key] = replace(counted, states=states)
    copies = config.training.save == "background"
    layout = layout_of(engine, ranks, tensor_ranks, copies, counts[key].states)
    return Planner(counts[key], config.engine, config.batch, layout)


def planned_vocabulary(sizes: str | None, config: RunConfig, data: DataDirectory | None) -> Vocabulary:
    """Return the vocabulary to plan with: that of the data, of the sizes, of the model's own files, or VOCAB_SIZE.

    The sizes are one, or SOURCE,TARGET; None if not given.
    """
    own = config.model.own_vocabulary()
    if data is None and sizes is None and own is not None:
        return own
    *source, target = (Vocabulary(int(size)) for size in (sizes or VOCAB_SIZE).split(","))
    given = replace(target, own_source=source[0]) if source else target
    if data is None:
        return given
    tokenizer = data.tokenizer()
    config.model.check_data(tokenizer)
    vocabulary: Vocabulary = tokenizer.vocabulary
    if sizes is not None and (given.source.size, given.size) != (vocabulary.source.size, vocabulary.size):
        raise ConfigError(
            f"--vocab-size is {sizes}, but that of --data is {tokens_of(vocabulary)}; leave out one of the two"
        )
    return vocabulary


def tokens_of(vocabulary: Vocabulary) -> str:
    """Return the size of a vocabulary, or of both, for a message."""
    if vocabulary.own_source is None:
        return f"{vocabulary.size:,}"
    return f"{vocabulary.own_source.size:,} and {vocabulary.size:,}"


def layout_estimates(config: RunConfig, data: TrainingData, num_gpus: int) -> list[LayoutEstimate]:
    """Return the micro-batches that each layout the model can have makes of the training text."""
    layout_on(config, "fp32", None)
    ranks = data_ranks_of(config, num_gpus)
    order = update_order_of(data.corpora(config.mixture), config, data)
    return estimates(order, config.batch, ranks, LAYOUTS if config.model.packed else LAYOUTS[:1], _SAMPLED_UPDATES)


def layout_notes(
    config: RunConfig, layouts: Sequence[LayoutEstimate], gpu: Gpu | None, precision: Precision | None
) -> list[str]:
    """Return sentences about the layout that a run takes."""
    notes = []
    if not config.model.packed:
        notes.append(f"packed: not for model.name={config.model.name}, which has one sentence in a row")
    if gpu is None or precision is None:
        return notes
    layout, reason = layout_on(config, precision, gpu.capability), ""
    if layout == "packed" and config.batch.layout == "auto" and prefers_padded(*layouts):
        layout, reason = "padded", ", which has less padding"
    notes.append(f"batch.layout={config.batch.layout} on {gpu.name} in {precision} is {layout}{reason}")
    if layout == "packed" and precision == "fp32":
        notes.append("there attention copies each sentence into a padded row: its fast kernels need 16 bit")
    return notes


class MeasuredTimes(NamedTuple):
    """Times of a run, from its ledger: None before the first.

    Attributes:
        saving_s: median of the seconds for which a checkpoint stopped training.
        restart_s: mean seconds from the beginning of a process to its first update.
        update_s: mean seconds of an update.
    """

    saving_s: float | None = None
    restart_s: float | None = None
    update_s: float | None = None

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> MeasuredTimes:
        """Measure a ledger's lines."""
        savings, restarts, updates, spent = list[float](), list[float](), 0, 0.0
        for first, second in pairwise(entries):
            if second.begins:
                continue
            saving = second.seconds.get("saving", 0.0) - first.seconds.get("saving", 0.0)
            savings += [saving] if saving > 0.0 else []
            updates += second.update - first.update
            spent += second.seconds.get("updates", 0.0) - first.seconds.get("updates", 0.0)
            if first.begins and second.seconds.get("imports"):  # not after a rollback or a growth within the process
                restarts.append(sum(second.seconds.get(activity, 0.0) for activity in STARTING))
        return cls(
            saving_s=median(savings) if savings else None,
            restart_s=sum(restarts) / len(restarts) if restarts else None,
            update_s=spent / updates if updates > 0 and spent > 0.0 else None,
        )
