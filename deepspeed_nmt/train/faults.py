"""Attribution of faults: is a gradient that is not finite, or a spike, the fault of data, or of a device?

Before the step of an update, and after one that is skipped, the weights are still those of its gradient, so it can be
computed again at once. All ranks compute the losses and gradients of their micro-batches once more, read from the
corpus anew, and those of the rank before them:

    all results are the same    data or arithmetic: the sentences, the weight or the module are named
    a rank's results differ     its device has computed a wrong one: the rank is named, and the run ends
    replicas' weights differ    the device or the network of a rank has changed them: likewise
    the norm alone differs      a gradient was damaged on its way: skipped, or, if it is finite, the run ends; in fp16
                                what ranks add up may have overflowed, and a skipped one tells nothing

Two ranks that contradict one another are both named; with three or more, the one that contradicts its neighbours.
Devices are compared only where arithmetic is reproducible to the bit, and between devices of one model. Under ZeRO-3
weights have no replicas, and nothing is computed again.
"""

from __future__ import annotations

import math
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data.corpus import Corpora
from deepspeed_nmt.engine.contract import UpdateResult, add_sums, seed_dropout
from deepspeed_nmt.engine.hashes import digest_of
from deepspeed_nmt.engine.transfer import on_device
from deepspeed_nmt.errors import DeviceError
from deepspeed_nmt.files import system_lines
from deepspeed_nmt.parallel.collectives import all_reduce_in_buckets, any_rank, fail_together, gather_lists
from deepspeed_nmt.parallel.tensor import total_norm
from deepspeed_nmt.parallel.world import World

_SAME_NORM = 0.1
"""Bound on the relative difference of two norms of one gradient, far above the rounding of any order of its sums."""


class Replay(BaseModel):
    """Digests of the sums of losses of a rank's micro-batches, and of their gradients before they are reduced."""

    sums: int = 0
    gradients: int = 0
    is_finite: bool = True


class Witness(BaseModel):
    """What a rank knows of an update.

    Attributes:
        device: its model; devices of other models may round otherwise.
        weights: digest of the weights.
        first: digest of the update's sums of losses when it was made.
        again: the same micro-batches computed again.
        previous: those of the data-parallel rank before.
        cause: weight, module or sentences without a finite value, or with the largest gradient; empty without one.
        size: norm of that gradient.
    """

    rank: int
    host: str
    device: str
    weights: int
    first: int = 0
    again: Replay = Replay()
    previous: Replay = Replay()
    cause: str = ""
    size: float = 0.0


def has_replicas(module: nn.Module) -> bool:
    """Return True if each data-parallel rank has whole weights, which ZeRO-3 partitions."""
    return not any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_exact(world: World) -> bool:
    """Return True if the same computation gives the same bits on these devices."""
    return world.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


def attribute(
    module: TrainModule,
    micro_batches_of: Callable[[int], Sequence[Batch]],
    result: UpdateResult,
    world: World,
    corpora: Corpora,
) -> str:
    """Compute an update again that was skipped, or is a spike and awaits its step, and return its cause.

    All ranks call it together. ``micro_batches_of`` returns the micro-batches of a data-parallel rank, made anew of
    the text of ``corpora``. The cause is the sentences, the weight or the module at fault; empty if nothing is known.

    Raises:
        ReportedError: on all ranks, if a device has computed another result; on a single one, a DeviceError.
    """
    micro_batches = micro_batches_of(world.data_rank)
    total = GradientTotal(module, world.rank, result.loss_scale, corpora)
    again = replay(module, micro_batches, world.data_rank, result.loss_scale, world.device, total)
    before = (world.data_rank - 1) % world.data_ranks
    previous = replay(module, micro_batches_of(before), before, result.loss_scale, world.device)
    is_finite = not any_rank(not again.is_finite, world)
    witnesses = _witnesses(
        module,
        world,
        first=digest_of(value for _, value in sorted(result.sums.items())),
        again=again,
        previous=previous,
        cause=total.cause if is_finite else cause_of(module, micro_batches, world, corpora),
        size=total.largest,
    )
    _check(witnesses, world)
    if not is_finite:
        return next((one.cause for one in witnesses if one.cause), "")
    norm = total.norm(world)
    if result.skipped and math.isfinite(norm):
        if any(parameter.dtype == torch.float16 for parameter in module.parameters()):
            return ""  # ranks may have overflowed in what they add up
        return "computed again it is finite, with every rank's loss as before: a gradient was damaged on its way"
    with fail_together(world):
        if not result.skipped and not abs(norm - result.grad_norm) <= _SAME_NORM * max(norm, result.grad_norm):
            what = f"has damaged a gradient, whose norm is {norm:.3g} when computed again, not {{:.3g}}"
            raise DeviceError(_message(witnesses, what.format(result.grad_norm)))
    return f"the same when computed again, so data or arithmetic: {max(witnesses, key=lambda one: one.size).cause}"


def check_devices(witnesses: Sequence[Witness]) -> None:
    """Compare what the data-parallel ranks know of an update.

    Raises:
        DeviceError: if a device has computed another result, or holds other weights.
    """
    count = len(witnesses)
    if changed := [one for one in witnesses if one.first != one.again.sums]:
        raise DeviceError(_message(changed, "computed another loss when the same update was made again"))
    digests = Counter(one.weights for one in witnesses)
    if len(digests) > 1:
        usual, votes = digests.most_common(1)[0]
        odd = [one for one in witnesses if one.weights != usual] if 2 * votes > count else list(witnesses)
        raise DeviceError(_message(odd, "has other weights than the other ranks"))
    contradictions: Counter[int] = Counter()
    for place, one in enumerate(witnesses):
        judge = witnesses[(place + 1) % count]
        if judge.device == one.device and judge.previous != one.again:
            contradictions.update({place, (place + 1) % count})
    if contradictions:
        most = max(contradictions.values())
        odd = [witnesses[place] for place in sorted(contradictions) if contradictions[place] == most]
        raise DeviceError(_message(odd, "computed another gradient than another rank from the same sentences"))


