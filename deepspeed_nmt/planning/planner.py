"""Plans of a run: memory and speed of a layout, recomputation and micro-batch size, and the advice of the fastest."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_nmt.console import table
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.engine.settings import EngineConfig, EngineSettings, load_ds_config
from deepspeed_nmt.planning.communication import Communication, communication
from deepspeed_nmt.planning.counting import Counts, RecomputedLayers
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import GIB, PARTS, Layout, host_bytes, state_bytes, validation_bytes

_MICRO_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Sizes of micro-batches to try. The larger one is, the more of the host's time it hides: at 16,384 tokens of BIG 6+6
an H200 still waited for its host nearly half of the time."""
_BUSY_TOKENS = 2048
"""Least target tokens of a micro-batch that keep a GPU busy and hide its communication. A rule of thumb."""
_RANKS_OF_A_HOST = 8
"""Largest number of GPUs that are assumed to be in one host."""
_RECOMPUTE = (0, 4, 2, 1)
"""Settings of recomputation to try: every k-th layer, from the least recomputation to the most; 0 is none."""
_IDLE_TOKENS = 400
"""Overhead of a micro-batch in tokens: a GPU needs work to hide the launch of its kernels."""
_ZERO_2 = 1.02
"""Relative time of an update under ZeRO-2, which reduces the gradients of each micro-batch. A rule of thumb."""


@dataclass(frozen=True)
class Plan:
    """A way to train a model on some GPUs, and its cost.

    Attributes:
        recompute: every k-th layer of encoder and decoder is recomputed; 0 none.
        parts: bytes on one GPU, by the names in PARTS.
        host: bytes of host memory that the tensors of one rank take at most.
        host_sum: bytes that those of ``host_ranks`` ranks, which are assumed to share a host, take together.
        seconds_per_token: relative cost, for comparing plans.
    """

    layout: Layout
    micro_tokens: int
    recompute: RecomputedLayers
    parts: Mapping[str, int]
    host: int
    host_ranks: int
    host_sum: int
    seconds_per_token: float

    @property
    def absent(self) -> set[str]:
        """Parts that are not held at the peak: validation, or activations and logits, which make room for it."""
        training = {"activations", "logits"}
        held = sum(self.parts[part] for part in training)
        return training if held < self.parts["validation"] else {"validation"}

    @property
    def total(self) -> int:
        """Peak bytes on one GPU."""
        return sum(size for part, size in self.parts.items() if part not in self.absent)

    def fits(self, gib: float) -> bool:
        """Return True if the plan fits into ``gib`` GiB."""
        return self.total <= gib * GIB

    def as_json(self, gpu: Gpu) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        return {
            "zero_stage": self.layout.stage,
            "micro_tokens": self.micro_tokens,
            "recompute": self.recompute,
            "bytes": {**self.parts, "total": self.total},
            "host_bytes": self.host,
            "host_ranks": self.host_ranks,
            "host_bytes_of_ranks": self.host_sum,
            "fits": self.fits(gpu.usable_gib),
        }


def plan_for(counts: Counts, layout: Layout, micro_tokens: int, recompute: RecomputedLayers) -> Plan:
    """Compute memory and cost of one way to train."""
    work = counts.work(micro_tokens, recompute)
    size = (counts.trained, counts.frozen, layout)
    parts = {"activations": work.activations, "logits": work.logits, "validation": validation_bytes(*size)}
    parts |= state_bytes(*size)
    seconds = work.flops * (_ZERO_2 if layout.stage == 2 else 1.0) * (micro_tokens + _IDLE_TOKENS) / micro_tokens
    ranks = min(layout.ranks, _RANKS_OF_A_HOST)
    parts = {part: parts[part] for part in PARTS}
    host, host_sum = host_bytes(*size, 1), host_bytes(*size, ranks)
    return Plan(layout, micro_tokens, recompute, parts, host, ranks, host_sum, seconds / micro_tokens)


