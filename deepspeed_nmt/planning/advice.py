"""Which ZeRO stage, recomputation and micro-batch suit a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import PARTS, Layout, Recompute, WorkOf, state_bytes

GIB = 2**30
SMALLEST_MICRO_TOKENS = 512
RECOMPUTE = (0, 4, 2, 1)
"""Every how manieth layer of a side to try to recompute, from the least to the most."""
_IDLE_TOKENS = 400
"""A micro-batch takes the time of so many tokens more than it has: a GPU needs work to hide its start-up."""
_SLOWER = {None: 1.0, 0: 1.0, 1: 1.0, 2: 1.02, 3: 1.15}
"""Time of an update under a ZeRO stage, against none: communication that is not hidden. A rule of thumb."""


@dataclass(frozen=True)
class Plan:
    """A way to train a model on some GPUs, and what it costs.

    Attributes:
        layout: of the model.
        micro_tokens: padded tokens in a micro-batch.
        recompute: every so manieth layer of the encoder and of the decoder; 0 none.
        parts: bytes on one GPU, by the names in PARTS.
        flops_per_token: of the model, for each target token; recomputation is not counted.
        seconds_per_token: relative cost, for comparing plans.
    """

    layout: Layout
    micro_tokens: int
    recompute: Recompute
    parts: Mapping[str, int]
    flops_per_token: float
    seconds_per_token: float

    @property
    def total(self) -> int:
        """Bytes on one GPU."""
        return sum(self.parts.values())

    def fits(self, gib: float) -> bool:
        """Whether so much memory has room for it."""
        return self.total <= gib * GIB


def plan_for(
    work: WorkOf, trained: int, frozen: int, layout: Layout, micro_tokens: int, recompute: Recompute
) -> Plan:
    """Memory and cost of one way to train.

    Args:
        work: of a micro-batch on one rank.
        trained, frozen: parameters on one rank.
    """
    needed, unrecomputed = work(micro_tokens, recompute), work(micro_tokens, (0, 0))
    state = state_bytes(trained, frozen, layout)
    parts = {**state, "activations": needed.activations, "logits": needed.logits}
    share = needed.flops / max(1, unrecomputed.flops)
    cost = share * _SLOWER[layout.stage] * (micro_tokens + _IDLE_TOKENS) / micro_tokens
    flops = unrecomputed.flops * layout.tensor_ranks / micro_tokens
    return Plan(layout, micro_tokens, recompute, {part: parts[part] for part in PARTS}, flops, cost * flops)


def advise(
    work: WorkOf,
    trained: int,
    frozen: int,
    gpu: Gpu,
    layout: Layout,
    update_tokens: int,
    zero: Mapping[int, Mapping[str, Any]],
) -> Plan:
    """The fastest plan that fits; if none does, the smallest.

    Args:
        layout: ranks and precision to plan for; its stage is chosen here.
        update_tokens: target tokens of an update over all ranks: no micro-batch needs to be larger than its share.
        zero: section ``zero_optimization`` of the DeepSpeed configuration for each stage.
    """
    stages: tuple[int | None, ...] = (None,) if layout.ranks == 1 else (1, 2, 3)
    plans = [
        plan_for(work, trained, frozen, replace(layout, stage=stage, zero=zero.get(stage or 0)), tokens, recompute)
        for stage in stages
        for recompute in itertools.product(RECOMPUTE, RECOMPUTE)
        for tokens in _micro_tokens(update_tokens * layout.tensor_ranks // layout.ranks)
    ]
    fitting = [plan for plan in plans if plan.fits(gpu.usable_gib)]
    if not fitting:
        return min(plans, key=lambda plan: plan.total)
    return min(fitting, key=lambda plan: (plan.seconds_per_token, plan.total))


def _micro_tokens(share: int) -> Iterator[int]:
    """Sizes to try: powers of two up to a GPU's share of an update."""
    tokens = SMALLEST_MICRO_TOKENS
    while tokens <= max(SMALLEST_MICRO_TOKENS, min(share, 32768)):
        yield tokens
        tokens *= 2
