"""Bytes that ranks send in an update, and the time that they take on a link: estimates, not measurements.

With n ranks in a ring (Patarasu and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
2009), each rank sends 2 S (n - 1) / n bytes for an all-reduce of S bytes, and half as many for an all-gather or a
reduce-scatter. P parameters of w bytes, whose gradients are reduced in g bytes (:func:`reduction_type`), take in an
update of m micro-batches

    engine          gradients              weights
    plain, ZeRO 0   all-reduce of 4 P      none
    ZeRO 1          all-reduce of g P      all-gather of w P
    ZeRO 2          m all-reduces of g P   all-gather of w P
    ZeRO 3          m reduce-scatters      2 m all-gathers, without the weights that stay from forward to backward

DeepSpeed 0.19.8 all-reduces in ZeRO 1 and 2 in spite of ``reduce_scatter`` (``use_multi_rank_bucket_allreduce``).
Tensor-parallel ranks add up the activations that are counted with the work of a micro-batch. Latency is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_nmt.console import table
from deepspeed_nmt.engine.settings import reduction_type
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.memory import Layout, elements

_REACHED = 0.8
"""Share of a link's bandwidth by its data sheet that collectives reach. An assumption."""
_BACKWARD = 2 / 3
"""Share of the arithmetic that is in the backward pass, behind which gradients are reduced."""
_GOOD = 0.9
"""Efficiency from which the arithmetic is the bottleneck."""


def ring_bytes(whole: float, ranks: int, passes: int = 1) -> float:
    """Return the bytes that a rank sends: ``passes`` is 2 for an all-reduce, 1 for an all-gather."""
    return passes * whole * (ranks - 1) / ranks


@dataclass(frozen=True)
class Communication:
    """Bytes that a rank sends in an update.

    Attributes:
        micro_batches: of a rank in the update.
        overlaps: True if gradients are reduced, and ZeRO-3's weights gathered, beside the arithmetic.
    """

    gradients: float
    weights: float
    activations: float
    micro_batches: int
    stage: int | None
    overlaps: bool = False

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.gradients + self.weights + self.activations


def communication(trained: int, frozen: int, exchanged: int, layout: Layout, micro_batches: int) -> Communication:
    """Return the communication of an update.

    ``trained`` and ``frozen`` are numbers of parameters in this rank's slice of the model, and ``exchanged`` the
    bytes that tensor-parallel ranks add up in a micro-batch.
    """
    n, width, stage = layout.ranks // layout.tensor_ranks, layout.bits // 8, layout.stage
    zero, count = dict(layout.zero or {}), trained + frozen
    narrow = layout.bits == 16 and reduction_type(stage) != "fp32"
    reduced = (width if narrow else 4) * trained * (micro_batches if stage in (2, 3) else 1)
    gathered = width * trained if stage in (1, 2) else 0
    if stage == 3:
        # From the end of the forward pass a weight is twice as far from its next use as from the last layer.
        kept = min(count, elements(zero, "stage3_max_reuse_distance", 1e9) // 2)
        gathered = width * (2 * count - kept) * micro_batches
    return Communication(
        gradients=ring_bytes(reduced, n, 1 if stage == 3 else 2),
        weights=ring_bytes(gathered, n),
        activations=ring_bytes(exchanged * micro_batches, layout.tensor_ranks, 2),
        micro_batches=micro_batches,
        stage=stage,
        overlaps=stage in (2, 3) and bool(zero.get("overlap_comm")) and n > 1,
    )


@dataclass(frozen=True)
class OnLink:
    """Time of an update whose ranks communicate by a link.

    Attributes:
        gb_per_s: bandwidth that collectives reach, in each direction.
        seconds: for communication, without what the arithmetic hides.
        share: of the update's time, in that communication.
    """

    link: str
    gb_per_s: float
    seconds: float
    share: float
    bottleneck: str

    @property
    def efficiency(self) -> float:
        """Share of the update's time in arithmetic."""
        return 1.0 - self.share


def on_links(sent: Communication, gpu: Gpu, compute_s: float, own_gb_per_s: float | None = None) -> list[OnLink]:
    """Estimate updates of ``compute_s`` seconds of arithmetic on each link of a GPU, or on the user's own."""
    links = {name: _REACHED * speed for name, speed in gpu.links.items() if speed}
    if own_gb_per_s is not None:
        links = {"--bandwidth": own_gb_per_s}
    estimates = []
    for link, speed in links.items():
        hidden = 0.0
        if sent.overlaps:
            hidden = min(sent.gradients / speed / 1e9, _BACKWARD * compute_s)
            hidden += min(sent.weights / speed / 1e9, compute_s - hidden) if sent.stage == 3 else 0.0
        seconds = sent.total / speed / 1e9 - hidden
        share = seconds / (compute_s + seconds)
        bottleneck = "arithmetic" if share <= 1.0 - _GOOD else _bottleneck(sent)
        estimates.append(OnLink(link, speed, seconds, share, bottleneck))
    return estimates


def _bottleneck(sent: Communication) -> str:
    """Return what an update waits for, and the way out."""
    if sent.activations > max(sent.gradients, sent.weights):
        return "tensor parallelism; lower engine.tensor_parallel"
    if sent.stage == 3 and sent.weights > sent.gradients:
        return "ZeRO-3's weights; use ZeRO-1 or 2 with recomputation"
    if sent.stage in (2, 3) and sent.micro_batches > 1:
        return "gradients of each micro-batch; use ZeRO-1 or larger micro-batches"
    return "gradients and weights of each update; raise batch.update_tokens"


def as_json(sent: Communication, links: list[OnLink]) -> dict[str, Any]:
    """Return the estimates as values for JSON."""
    rows = [{**vars(link), "efficiency": link.efficiency} for link in links]
    return {"estimated": True, "bytes": {**vars(sent), "total": sent.total}, "links": rows}


def as_text(sent: Communication, links: list[OnLink]) -> str:
    """Return the bytes of an update, and a table of links."""
    parts = {"gradients": sent.gradients, "weights": sent.weights, "activations": sent.activations}
    words = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
    lines = [
        f"communication, estimated: a GPU sends {sent.total / 1e9:.2f} GB in an update of "
        f"{sent.micro_batches:,} micro-batch{'es' if sent.micro_batches > 1 else ''}{f' ({words})' if words else ''}"
    ]
    if links:
        rows = [["link of all GPUs", "GB/s", "s an update", "share", "efficiency", "bottleneck"]]
        rows += [
            [one.link, f"{one.gb_per_s:.0f}", f"{one.seconds:.3f}", f"{one.share:.1%}", f"{one.efficiency:.1%}",
             one.bottleneck]
            for one in links
        ]  # fmt: skip
        lines.append(table(rows))
    return "\n".join(lines)
