"""The memory of one GPU in training, and of a host, by part.

The state that an engine keeps for each parameter follows from arithmetic.

Bytes per parameter, with n data-parallel ranks, for an optimizer of two states, such as Adam:

    engine            weights  gradients  optimizer     buffers
    plain, fp32       4        4          8
    plain, 16 bit     2        4          12            up to 48 MiB (gradients to be added together)
    ZeRO 0, fp32      4        4          8
    ZeRO 1, fp32      4        4          12/n          4/n (the gradient it steps with)
    ZeRO 1, 16 bit    2        4          12/n          4/n
    ZeRO 2            as ZeRO 1, with gradients divided by n
    ZeRO 3            as ZeRO 2, with weights divided by n; weights in use and prefetched ones are buffers

The gradients of an update's micro-batches are added in fp32. DeepSpeed's pass through buckets of the size in its
configuration. Frozen parameters have weights only. Offloaded optimizer state and weights take no GPU memory. An
unsharded copy of the model in the precision of training is on the GPU during validation, which has no activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_nmt.engine.contract import SHARD_BYTES
from deepspeed_nmt.engine.plain import BUFFER_BYTES
from deepspeed_nmt.engine.settings import reduction_type

GIB = 2**30
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "validation")
"""Parts of a GPU's memory."""


@dataclass(frozen=True)
class Layout:
    """Layout of a model over GPUs.

    Attributes:
        stage: of ZeRO; None for plain torch.
        tensor_ranks: number of GPUs that share a model.
        zero: section ``zero_optimization`` of the DeepSpeed configuration.
        copies: True if checkpoints are written from a copy of the training state in host memory.
        states: elements that the optimizer keeps for each trained parameter, on average.
        is_whole: True if the optimizer needs whole parameters, which ZeRO must not divide.
    """

    stage: int | None
    ranks: int
    tensor_ranks: int = 1
    bits: int = 16
    zero: Mapping[str, Any] | None = None
    copies: bool = True
    states: float = 2.0
    is_whole: bool = False


def state_bytes(trained: int, frozen: int, layout: Layout) -> dict[str, int]:
    """Return the bytes that one GPU holds besides activations and logits, by part.

    ``trained`` and ``frozen`` are numbers of parameters in this rank's slice of the model.
    """
    zero = dict(layout.zero or {})
    n = layout.ranks // layout.tensor_ranks
    width = layout.bits // 8
    count = trained + frozen
    if layout.stage is None or layout.stage == 0:
        masters = 4 * trained if layout.bits == 16 else 0
        return {
            "weights": width * count,
            "gradients": 4 * trained,
            "optimizer": round(4 * layout.states * trained) + masters,
            "buffers": min(BUFFER_BYTES, 6 * trained) if layout.stage is None and layout.bits == 16 else 0,
        }
    bucket = elements(zero, "reduce_bucket_size", 5e8)
    # Allocated in full for models of any size; overlapped communication has a second one.
    element = 4 if reduction_type(layout.stage) == "fp32" else width
    bucket_bytes = element * bucket * (2 if zero.get("overlap_comm") and layout.stage < 3 else 1)
    optimizer, buffers = round(4 * (1 + layout.states) * trained / n), 4 * trained // n + bucket_bytes
    weights = width * count
    gradients = 4 * trained // n if layout.stage >= 2 else 4 * trained
    if layout.stage == 3:
        weights //= n
        live = elements(zero, "stage3_max_live_parameters", 1e9)
        ahead = elements(zero, "stage3_prefetch_bucket_size", 5e7)
        buffers += width * min(count, live + ahead)
    if _offloads(zero, "optimizer"):
        optimizer, buffers = 0, buffers - 4 * trained // n
    if _offloads(zero, "param"):
        weights = 0
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer, "buffers": buffers}


def validation_bytes(trained: int, frozen: int, layout: Layout) -> int:
    """Return the bytes of the unsharded copy of the model that one GPU holds during validation.

    Tensor-parallel slices are counted as if nothing were replicated, so this is an upper bound.
    """
    return layout.bits // 8 * (trained + frozen) * layout.tensor_ranks


def host_bytes(trained: int, frozen: int, layout: Layout, ranks: int) -> int:
    """Return the bytes of host memory that the tensors of the ranks of one host take at most.

    Each rank builds and loads the whole model in fp32, before it rounds or partitions it and moves it to its GPU.
    Then it builds the copy for validation, also in fp32, and rounds it. It keeps fp32 copies of frozen weights, and
    what is offloaded. One rank holds a copy of weights and optimizer states in fp32, from which checkpoints are
    written in the background; otherwise a file of weights and one of states while a checkpoint is written.

    ``trained`` and ``frozen`` are numbers of parameters in a rank's slice, and ``ranks`` is that of the host's ranks.
    """
    zero = dict(layout.zero or {})
    n = layout.ranks // layout.tensor_ranks
    whole, kept = (trained + frozen) * layout.tensor_ranks, 4 * frozen
    if _offloads(zero, "optimizer"):
        kept += round(4 * (2 + layout.states) * trained / n)
    if _offloads(zero, "param"):
        kept += layout.bits // 8 * (trained + frozen) // n
    states = round(4 * layout.states * trained * layout.tensor_ranks)
    copy = 4 * whole + states if layout.copies else min(SHARD_BYTES, 4 * whole) + min(SHARD_BYTES, states)
    starting, saving = ranks * 4 * whole, ranks * layout.bits // 8 * whole + copy
    return ranks * kept + max(starting, saving)


def cpu_bytes(trained: int, frozen: int, layout: Layout, ranks: int) -> int:
    """Return the bytes as :func:`host_bytes` if the ranks train on CPUs, without activations, logits and buffers."""
    state, copy = state_bytes(trained, frozen, layout), 4 * (trained + frozen) * layout.tensor_ranks
    training = sum(state[part] for part in ("weights", "gradients", "optimizer"))
    return max(host_bytes(trained, frozen, layout, ranks), ranks * (training + copy))


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    return bool((zero.get(f"offload_{what}") or {}).get("device", "none") != "none")


def elements(zero: Mapping[str, Any], key: str, default: float) -> int:
    """Return a size in DeepSpeed's configuration; "auto", and what DeepSpeed will refuse, is its default."""
    value = zero.get(key, default)
    return int(value if isinstance(value, int | float) else default)
