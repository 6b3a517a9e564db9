"""Comparison of the weights that data-parallel ranks hold, which a faulty device changes in silence."""

from __future__ import annotations

import platform
import socket
import zlib
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from deepspeed_nmt.errors import DeviceError
from deepspeed_nmt.parallel.collectives import fail_together, gather_lists
from deepspeed_nmt.parallel.world import World


def has_replicas(module: nn.Module) -> bool:
    """Return True if each data-parallel rank has whole weights, which ZeRO-3 partitions."""
    return not any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def check_replicas(module: nn.Module, world: World) -> None:
    """Check that all data-parallel ranks have the same weights, bit for bit. All ranks call it together.

    Raises:
        ReportedError: on all ranks, if they differ.
    """
    digest = 0
    for parameter in module.parameters():
        digest = zlib.crc32(parameter.detach().flatten().view(torch.uint8).cpu().numpy().tobytes(), digest)
    cuda = world.device.type == "cuda"
    device = torch.cuda.get_device_name(world.device) if cuda else platform.processor() or platform.machine()
    facts = gather_lists([[f"rank {world.rank} on {socket.gethostname()} ({device})", digest]], world)
    with fail_together(world):
        for tensor_rank in range(world.tensor_ranks):
            compare_digests(facts[tensor_rank :: world.tensor_ranks])


def compare_digests(facts: Sequence[tuple[str, int]]) -> None:
    """Compare digests of replicas, each with its place; without a majority all are named.

    Raises:
        DeviceError: if they differ.
    """
    usual, votes = Counter(digest for _, digest in facts).most_common(1)[0]
    if votes < len(facts):
        odd = [place for place, digest in facts if digest != usual or 2 * votes <= len(facts)]
        raise DeviceError(
            f"{' or '.join(odd)} has other weights than the other ranks: its device, memory or network is faulty. "
            "The last checkpoint is intact; drain the host (sbatch --exclude leaves it out), and start the same "
            "command again to resume"
        )
