"""Planner of a run: it counts the model once, and computes the memory of any layout from the counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.engine.config import DTYPES, EngineConfig
from deepspeed_nmt.engine.ds_config import load_ds_config
from deepspeed_nmt.engine.settings import EngineSettings
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import RECOMPUTE, Plan, advise, plan_for
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import Layout, Recompute, Work, count_update, interpolated

_COUNTED = (2048, 8192)
"""Sizes in tokens of the micro-batches that are counted; other sizes are interpolated."""


class Planner:
    """Planner of a model: memory and speed of any layout, recomputation and micro-batch size.

    Args:
        model: on the meta device, with kernels planned for the GPUs; sliced here, and converted to the precision it
            is trained in.
        objective: of the run.
        vocabulary: of the data.
        engine: settings of the user; ``tensor_parallel`` is respected by all plans.
        settings: the same settings, resolved.
        batch: sizes of updates and micro-batches.
        ranks: number of GPUs.

    Raises:
        ConfigError: if ``engine.tensor_parallel`` does not divide the ranks or the model.
    """

    def __init__(
        self,
        model: TranslationModel,
        objective: Objective,
        vocabulary: Vocabulary,
        engine: EngineConfig,
        settings: EngineSettings,
        batch: BatchConfig,
        ranks: int,
    ) -> None:
        tensor_ranks = engine.tensor_parallel
        if ranks % tensor_ranks:
            raise ConfigError(
                f"engine.tensor_parallel must divide --num-gpus, but is {tensor_ranks} with {ranks} GPUs"
            )
        parallelize(model, World(0, ranks, 0, torch.device("meta"), tensor_ranks))
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.frozen = sum(p.numel() for p in model.parameters()) - self.trained
        model.to(DTYPES[settings.precision])

        def counted(recompute: Recompute) -> tuple[Work, Work]:
            small, large = (count_update(model, objective, vocabulary, tokens, recompute) for tokens in _COUNTED)
            return small, large

        encoder, decoder = (sum(stack.applications for stack in side) for side in model.stacks)
        self.work = interpolated(counted((0, 0)), counted((1, 0)), counted((0, 1)), (encoder, decoder))
        self._engine, self._settings, self._batch = engine, settings, batch
        self._layout = Layout(None, ranks, tensor_ranks, 32 if settings.precision == "fp32" else 16)

    def as_set(self, usable_gib: float) -> Plan:
        """Return the plan that the settings describe; "auto" is as little recomputation as fits."""
        engine, layout = self._engine, self._layout
        if self._settings.ds_config is not None:
            zero = self._settings.ds_config.get("zero_optimization", {})
            layout = replace(layout, stage=self._settings.zero_stage, zero=zero)
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
        engine = ["engine.name=plain"] if plan.layout.stage is None else [f"engine.ds_config=zero{plan.layout.stage}"]
        sides = zip(("encoder", "decoder"), plan.recompute, strict=True)
        recompute = [f"engine.recompute_{side}={every}" for side, every in sides if every]
        return [*engine, *recompute, f"batch.micro_tokens={plan.micro_tokens}"]

    def _plan(self, layout: Layout, recompute: Recompute) -> Plan:
        return plan_for(self.work, self.trained, self.frozen, layout, self._batch.micro_tokens, recompute)
