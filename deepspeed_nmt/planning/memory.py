"""The memory of one GPU in training, by part, and the work of an update.

Activations and work are counted, not estimated: one update of the run's own model and objective runs on the meta
device, forward and backward. The state that an engine keeps for each parameter follows from arithmetic.

Bytes per parameter, with n data-parallel ranks:

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

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.accumulation import BUFFER_BYTES
from deepspeed_nmt.engine.checkpoint_size import SHARD_BYTES
from deepspeed_nmt.planning.tally import Tally

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "validation")
RecomputedLayers = tuple[int, int]
"""Every k-th layer application of encoder and decoder is recomputed; 0 none."""
LENGTH = 32
"""Tokens of each sentence in the micro-batches that are counted."""


@dataclass(frozen=True)
class Work:
    """Memory and work of one micro-batch.

    Attributes:
        tokens: target tokens, and as many source tokens.
        activations: bytes that the forward pass keeps for the backward pass.
        logits: bytes on top of those, for the projection, the loss, and temporary tensors of the backward pass.
        flops: of the model's matrix products, forward and backward.
    """

    tokens: int
    activations: int
    logits: int
    flops: int


def count_update(
    model: TranslationModel,
    objective: Objective,
    vocabulary: Vocabulary,
    tokens: int,
    recompute: RecomputedLayers,
    updates: int = 1,
) -> Work:
    """Run micro-batches of a model on the meta device, one for each of some updates, and count.

    Random choices differ between updates: memory is their maximum, work their mean.

    Args:
        model: on the meta device, in the dtype it is trained in.
        objective: of the run.
        vocabulary: of the data.
        tokens: padded target tokens, and as many source tokens, of a micro-batch.
        recompute: every k-th layer application of each side; 0 none.
        updates: number of updates to count.
    """
    model.recompute(*recompute)
    module = TrainModule(model, objective).train()
    for parameter in model.parameters():
        # Gradients exist already, as in the second micro-batch of an update.
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    found = []
    for update in range(1, updates + 1):
        batch = _batch(tokens, vocabulary, update)
        kept: list[int] = []
        with Tally() as tally:
            hook = model.projection.register_forward_pre_hook(lambda *_, t=tally, k=kept: k.append(t.bytes))
            module(batch).loss.backward()
            hook.remove()
        found.append((kept[0], tally.peak_bytes - kept[0], tally.flops))
    for parameter in model.parameters():
        parameter.grad = None
    model.recompute(0, 0)
    return Work(
        tokens=batch.target_tokens,
        activations=max(kept for kept, _, _ in found),
        logits=max(logits for _, logits, _ in found),
        flops=sum(flops for _, _, flops in found) // updates,
    )


@dataclass(frozen=True)
class Rates:
    """Work of training in operations, forward and backward, without recomputation.

    Attributes:
        source: for each source token.
        target: for each target token.
    """

    source: float
    target: float


def count_rates(model: TranslationModel, objective: Objective, vocabulary: Vocabulary, updates: int = 2) -> Rates:
    """Count the work of a model on the meta device, as the mean over some updates."""
    module = TrainModule(model, objective).train()
    rows, flops = 8, []
    for source_length in (LENGTH, 2 * LENGTH):
        with Tally() as tally:
            for update in range(1, updates + 1):
                module(_batch(rows * LENGTH, vocabulary, update, source_length)).loss.backward()
        flops.append(tally.flops / updates)
    tokens = rows * LENGTH
    source = (flops[1] - flops[0]) / tokens
    return Rates(source, flops[0] / tokens - source)


def _batch(tokens: int, vocabulary: Vocabulary, update: int, source_length: int | None = None) -> Batch:
    length = min(LENGTH, tokens)
    rows = max(1, tokens // length)
    source_length = source_length or length

    def of(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    count = rows * length
    # One source position counts as padding: batches without any are rare.
    return Batch(
        source_BS=of(rows, source_length),
        target_input_BT=of(rows, length),
        target_output_BT=of(rows, length),
        sentence_ids_B=of(rows),
        source_tokens=rows * source_length - 1,
        target_tokens=count,
        pad=vocabulary.pad,
        update=UpdateInfo(seed=1, number=update, tokens=count, sentences=rows),
    )


@dataclass(frozen=True)
class Layout:
    """Layout of a model over GPUs.

    Attributes:
        stage: of ZeRO; None for plain torch.
        ranks: number of GPUs.
        tensor_ranks: number of GPUs that share a model.
        bits: 32 or 16.
        zero: section ``zero_optimization`` of the DeepSpeed configuration.
        copies: True if checkpoints are written from a copy of the training state in host memory.
    """

    stage: int | None
    ranks: int
    tensor_ranks: int = 1
    bits: int = 16
    zero: Mapping[str, Any] | None = None
    copies: bool = True


def state_bytes(trained: int, frozen: int, layout: Layout) -> dict[str, int]:
    """Return the bytes that one GPU holds besides activations and logits, by part.

    Args:
        trained: number of trained parameters in this rank's slice of the model.
        frozen: number of frozen ones.
        layout: of the model over the ranks.
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
            "optimizer": 8 * trained + masters,
            "buffers": min(BUFFER_BYTES, 6 * trained) if layout.stage is None and layout.bits == 16 else 0,
        }
    bucket = _elements(zero, "reduce_bucket_size", 5e8)
    # Allocated in full for models of any size; overlapped communication has a second one.
    bucket_bytes = width * bucket * (2 if zero.get("overlap_comm") and layout.stage < 3 else 1)
    optimizer, buffers = 12 * trained // n, 4 * trained // n + bucket_bytes
    weights = width * count
    gradients = 4 * trained // n if layout.stage >= 2 else 4 * trained
    if layout.stage == 3:
        weights //= n
        live = _elements(zero, "stage3_max_live_parameters", 1e9)
        ahead = _elements(zero, "stage3_prefetch_bucket_size", 5e7)
        buffers += width * min(count, live + ahead)
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        optimizer, buffers = 0, buffers - 4 * trained // n
    if zero.get("offload_param", {}).get("device", "none") != "none":
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
    what is offloaded. One rank holds a copy of weights and moments in fp32, from which checkpoints are written in the
    background; otherwise a file of weights and one of moments while a checkpoint is written.

    Args:
        trained: number of trained parameters in a rank's slice of the model.
        frozen: number of frozen ones.
        layout: of the model over all ranks.
        ranks: number of ranks of the host.
    """
    zero = dict(layout.zero or {})
    n = layout.ranks // layout.tensor_ranks
    whole, kept = (trained + frozen) * layout.tensor_ranks, 4 * frozen
    if zero.get("offload_optimizer", {}).get("device", "none") != "none":
        kept += 16 * trained // n
    if zero.get("offload_param", {}).get("device", "none") != "none":
        kept += layout.bits // 8 * (trained + frozen) // n
    moments = 8 * trained * layout.tensor_ranks
    copy = 4 * whole + moments if layout.copies else min(SHARD_BYTES, 4 * whole) + min(SHARD_BYTES, moments)
    starting, saving = ranks * 4 * whole, ranks * layout.bits // 8 * whole + copy
    return ranks * kept + max(starting, saving)


def cpu_bytes(trained: int, frozen: int, layout: Layout, ranks: int) -> int:
    """Return the bytes of memory that the tensors of the ranks of one host take if they train on its CPUs.

    Activations, logits and buffers are not counted. Arguments as in :func:`host_bytes`.
    """
    state, copy = state_bytes(trained, frozen, layout), 4 * (trained + frozen) * layout.tensor_ranks
    training = sum(state[part] for part in ("weights", "gradients", "optimizer"))
    return max(host_bytes(trained, frozen, layout, ranks), ranks * (training + copy))


def _elements(zero: Mapping[str, Any], key: str, default: float) -> int:
    """Return a size in DeepSpeed's configuration; "auto" is its default."""
    value = zero.get(key, default)
    return int(default if value == "auto" else float(value))


