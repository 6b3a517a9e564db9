"""Plans for a run's configuration: what joins the model, the engine's files and the arithmetic of planning."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.base import DTYPES, Precision, uses_deepspeed
from deepspeed_nmt.engine.ds_config import complete_ds_config, load_ds_config, precision_asked_for, zero_stage
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.nn.fused import use_kernels
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import GIB, RECOMPUTE, Plan, advise, plan_for
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import Layout, Recompute, Work, count_update, interpolated
from deepspeed_nmt.runs import build_model, build_objective

_COUNTED = (2048, 8192)
"""Tokens of the micro-batches that are counted; others follow from these."""


class Planner:
    """Counts a model once, then tells the memory of any way to train it.

    Args:
        config: of the run; ``engine.tensor_parallel`` is taken as it is.
        vocabulary: of the data.
        precision: to train in.
        ranks: GPUs.
        kernels: planned for the GPUs' capability; see :meth:`~deepspeed_nmt.kernels.choice.Kernels.planned_for`.

    Raises:
        ConfigError: if the ranks cannot be divided by ``engine.tensor_parallel``, or the model cannot.
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary: Vocabulary,
        precision: Precision,
        ranks: int,
        kernels: Kernels,
    ) -> None:
        tensor_ranks = config.engine.tensor_parallel
        if ranks % tensor_ranks:
            raise ConfigError(
                f"engine.tensor_parallel must divide --num-gpus, but is {tensor_ranks} with {ranks} GPUs"
            )
        with torch.device("meta"):
            model = build_model(config, vocabulary)
        use_kernels(model, kernels)
        parallelize(model, World(0, ranks, 0, torch.device("meta"), tensor_ranks))
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.frozen = sum(p.numel() for p in model.parameters()) - self.trained
        model.to(DTYPES[precision])
        objective = build_objective(config, vocabulary)

        def counted(recompute: Recompute) -> tuple[Work, Work]:
            small, large = (count_update(model, objective, vocabulary, tokens, recompute) for tokens in _COUNTED)
            return small, large

        encoder, decoder = (sum(stack.applications for stack in side) for side in model.stacks)
        self.work = interpolated(counted((0, 0)), counted((1, 0)), counted((0, 1)), (encoder, decoder))
        self._config, self._precision = config, precision
        self._layout = Layout(None, ranks, tensor_ranks, 32 if precision == "fp32" else 16)

    def as_set(self, usable_gib: float) -> Plan:
        """As the configuration says; where it says "auto", with as little recomputation as fits.

        Raises:
            ConfigError: if ``train`` would refuse the DeepSpeed configuration.
        """
        engine, layout = self._config.engine, self._layout
        if uses_deepspeed(engine, layout.ranks):
            content = load_ds_config(engine.ds_config)
            clip_norm, ranks = self._config.optimizer.clip_norm, layout.ranks // layout.tensor_ranks
            complete_ds_config(content, ranks=ranks, clip_norm=clip_norm, precision=self._precision)
            layout = replace(layout, stage=zero_stage(content), zero=content.get("zero_optimization", {}))
        sides = [
            RECOMPUTE if every == "auto" else (every,)
            for every in (engine.recompute_encoder, engine.recompute_decoder)
        ]
        plans = [self._plan(layout, (encoder, decoder)) for encoder, decoder in itertools.product(*sides)]
        fitting = [plan for plan in plans if plan.fits(usable_gib)]
        return min(fitting, key=lambda plan: plan.seconds_per_token) if fitting else plans[-1]

    def advised(self, gpu: Gpu) -> Plan:
        """The fastest way that fits; if none does, the smallest."""
        zero = {stage: load_ds_config(f"zero{stage}")["zero_optimization"] for stage in (1, 2, 3)}
        tokens = self._config.batch.update_tokens
        return advise(self.work, self.trained, self.frozen, gpu, self._layout, tokens, zero)

    def unrecomputed(self, plan: Plan) -> Plan:
        """The same without recomputation."""
        return plan_for(self.work, self.trained, self.frozen, plan.layout, plan.micro_tokens, (0, 0))

    def settings(self, plan: Plan) -> list[str]:
        """What to set for a plan, as ``train`` takes it."""
        engine = ["engine.name=plain"] if plan.layout.stage is None else [f"engine.ds_config=zero{plan.layout.stage}"]
        sides = zip(("encoder", "decoder"), plan.recompute, strict=True)
        recompute = [f"engine.recompute_{side}={every}" for side, every in sides if every]
        return [*engine, *recompute, f"batch.micro_tokens={plan.micro_tokens}"]

    def _plan(self, layout: Layout, recompute: Recompute) -> Plan:
        return plan_for(self.work, self.trained, self.frozen, layout, self._config.batch.micro_tokens, recompute)


def precision_of(config: RunConfig, gpu: Gpu, ranks: int) -> Precision:
    """What a run is trained in on so many GPUs."""
    wanted = precision_asked_for(config.engine, ranks)
    return gpu.precision if wanted == "auto" else wanted  # type: ignore[return-value]


def recomputation(
    config: RunConfig, vocabulary: Vocabulary, precision: Precision, world: World, kernels: Kernels
) -> Recompute:
    """Every how manieth encoder and decoder layer to recompute: what is set, or for "auto" as few as fit.

    Raises:
        ConfigError: if it is to be found out for a CPU, and ``engine.memory_gib`` is not set.
    """
    engine = config.engine
    sides = (engine.recompute_encoder, engine.recompute_decoder)
    if "auto" not in sides:
        return sides  # type: ignore[return-value]
    gib = engine.memory_gib
    if not gib and world.device.type == "cuda":
        gib = Gpu("this", torch.cuda.get_device_properties(world.device).total_memory / GIB, 0.0).usable_gib
    if not gib:
        raise ConfigError(
            "engine.recompute_encoder or engine.recompute_decoder is auto, which needs to know how much memory there "
            "is; set engine.memory_gib, or give numbers"
        )
    capability = torch.cuda.get_device_capability(world.device) if world.device.type == "cuda" else None
    plan = Planner(config, vocabulary, precision, world.ranks, kernels.planned_for(capability)).as_set(gib)
    if world.is_main:
        logger.info(
            "engine.recompute_encoder=%d engine.recompute_decoder=%d: a micro-batch of %d tokens then takes %.2f of "
            "%.2f usable GiB%s",
            *plan.recompute,
            plan.micro_tokens,
            plan.total / GIB,
            gib,
            "" if plan.fits(gib) else ", which is still too much",
        )
    return plan.recompute
