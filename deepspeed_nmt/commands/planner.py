"""Plans for a run's configuration: what joins the model, the engine's files and the arithmetic of planning."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.ds_config import load_ds_config, zero_stage
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import GIB, RECOMPUTE, Plan, advise, plan_for
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import Layout, count_update, interpolated
from deepspeed_nmt.runs import build_model, build_objective

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_COUNTED = (2048, 8192)
"""Tokens of the micro-batches that are counted; others follow from these."""


class Planner:
    """Counts a model once, then tells the memory of any way to train it.

    Args:
        config: of the run; ``engine.tensor_parallel`` and ``engine.precision`` are taken as they are.
        vocab_size: tokens of the vocabulary.
        gpu, ranks: what to plan for.
        precision: that of the run, or else of the GPU, by default.

    Attributes:
        gpu: what is planned for.

    Raises:
        ConfigError: if the ranks cannot be divided by ``engine.tensor_parallel``, or the model cannot.
    """

    def __init__(
        self, config: RunConfig, vocab_size: int, gpu: Gpu, ranks: int, precision: str | None = None
    ) -> None:
        tensor_ranks = config.engine.tensor_parallel
        if ranks % tensor_ranks:
            raise ConfigError(
                f"engine.tensor_parallel must divide --num-gpus, but is {tensor_ranks} with {ranks} GPUs"
            )
        wanted = config.engine.precision if config.engine.precision != "auto" else gpu.precision
        precision = precision or wanted
        vocabulary = Vocabulary(vocab_size)
        with torch.device("meta"):
            model = build_model(config, vocabulary)
        parallelize(model, World(0, ranks, 0, torch.device("meta"), tensor_ranks))
        self.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.frozen = sum(p.numel() for p in model.parameters()) - self.trained
        model.to(_DTYPES[precision])
        objective = build_objective(config, vocabulary)
        counts = {
            recompute: [count_update(model, objective, vocabulary, tokens, recompute) for tokens in _COUNTED]
            for recompute in (0, 1)
        }
        self.work = interpolated((counts[0][0], counts[0][1]), (counts[1][0], counts[1][1]))
        self._config, self.gpu = config, gpu
        self._layout = Layout(None, ranks, tensor_ranks, 32 if precision == "fp32" else 16)

    def as_set(self) -> Plan:
        """As the configuration says."""
        engine = self._config.engine
        layout = self._layout
        if engine.name == "deepspeed" or (engine.name == "auto" and layout.ranks > 1):
            content = load_ds_config(engine.ds_config)
            layout = replace(layout, stage=zero_stage(content), zero=content.get("zero_optimization", {}))
        micro_tokens = self._config.batch.micro_tokens

        def plan(recompute: int) -> Plan:
            return plan_for(self.work, self.trained, self.frozen, layout, micro_tokens, recompute)

        # One number for both sides is what the arithmetic knows: the one that saves less.
        sides = [each for each in (engine.recompute_encoder, engine.recompute_decoder) if each != "auto"]
        if len(sides) == 2:
            return plan(0 if 0 in sides else max(sides))
        plans = [plan(recompute) for recompute in RECOMPUTE]
        return next((each for each in plans if each.fits(self.gpu)), plans[-1])

    def advised(self) -> Plan:
        """The fastest way that fits; if none does, the smallest."""
        zero = {stage: load_ds_config(f"zero{stage}")["zero_optimization"] for stage in (1, 2, 3)}
        tokens = self._config.batch.update_tokens
        return advise(self.work, self.trained, self.frozen, self.gpu, self._layout, tokens, zero)

    def unrecomputed(self, plan: Plan) -> Plan:
        """The same without recomputation."""
        return plan_for(self.work, self.trained, self.frozen, plan.layout, plan.micro_tokens, 0)

    def settings(self, plan: Plan) -> list[str]:
        """What to set for a plan, as ``train`` takes it."""
        engine = ["engine.name=plain"] if plan.layout.stage is None else [f"engine.ds_config=zero{plan.layout.stage}"]
        recompute = [f"engine.recompute_{side}={plan.recompute}" for side in ("encoder", "decoder")]
        return [*engine, *(recompute if plan.recompute else []), f"batch.micro_tokens={plan.micro_tokens}"]


def recomputation(config: RunConfig, vocab_size: int, precision: str, world: World) -> tuple[int, int]:
    """Every how manieth encoder and decoder layer to recompute: what is set, or for "auto" as few as fit.

    Raises:
        ConfigError: if it is to be found out for a CPU, and ``engine.memory_gib`` is not set.
    """
    engine = config.engine
    sides = (engine.recompute_encoder, engine.recompute_decoder)
    if "auto" not in sides:
        return tuple(sides)  # type: ignore[return-value]
    gib = engine.memory_gib
    if world.device.type == "cuda":
        gib = gib or torch.cuda.get_device_properties(world.device).total_memory / GIB
    if not gib:
        raise ConfigError(
            "engine.recompute_encoder or engine.recompute_decoder is auto, which needs to know how much memory there "
            "is; set engine.memory_gib, or give numbers"
        )
    planner = Planner(config, vocab_size, Gpu("this", gib, 0.0), world.ranks, precision)
    plan = planner.as_set()
    which = {0: "no layer", 1: "every layer"}.get(plan.recompute, f"one layer of {plan.recompute}")
    fits = "" if plan.fits(planner.gpu) else ", which is still too much"
    logger.info(
        "recomputing %s: a micro-batch of %d tokens then takes %.1f of %.1f GiB%s",
        which,
        plan.micro_tokens,
        plan.total / GIB,
        gib,
        fits,
    )
    encoder, decoder = (plan.recompute if each == "auto" else each for each in sides)
    return encoder, decoder
