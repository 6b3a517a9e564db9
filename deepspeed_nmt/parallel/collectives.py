"""Collectives over ranks, and errors that end all of them. Objects are exchanged as JSON, never as pickles.

A rank whose main thread is in this file waits for other ranks, as the watchdog sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.console import report
from deepspeed_nmt.errors import ReportedError, TrainingError, UserError
from deepspeed_nmt.parallel.world import World

_BUCKET_ELEMENTS = 8 * 1024 * 1024
"""Elements after which a bucket of tensors is reduced."""


T = TypeVar("T")


def await_ranks(result: Callable[[], T]) -> T:
    """Return ``result()``, which waits for the result of a collective.

    NCCL's calls return at once. The wait is where the host reads the result, which only this function marks.
    """
    return result()


def sum_over_ranks(values: dict[str, float], world: World) -> dict[str, float]:
    """Sum each value over all ranks, which pass the same names, in double precision."""
    if world.ranks == 1:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor)
    return dict(zip(names, tensor.tolist(), strict=True))


def max_over_ranks(values: list[float], world: World) -> Tensor:
    """Return the maximum of each value over all ranks, in double precision, on the device, without waiting for it."""
    # `torch.tensor(..., device=...)` would wait until the device has done all that is queued.
    tensor = torch.tensor(values, dtype=torch.float64).to(world.device, non_blocking=True)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor


def sum_over_data_ranks(values: dict[str, float], world: World) -> dict[str, float]:
    """Sum each value over data-parallel ranks, in double precision; of a tensor-parallel group the first counts."""
    return sum_over_ranks(values if world.tensor_rank == 0 else dict.fromkeys(values, 0.0), world)


def any_rank(flag: bool, world: World) -> bool:
    """Return True on all ranks if ``flag`` is True on any rank."""
    return sum_over_ranks({"flag": float(flag)}, world)["flag"] > 0.0


def from_main(value: Any, world: World) -> Any:
    """Return rank 0's value, which JSON can represent, on every rank."""
    if world.ranks == 1:
        return value
    data = _bytes_of(value, world) if world.is_main else None
    size = torch.tensor([0 if data is None else len(data)], device=world.device)
    dist.broadcast(size, src=0)
    if data is None:
        data = torch.empty(int(size), dtype=torch.uint8, device=world.device)
    dist.broadcast(data, src=0)
    return json.loads(data.cpu().numpy().tobytes())


def gather_lists(items: list[Any], world: World) -> list[Any]:
    """Concatenate the lists of all ranks, of items that JSON can represent, in the order of ranks, on every rank."""
    if world.ranks == 1:
        return list(items)
    data = _bytes_of(items, world)
    sizes = torch.empty(world.ranks, dtype=torch.int64, device=world.device)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)], device=world.device))
    longest = int(sizes.max())
    everyone = torch.empty(world.ranks * longest, dtype=torch.uint8, device=world.device)
    dist.all_gather_into_tensor(everyone, F.pad(data, (0, longest - len(data))))
    payloads = everyone.view(world.ranks, longest).cpu().numpy()
    texts = (payload[:size].tobytes() for payload, size in zip(payloads, sizes.tolist(), strict=True))
    return [item for text in texts for item in json.loads(text)]


def _bytes_of(value: Any, world: World) -> Tensor:
    """Return JSON of a value as bytes on the device."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)


def gather_over_data_ranks(part_N: Tensor, world: World) -> Tensor:
    """Return the parts of all data-parallel ranks, in the order of ranks. Shape: (N,) -> (ranks,N)."""
    everyones = part_N.new_empty(world.data_ranks * part_N.numel())
    dist.all_gather_into_tensor(everyones, part_N, group=world.data_group)
    return everyones.view(world.data_ranks, -1)


def all_reduce_over_data_ranks(tensor: Tensor, world: World) -> None:
    """Sum a tensor over data-parallel ranks, in place."""
    dist.all_reduce(tensor, group=world.data_group)


def begin_alike(tensors: Iterable[Tensor], world: World) -> None:
    """Copy tensors of the first data-parallel rank to the others, in place: unlike CPUs round in their own ways."""
    if world.data_ranks > 1:
        for tensor in tensors:
            dist.broadcast(tensor, group=world.data_group, group_src=0)


def all_reduce_in_buckets(tensors: Iterable[Tensor], world: World) -> None:
    """Sum tensors of one dtype, the same shapes on all ranks, over data-parallel ranks, in place and many at once."""
    if world.data_ranks == 1:
        return
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        bucket.append(tensor)
        elements += tensor.numel()
        if elements >= _BUCKET_ELEMENTS:
            _reduce_bucket(bucket, world)
            bucket, elements = [], 0
    if bucket:
        _reduce_bucket(bucket, world)


def _reduce_bucket(bucket: list[Tensor], world: World) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    all_reduce_over_data_ranks(flat, world)
    for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Fail on all ranks, by a ReportedError, if the block fails on any of them by a User-, Training- or OSError.

    All ranks must enter the block, and nothing inside it may wait for other ranks. If several ranks fail with the
    same message, the first of them reports it. A single rank raises the error of the block.
    """
    problem: Exception | None = None
    try:
        yield
    except (UserError, TrainingError, OSError) as error:
        if world.ranks == 1:
            raise
        problem = error
    if not any_rank(problem is not None, world):
        return
    problems = gather_lists([] if problem is None else [[world.rank, str(problem)]], world)
    first = {message: rank for rank, message in reversed(problems)}
    status = 0
    if problem is not None and first[str(problem)] == world.rank:
        status = report(problem)
    # Wait until every message is written: a launcher ends all ranks as soon as one exits.
    statuses = gather_lists([status], world)
    raise ReportedError(next(filter(None, statuses)), problems[0][1]) from problem