def fastest(plans: Sequence[Plan], gib: float) -> Plan:
    """Return the fastest plan that fits into ``gib`` GiB, or the smallest if none fits."""
    fitting = [plan for plan in plans if plan.fits(gib)]
    if not fitting:
        return min(plans, key=lambda plan: plan.total)
    return min(fitting, key=lambda plan: (plan.layout.stage == 3, plan.seconds_per_token, plan.total))


def layout_of(settings: EngineSettings, ranks: int, tensor_ranks: int, copies: bool, states: float) -> Layout:
    """Return the layout over GPUs that an engine's settings describe; for ``states`` see :class:`Layout`."""
    zero = None if settings.ds_config is None else settings.ds_config.get("zero_optimization", {})
    bits = 32 if settings.precision == "fp32" else 16
    return Layout(
        settings.zero_stage, ranks, tensor_ranks, bits, zero, copies, states, settings.optimizer.needs_whole
    )


@dataclass(frozen=True)
class Planner:
    """Planner of a model: memory and speed of any layout, recomputation and micro-batch size.

    Attributes:
        engine: settings of the user; ``tensor_parallel``, which divides the ranks, is respected by all plans.
        layout: that of these settings, resolved.
    """

    counts: Counts
    engine: EngineConfig
    batch: BatchConfig
    layout: Layout

    def as_set(self, usable_gib: float, longest: int = 0) -> Plan:
        """Return the plan that the settings describe.

        "auto" is as little recomputation as fits, and the largest micro-batch that fits and that an update fills, but
        one that holds a sentence of ``longest`` tokens.
        """
        given, layout = (self.engine.recompute_encoder, self.engine.recompute_decoder), self.layout
        encoder, decoder = (_RECOMPUTE if every == "auto" else (every,) for every in given)
        sizes: tuple[int, ...] = (self.batch.bound,)
        if self.batch.micro_tokens == "auto":
            sizes = self._sizes(longest, 2)
        choices = itertools.product(sizes, itertools.product(encoder, decoder))
        return fastest([plan_for(self.counts, layout, *choice) for choice in choices], usable_gib)

    def _sizes(self, longest: int, updates: int) -> tuple[int, ...]:
        """Return the sizes of micro-batches to try: they hold a sentence, and so many ``updates`` fill them."""
        most = updates * self.batch.update_tokens * self.layout.tensor_ranks // self.layout.ranks
        sizes = tuple(size for size in _MICRO_TOKENS if size >= longest) or _MICRO_TOKENS[-1:]
        return tuple(size for size in sizes if size <= max(sizes[0], most))

    def advised(self, gpu: Gpu, longest: int = 0) -> Plan:
        """Return the fastest plan that fits, or the smallest if none fits; the stage of the layout is chosen here.

        Micro-batches hold a sentence of ``longest`` tokens.

        ZeRO-3 is for what fits no other way: it gathers all weights twice in each micro-batch. An optimizer that
        needs whole parameters goes without.
        """
        one, layouts = self.layout, [replace(self.layout, stage=None, zero=None)]
        if one.ranks > 1 and not one.is_whole:
            zero = {stage: load_ds_config(f"zero{stage}")["zero_optimization"] for stage in (1, 2, 3)}
            layouts = [replace(one, stage=stage, zero=section) for stage, section in zero.items()]
        choices = itertools.product(layouts, self._sizes(longest, 1), itertools.product(_RECOMPUTE, _RECOMPUTE))
        return fastest([plan_for(self.counts, *choice) for choice in choices], gpu.usable_gib)

    def sent(self, plan: Plan) -> Communication:
        """Return what a GPU sends in an update of a plan."""
        layout, counts = plan.layout, self.counts
        micro_batches = -(-self.batch.update_tokens * layout.tensor_ranks // (layout.ranks * plan.micro_tokens))
        exchanged = counts.work(plan.micro_tokens, plan.recompute).exchanged
        return communication(counts.trained, counts.frozen, exchanged, layout, micro_batches)

    def settings(self, plan: Plan) -> list[str]:
        """Return the settings of a plan, as arguments of ``train``."""
        if (stage := plan.layout.stage) is None:
            engine = ["engine.name=plain", *["engine.ds_config=null"] * (self.engine.ds_config is not None)]
        else:
            name = ["engine.name=deepspeed"] if self.engine.name == "plain" else []
            engine = [*name, f"engine.ds_config=zero{stage}"]
        sides = zip(("encoder", "decoder"), plan.recompute, strict=True)
        recompute = [
            f"engine.recompute_{side}={every}"
            for side, every in sides
            if every != getattr(self.engine, f"recompute_{side}")
        ]
        return [*engine, *recompute, f"batch.micro_tokens={plan.micro_tokens}"]


def notes_on(plan: Plan, update_tokens: int, gpu: Gpu) -> list[str]:
    """Return warnings about an advised plan: too large for the GPU, or too few tokens for it."""
    notes, layout = [], plan.layout
    if not plan.fits(gpu.usable_gib):
        notes.append(
            "no plan fits; this is the smallest: use larger GPUs, more of them (perhaps with "
            "engine.tensor_parallel), or offload (engine.name=deepspeed engine.ds_config=zero3_offload)"
        )
    elif layout.stage == 3:
        notes.append(
            "ZeRO-3 gathers all weights twice in each micro-batch, and takes the host twice the time of ZeRO-2 for "
            "each layer; nothing else fits: larger GPUs or more of them avoid it"
        )
    share = update_tokens * layout.tensor_ranks // layout.ranks
    slow = "too few to keep it busy, so expect a lower MFU"
    if share < _BUSY_TOKENS:
        suitable = _BUSY_TOKENS * layout.ranks // layout.tensor_ranks
        ranks = update_tokens // _BUSY_TOKENS * layout.tensor_ranks
        text = f"an update of {update_tokens:,} tokens leaves {share:,} for a GPU, {slow}"
        fewer = f", or use at most {ranks} GPUs" if ranks else ""
        notes.append(f"{text}: set batch.update_tokens={suitable}{fewer}")
    elif plan.micro_tokens < _BUSY_TOKENS:
        text = f"micro-batches have {plan.micro_tokens:,} tokens, for a GPU {slow}; larger ones do not fit"
        notes.append(f"{text}, or cost more recomputation: use larger GPUs, or engine.tensor_parallel")
    return notes


def as_text(columns: Mapping[str, Plan], advice: list[str], notes: list[str], gpu: Gpu) -> str:
    """Return a table of plans by title, the memory of one GPU by part, and the settings and notes for "advised"."""
    plans, plan = columns.values(), columns["advised"]

    def cell(size: int, absent: bool = False) -> str:
        return f"({size / GIB:.2f})" if absent else f"{size / GIB:.2f}"

    rows = [
        ["GiB on a GPU", *columns],
        *([part, *(cell(plan.parts[part], part in plan.absent) for plan in plans)] for part in PARTS),
        ["total", *(cell(plan.total) for plan in plans)],
        ["fits", *("yes" if plan.fits(gpu.usable_gib) else "no" for plan in plans)],
        ["host, a rank", *(cell(plan.host) for plan in plans)],
    ]
    if plan.host_ranks > 1:
        rows.append([f"host, {plan.host_ranks} ranks", *(cell(plan.host_sum) for plan in plans)])
    lines = [table(rows)]
    if plan.layout.ranks > plan.host_ranks:
        lines.append(f"(a host is assumed to have {plan.host_ranks} GPUs)")
    lines += ["(in parentheses: not held at the peak; validation has no activations and logits)", ""]
    return "\n".join([*lines, f"set: {' '.join(advice)}", *notes])
