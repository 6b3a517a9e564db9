"""Planner of a run: it computes the memory of any layout from counts of the model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.engine.config import EngineConfig
from deepspeed_nmt.engine.ds_config import load_ds_config
from deepspeed_nmt.engine.settings import EngineSettings
from deepspeed_nmt.kernels.precision import DTYPES, Precision
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import RECOMPUTE, Plan, advise, plan_for
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import Layout, RecomputedLayers, Work, WorkOf, count_update, interpolated

_COUNTED = (1024, 4096, 16384)
"""Sizes in tokens of the micro-batches that are counted; other sizes are interpolated. Up to 4,096 the loss of a GPU
holds all logits at once, from there on a chunk of them (:func:`deepspeed_nmt.kernels.cross_entropy.chunk_rows`)."""


@dataclass(frozen=True)
class Counts:
    """Counts of a model that all its plans share. They take seconds, plans none.

    Attributes:
        work: work of a micro-batch on one rank.
        trained: number of trained parameters on one rank.
        frozen: number of frozen parameters on one rank.
    """

    work: WorkOf
    trained: int
    frozen: int


def count_model(
    model: TranslationModel, objective: Objective, vocabulary: Vocabulary, precision: Precision, tensor_ranks: int
) -> Counts:
    """Count a model.

    Args:
        model: on the meta device, with kernels planned for the GPUs; sliced here, and converted to ``precision``.
        objective: of the run.
        vocabulary: of the data.
        precision: that the model is trained in.
        tensor_ranks: number of GPUs that share the model.

    Raises:
        ConfigError: if ``tensor_ranks`` does not divide the model.
    """
    parallelize(model, World(0, tensor_ranks, 0, torch.device("meta"), tensor_ranks))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    model.to(DTYPES[precision])

    def counted(recompute: RecomputedLayers) -> tuple[Work, ...]:
        return tuple(count_update(model, objective, vocabulary, tokens, recompute) for tokens in _COUNTED)

    encoder, decoder = (sum(stack.applications for stack in side) for side in model.stacks)
    work = interpolated(counted((0, 0)), counted((1, 0)), counted((0, 1)), (encoder, decoder))
    return Counts(work, trained, frozen)


def layout_of(settings: EngineSettings, ranks: int, tensor_ranks: int, copies: bool) -> Layout:
    """Return the layout of a model over GPUs that an engine's settings describe; arguments as in :class:`Layout`."""
    zero = None if settings.ds_config is None else settings.ds_config.get("zero_optimization", {})
    bits = 32 if settings.precision == "fp32" else 16
    return Layout(settings.zero_stage, ranks, tensor_ranks, bits, zero, copies)


class Planner:
    """Planner of a model: memory and speed of any layout, recomputation and micro-batch size.

    Args:
        counts: of the model.
        engine: settings of the user; ``tensor_parallel`` is respected by all plans.
        settings: the same settings, resolved.
        batch: sizes of updates and micro-batches.
        ranks: number of GPUs, a multiple of ``engine.tensor_parallel``.
        copies: True if checkpoints are written from a copy of the training state in host memory.
    """

    def __init__(
        self,
        counts: Counts,
        engine: EngineConfig,
        settings: EngineSettings,
        batch: BatchConfig,
        ranks: int,
        copies: bool,
    ) -> None:
        self.work, self.trained, self.frozen = counts.work, counts.trained, counts.frozen
        self._engine, self._settings, self._batch = engine, settings, batch
        self._layout = layout_of(settings, ranks, engine.tensor_parallel, copies)

    def as_set(self, usable_gib: float) -> Plan:
        """Return the plan that the settings describe; "auto" is as little recomputation as fits."""
        engine, layout = self._engine, self._layout
        sides = [
            RECOMPUTE if every == "auto" else (every,)
            for every in (engine.recompute_encoder, engine.recompute_decoder)
        ]
        plans = [self._plan(layout, (encoder, decoder)) for encoder, decoder in itertools.product(*sides)]
        fitting = [plan for plan in plans if plan.fits(usable_gib)]
        return min(fitting, key=lambda plan: plan.seconds_per_token) if fitting else plans[-1]

    def advised(self, gpu: Gpu) -> Plan:
        """Return the fastest plan that fits; the smallest if none does."""
        zero = {stage: load_ds_config(f"zero{stage}")["zero_optimization"] for stage in (1, 2, 3)}
        tokens = self._batch.update_tokens
        return advise(self.work, self.trained, self.frozen, gpu, self._layout, tokens, zero)

    def unrecomputed(self, plan: Plan) -> Plan:
        """Return the same plan without recomputation."""
        return plan_for(self.work, self.trained, self.frozen, plan.layout, plan.micro_tokens, (0, 0))

    def settings(self, plan: Plan) -> list[str]:
        """Return the settings of a plan, as arguments of ``train``."""
        stage = plan.layout.stage
        engine = ["engine.name=plain"] if stage is None else [f"engine.ds_config=zero{stage}"]
        if stage is None and self._engine.ds_config is not None:
            engine.append("engine.ds_config=null")
        if stage is not None and self._engine.name == "plain":
            engine.insert(0, "engine.name=deepspeed")
        sides = zip(("encoder", "decoder"), plan.recompute, strict=True)
        recompute = [f"engine.recompute_{side}={every}" for side, every in sides if every]
        return [*engine, *recompute, f"batch.micro_tokens={plan.micro_tokens}"]

    def _plan(self, layout: Layout, recompute: RecomputedLayers) -> Plan:
        return plan_for(self.work, self.trained, self.frozen, layout, self._batch.micro_tokens, recompute)
