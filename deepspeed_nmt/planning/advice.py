"""Choice of ZeRO stage, recomputation and micro-batch size for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import (
    PARTS,
    Layout,
    RecomputedLayers,
    WorkOf,
    host_bytes,
    state_bytes,
    validation_bytes,
)

GIB = 2**30
SMALLEST_MICRO_TOKENS = 512
RANKS_OF_A_HOST = 8
"""Largest number of GPUs that are assumed to be in one host."""
RECOMPUTE = (0, 4, 2, 1)
"""Settings of recomputation to try: every k-th layer, from the least recomputation to the most; 0 is none."""
_IDLE_TOKENS = 400
"""Overhead of a micro-batch in tokens: a GPU needs work to hide the launch of its kernels."""
_SLOWER = {None: 1.0, 0: 1.0, 1: 1.0, 2: 1.02, 3: 1.15}
"""Relative time of an update under a ZeRO stage, for communication that is not hidden. A rule of thumb."""


@dataclass(frozen=True)
class Plan:
    """A way to train a model on some GPUs, and its cost.

    Attributes:
        layout: of the model.
        micro_tokens: padded tokens in a micro-batch.
        recompute: every k-th layer of encoder and decoder is recomputed; 0 none.
        parts: bytes on one GPU, by the names in PARTS.
        host: bytes of host memory that the tensors of one rank take at most.
        host_ranks: number of ranks that are assumed to share a host.
        host_sum: bytes of host memory that the tensors of these ranks take at most together.
        flops_per_token: of the model, for each target token; recomputation is not counted.
        seconds_per_token: relative cost, for comparing plans.
    """

    layout: Layout
    micro_tokens: int
    recompute: RecomputedLayers
    parts: Mapping[str, int]
    host: int
    host_ranks: int
    host_sum: int
    flops_per_token: float
    seconds_per_token: float

    @property
    def total(self) -> int:
        """Peak bytes on one GPU: activations and logits make room for validation."""
        return sum(size for part, size in self.parts.items() if part not in self.absent)

    @property
    def absent(self) -> frozenset[str]:
        """Parts that are not held at the peak: validation, or what makes room for it."""
        training = frozenset({"activations", "logits"})
        held = sum(self.parts[part] for part in training)
        return training if held < self.parts["validation"] else frozenset({"validation"})

    def fits(self, gib: float) -> bool:
        """Return True if the plan fits into ``gib`` GiB."""
        return self.total <= gib * GIB


def plan_for(
    work: WorkOf, trained: int, frozen: int, layout: Layout, micro_tokens: int, recompute: RecomputedLayers
) -> Plan:
    """Compute memory and cost of one way to train.

    Args:
        work: of a micro-batch on one rank.
        trained: number of trained parameters on one rank.
        frozen: number of frozen parameters on one rank.
        layout: of the model over the ranks.
        micro_tokens: padded tokens of a micro-batch.
        recompute: every k-th layer of encoder and decoder; 0 none.
    """
    needed, unrecomputed = work(micro_tokens, recompute), work(micro_tokens, (0, 0))
    state = state_bytes(trained, frozen, layout)
    parts = {
        **state,
        "activations": needed.activations,
        "logits": needed.logits,
        "validation": validation_bytes(trained, frozen, layout),
    }
    share = needed.flops / max(1, unrecomputed.flops)
    cost = share * _SLOWER[layout.stage] * (micro_tokens + _IDLE_TOKENS) / micro_tokens
    flops = unrecomputed.flops * layout.tensor_ranks / micro_tokens
    by_name = {part: parts[part] for part in PARTS}
    ranks = min(layout.ranks, RANKS_OF_A_HOST)
    host, host_sum = (host_bytes(trained, frozen, layout, count) for count in (1, ranks))
    return Plan(layout, micro_tokens, recompute, by_name, host, ranks, host_sum, flops, cost * flops)


def advise(
    work: WorkOf,
    trained: int,
    frozen: int,
    gpu: Gpu,
    layout: Layout,
    update_tokens: int,
    zero: Mapping[int, Mapping[str, Any]],
) -> Plan:
    """Return the fastest plan that fits, or the smallest if none fits.

    Args:
        work: of a micro-batch on one rank.
        trained: number of trained parameters on one rank.
        frozen: number of frozen parameters on one rank.
        gpu: to plan for.
        layout: ranks and precision to plan for; its stage is chosen here.
        update_tokens: target tokens of an update over all ranks, which bound a micro-batch.
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
    """Yield sizes to try: powers of two up to a GPU's share of an update."""
    tokens = SMALLEST_MICRO_TOKENS
    while tokens <= max(SMALLEST_MICRO_TOKENS, min(share, 32768)):
        yield tokens
        tokens *= 2
