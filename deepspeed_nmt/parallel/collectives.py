"""What ranks say to each other, without pickling anything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_nmt.parallel.world import World

_BUCKET_ELEMENTS = 8 * 1024 * 1024


def barrier(world: World) -> None:
    """Wait for all ranks."""
    if world.ranks > 1:
        dist.barrier(device_ids=[world.local_rank] if world.device.type == "cuda" else None)


def sum_over_ranks(values: dict[str, float], world: World) -> dict[str, float]:
    """Add up numbers of the same names over all ranks, in double precision."""
    if world.ranks == 1:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor)
    return dict(zip(names, tensor.tolist(), strict=True))


def sum_over_data_ranks(values: dict[str, float], world: World) -> dict[str, float]:
    """The same of what was found in micro-batches: of ranks that share a model, and so a batch, one counts."""
    return sum_over_ranks(values if world.tensor_rank == 0 else dict.fromkeys(values, 0.0), world)


def any_rank(flag: bool, world: World) -> bool:
    """Whether any rank says yes. All ranks get the same answer."""
    return sum_over_ranks({"flag": float(flag)}, world)["flag"] > 0.0


def from_main(value: Any, world: World) -> Any:
    """What rank 0 holds, as JSON allows it, on every rank; other ranks' ``value`` is ignored."""
    if world.ranks == 1:
        return value
    data = json.dumps(value).encode() if world.is_main else b""
    size = torch.tensor([len(data)], device=world.device)
    dist.broadcast(size, 0)
    payload = torch.zeros(int(size), dtype=torch.uint8, device=world.device)
    if world.is_main:
        payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(payload, 0)
    return json.loads(bytes(payload.cpu().tolist()))


def gather_lists(items: list[Any], world: World) -> list[Any]:
    """The lists of all ranks, joined in the order of ranks, on every rank. Items must be what JSON allows."""
    if world.ranks == 1:
        return list(items)
    data = json.dumps(items).encode()
    sizes = torch.zeros(world.ranks, dtype=torch.int64, device=world.device)
    sizes[world.rank] = len(data)
    dist.all_reduce(sizes)
    longest = int(sizes.max())
    mine = torch.zeros(longest, dtype=torch.uint8, device=world.device)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(world.device)
    everyone = [torch.empty_like(mine) for _ in range(world.ranks)]
    dist.all_gather(everyone, mine)
    joined: list[Any] = []
    for rank, payload in enumerate(everyone):
        joined.extend(json.loads(payload[: int(sizes[rank])].cpu().numpy().tobytes()))
    return joined


def all_reduce_in_buckets(tensors: Iterable[Tensor], world: World) -> None:
    """Sum tensors over the ranks that hold the same slice of the model, in place, several in one message."""
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
    _reduce_bucket(bucket, world)


def _reduce_bucket(bucket: list[Tensor], world: World) -> None:
    if not bucket:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat, group=world.data_group)
    offset = 0
    for tensor in bucket:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()