def check_replicas(module: nn.Module, world: World) -> None:
    """Check that all data-parallel ranks have the same weights, bit for bit. All ranks call it together.

    Raises:
        ReportedError: on all ranks, if they differ.
    """
    _check(_witnesses(module, world), world)


def _witnesses(module: nn.Module, world: World, **facts: Any) -> list[Witness]:
    """Return what each rank knows: ``facts`` of this one."""
    own = Witness(
        rank=world.rank,
        host=socket.gethostname(),
        device=_model_of(world.device),
        weights=digest_of(module.parameters()),
        **facts,
    )
    return list(map(Witness.model_validate, gather_lists([own.model_dump()], world)))


def _check(witnesses: Sequence[Witness], world: World) -> None:
    with fail_together(world):
        for tensor_rank in range(world.tensor_ranks):
            check_devices(witnesses[tensor_rank :: world.tensor_ranks])


class GradientTotal:
    """Sum of the gradients of this rank's micro-batches, and the micro-batch with the largest one.

    Attributes:
        largest: norm of its gradient, as a part of the update's.
        cause: its sentences, rank, and figures.
    """

    def __init__(self, module: TrainModule, rank: int, loss_scale: float, corpora: Corpora) -> None:
        self._trained = _trained(module)
        self._sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._trained]
        self._rank, self._scale, self._corpora = rank, loss_scale, corpora
        self.largest, self.cause = 0.0, ""

    def add(self, batch: Batch, loss: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of a micro-batch; None for parameters that it does not use."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.add_(gradient)
        if all(gradient is None for gradient in gradients):
            return
        norms = [torch.linalg.vector_norm(gradient.float()) for gradient in gradients if gradient is not None]
        size = float(torch.linalg.vector_norm(torch.stack(norms))) / self._scale
        if size > self.largest:
            loss_per_token = float(loss.detach()) / max(1, batch.target_tokens)
            self.largest = size
            self.cause = (
                f"the largest gradient, of norm {size:.3g}, is that of {_pairs(batch, self._corpora)} on rank "
                f"{self._rank}, whose loss is {loss_per_token:.3f} nats a token"
            )

    def norm(self, world: World) -> float:
        """Sum the gradients over all ranks, and return the norm of the update's. All ranks call it together."""
        all_reduce_in_buckets(self._sums, world)
        return float(total_norm(self._trained, self._sums, world)) / self._scale


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@torch.enable_grad()  # a step may be made without
def replay(
    module: TrainModule,
    micro_batches: Sequence[Batch],
    data_rank: int,
    loss_scale: float,
    device: torch.device,
    total: GradientTotal | None = None,
) -> Replay:
    """Compute losses and gradients as the rank ``data_rank`` does in an update. The module keeps its gradients."""
    module.train()
    trained = _trained(module)
    sums: dict[str, Tensor] = {}
    digest, is_finite = 0, True
    for batch in on_device(micro_batches, device):
        seed_dropout(batch, data_rank)
        output = module(batch)
        add_sums(sums, {"loss": output.loss, "nll": output.nll, **output.metrics})
        scaled = output.loss * (loss_scale / max(1, batch.update.tokens))
        partial = torch.autograd.grad(scaled, trained, allow_unused=True)
        if total is not None:
            total.add(batch, output.loss, partial)
        gradients = [gradient for gradient in partial if gradient is not None]
        digest = digest_of(gradients, digest)
        is_finite = is_finite and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return Replay(sums=digest_of(v for _, v in sorted(sums.items())), gradients=digest, is_finite=is_finite)


def cause_of(module: TrainModule, micro_batches: Sequence[Batch], world: World, corpora: Corpora) -> str:
    """Return the weight, or the first module and the sentences, whose values are not finite; empty if all are."""
    for name, parameter in module.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return f"the weight {name} is not finite"
    names: list[str] = []

    def note(name: str, outputs: object) -> None:
        tensors = filter(torch.is_tensor, tree_leaves(outputs))
        if not names and any(not bool(torch.isfinite(tensor).all()) for tensor in tensors):
            names.append(name)

    hooks = [
        part.register_forward_hook(lambda part, inputs, outputs, name=name: note(name, outputs))
        for name, part in module.model.named_modules()
    ]
    try:
        with torch.no_grad():
            for batch in on_device(micro_batches, world.device):
                seed_dropout(batch, world.data_rank)
                output = module(batch)
                if names or not bool(torch.isfinite(output.loss)):
                    where = f"the output of {names[0] or 'the model'}" if names else "the loss"
                    return f"{where} is not finite on rank {world.rank}, for {_pairs(batch, corpora)}"
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def _pairs(batch: Batch, corpora: Corpora) -> str:
    return corpora.named(batch.sentence_ids_B.numpy(force=True))


def _model_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = system_lines("/proc/cpuinfo")
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _message(witnesses: Sequence[Witness], what: str) -> str:
    who = " or ".join(f"rank {one.rank} on {one.host} ({one.device})" for one in witnesses)
    return (
        f"{who} {what}: its device, memory or network is faulty. The last checkpoint is intact; drain the host "
        "(sbatch --exclude leaves it out), and start the same command again to resume"
    )