WorkOf = Callable[[int, RecomputedLayers], Work]
Counts = tuple[Work, ...]
"""Work of two or more micro-batches, from the smallest to the largest."""


def interpolated(none: Counts, encoder: Counts, decoder: Counts, applications: tuple[int, int]) -> WorkOf:
    """Return a function from micro-batch size and recomputation to work, interpolated between counts.

    Everything is affine in the number of tokens between two counts, and beyond the first and the last. If every k-th
    of n applications is recomputed, n // k of them save their share.

    Args:
        none: counts without recomputation.
        encoder: counts with all of the encoder recomputed.
        decoder: counts with all of the decoder recomputed.
        applications: number of layer applications of encoder and decoder.
    """

    def line(tokens: int, counts: Counts, what: str) -> float:
        segments = list(itertools.pairwise(counts))
        small, large = next((pair for pair in segments if tokens <= pair[1].tokens), segments[-1])
        slope = (getattr(large, what) - getattr(small, what)) / (large.tokens - small.tokens)
        return float(getattr(small, what) + slope * (tokens - small.tokens))

    def work(tokens: int, recompute: RecomputedLayers) -> Work:
        shares = [
            count // every / count if every and count else 0.0
            for count, every in zip(applications, recompute, strict=True)
        ]

        def changed(what: str) -> int:
            start = line(tokens, none, what)
            sides = zip(shares, (encoder, decoder), strict=True)
            return int(start + sum(share * (line(tokens, counts, what) - start) for share, counts in sides))

        used = [none, *(counts for share, counts in zip(shares, (encoder, decoder), strict=True) if share)]
        logits = max(int(line(tokens, counts, "logits")) for counts in used)
        return Work(tokens, changed("activations"), logits, changed("flops"))

    return work
