"""Text and JSON of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_nmt.planning.advice import GIB, SMALLEST_MICRO_TOKENS, Plan
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import PARTS


def tokens_per_second(plan: Plan, gpu: Gpu, num_gpus: int, mfu: float) -> float | None:
    """Return target tokens a second of all GPUs at a share ``mfu`` of their peak; None if the peak is unknown."""
    return num_gpus * mfu * gpu.tflops * 1e12 / plan.flops_per_token if gpu.tflops else None


def as_json(plan: Plan, gpu: Gpu) -> dict[str, Any]:
    """Return a plan as values for JSON."""
    return {
        "zero_stage": plan.layout.stage,
        "micro_tokens": plan.micro_tokens,
        "recompute": plan.recompute,
        "bytes": {**plan.parts, "total": plan.total},
        "host_bytes": plan.host,
        "host_ranks": plan.host_ranks,
        "host_bytes_of_ranks": plan.host_sum,
        "fits": plan.fits(gpu.usable_gib),
    }


def as_table(columns: Mapping[str, Plan], advice: Sequence[str], update_tokens: int, gpu: Gpu, speed: str) -> str:
    """Return a table of plans, the memory of one GPU by part, and the settings to use.

    Args:
        columns: plans by title; "advised" is the one with the settings in ``advice``.
        advice: settings to use.
        update_tokens: target tokens of an update.
        gpu: GPU that the plans are for.
        speed: phrase that ends the last line; "" if the speed is unknown.
    """
    width = max(12, *map(len, columns)) + 2
    lines = [f"{'GiB on a GPU':<14}" + "".join(f"{name:>{width}}" for name in columns)]
    for part in PARTS:
        cells = ((f"{plan.parts[part] / GIB:.2f}", part in plan.absent) for plan in columns.values())
        marked = (f"({cell})" if absent else cell for cell, absent in cells)
        lines.append(f"{part:<14}" + "".join(f"{cell:>{width}}" for cell in marked))
    lines.append(f"{'total':<14}" + "".join(f"{plan.total / GIB:>{width}.2f}" for plan in columns.values()))
    fits = ["yes" if plan.fits(gpu.usable_gib) else "no" for plan in columns.values()]
    lines.append(f"{'fits':<14}" + "".join(f"{word:>{width}}" for word in fits))
    lines.append(f"{'host, a rank':<14}" + "".join(f"{plan.host / GIB:>{width}.2f}" for plan in columns.values()))
    plan = columns["advised"]
    if plan.host_ranks > 1:
        sums = "".join(f"{each.host_sum / GIB:>{width}.2f}" for each in columns.values())
        lines.append(f"{f'host, {plan.host_ranks} ranks':<14}{sums}")
    if plan.layout.ranks > plan.host_ranks:
        lines.append(f"(a host is assumed to have {plan.host_ranks} GPUs)")
    lines.append("(in parentheses: not held at the peak; validation has no activations and logits)")
    lines += ["", f"set: {' '.join(advice)}"]
    if not plan.fits(gpu.usable_gib):
        lines.append(
            "no plan fits; this is the smallest: use larger GPUs, more of them (perhaps with "
            "engine.tensor_parallel), or offload (engine.name=deepspeed engine.ds_config=zero3_offload)"
        )
    share = update_tokens * plan.layout.tensor_ranks // plan.layout.ranks
    if share < SMALLEST_MICRO_TOKENS:
        lines.append(
            f"an update of {update_tokens:,} tokens leaves {share} for a GPU, too few to be fast: use fewer GPUs, or "
            "raise batch.update_tokens"
        )
    lines.append(f"{plan.flops_per_token / 1e9:,.2f} GFLOP for each target token{speed}")
    return "\n".join(lines)
