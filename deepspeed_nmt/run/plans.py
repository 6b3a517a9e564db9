"""Plans of runs on GPUs that need not be present."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.build import build_kernels, build_meta_model
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine_for
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.layouts import Yield, yields
from deepspeed_nmt.planning.planner import Counts, Planner
from deepspeed_nmt.run.resolve import make_planner


class Planned(NamedTuple):
    """A planner of a run, and what it plans with.

    Attributes:
        planner: of the run.
        engine: resolved settings.
        kernels: kernels that the GPUs run.
    """

    planner: Planner
    engine: EngineSettings
    kernels: Kernels


class Plans:
    """Plans of several configurations. Models that are equal are built and counted once."""

    def __init__(self) -> None:
        self._parameters: dict[str, tuple[int, int]] = {}
        self._counted: dict[tuple[int, int], dict[str, Counts]] = {}

    def parameters(self, config: RunConfig, vocabulary: Vocabulary) -> tuple[int, int]:
        """Return the number of trained parameters, and of all."""
        key = repr((config.model, config.layer, vocabulary))
        if key not in self._parameters:
            counts = [(p.numel(), p.requires_grad) for p in build_meta_model(config, vocabulary).parameters()]
            trained = sum(count for count, is_trained in counts if is_trained)
            self._parameters[key] = trained, sum(count for count, _ in counts)
        return self._parameters[key]

    def on(self, gpu: Gpu, ranks: int, config: RunConfig, vocabulary: Vocabulary) -> Planned:
        """Return the planner of a run on ``ranks`` GPUs.

        Raises:
            ConfigError: if a setting cannot be respected on these GPUs.
        """
        kernels = build_kernels(config).planned_for(gpu.capability)
        engine = resolve_engine_for(
            config.engine,
            config.optimizer.clip_norm,
            ranks=ranks,
            data_ranks=max(1, ranks // config.engine.tensor_parallel),
            native=gpu.precision,
        )
        counted = self._counted.setdefault(gpu.capability, {})
        return Planned(make_planner(config, vocabulary, engine, ranks, kernels, counted), engine, kernels)


def layout_yields(config: RunConfig, data: Path, num_gpus: int) -> list[Yield]:
    """Return the micro-batches that each layout of batches makes of the training corpus in a data directory.

    Raises:
        DataError: if it is no data directory.
        ConfigError: if a sentence does not fit into a micro-batch.
    """
    corpus = DataDirectory.open(data).corpus("train")
    ranks = max(1, num_gpus // config.engine.tensor_parallel)
    return yields(corpus.source_lengths, corpus.target_lengths, config.batch, config.training.seed, ranks)
