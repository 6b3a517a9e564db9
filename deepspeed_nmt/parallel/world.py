"""Who this process is among the others, and how they find each other.

Ranks form a grid: `tensor_ranks` neighbours hold a model's matrices in slices and work on the same micro-batches;
ranks with the same place among their neighbours hold the same slice and work on different ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.launched import once_per_host, place
from deepspeed_nmt.parallel.rendezvous import meet


@dataclass(frozen=True)
class World:
    """This process among all of the run.

    Attributes:
        rank: 0..ranks-1.
        ranks: number of processes.
        local_rank: number of this process on its host.
        device: where its tensors live.
        tensor_ranks: how many neighbours share a model, this one among them.
        tensor_group, data_group: process groups of those neighbours, and of those who hold the same slice; None for
            one rank alone, and for all ranks.
    """

    rank: int
    ranks: int
    local_rank: int
    device: torch.device
    tensor_ranks: int = 1
    tensor_group: Any = None
    data_group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    @property
    def tensor_rank(self) -> int:
        """Place among the neighbours that share a model."""
        return self.rank % self.tensor_ranks

    @property
    def data_rank(self) -> int:
        """Place among those who work on different micro-batches."""
        return self.rank // self.tensor_ranks

    @property
    def data_ranks(self) -> int:
        """How many work on different micro-batches."""
        return self.ranks // self.tensor_ranks

    def regrouped(self, tensor_ranks: int) -> World:
        """The same ranks as another grid. All must ask together."""
        if tensor_ranks == 1:
            return World(self.rank, self.ranks, self.local_rank, self.device)
        # Every rank takes part in making every group, in the same order.
        everyone = range(self.ranks)
        starts = range(0, self.ranks, tensor_ranks)
        tensor_groups = [dist.new_group(everyone[start : start + tensor_ranks]) for start in starts]
        data_groups = [dist.new_group(everyone[place::tensor_ranks]) for place in range(tensor_ranks)]
        groups = (tensor_groups[self.rank // tensor_ranks], data_groups[self.rank % tensor_ranks])
        return World(self.rank, self.ranks, self.local_rank, self.device, tensor_ranks, *groups)


def join_world(
    device: str = "auto",
    timeout_s: float = 1800.0,
    tensor_ranks: int = 1,
    asked: Callable[[], object] = lambda: False,
) -> World:
    """Find this process's place and connect it to the others.

    Args:
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        timeout_s: seconds after which a rank that waits for another gives up.
        tensor_ranks: neighbours that share a model; divides the number of ranks.
        asked: whether to end instead of waiting for others.

    Raises:
        ConfigError: if a GPU is asked for and there is none, the ranks do not know where to meet, or they cannot be
            divided by ``tensor_ranks``.
        TrainingError: if not all ranks come within ``timeout_s``.
        ReportedError: if asked to end.
    """
    rank, ranks, local_rank = here = place()
    with once_per_host():
        _check(device, ranks, tensor_ranks)
    use_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    index = _gpu(local_rank) if use_cuda else local_rank
    where = torch.device("cuda", index) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    # DeepSpeed looks for these even when the processes are already connected, and tries MPI if they are missing.
    # By the last it chooses its GPU.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(index))
    if ranks == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        backend, timeout = ("nccl" if use_cuda else "gloo"), timedelta(seconds=timeout_s)
        if ranks == 1:  # no port needed, none taken
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            store = meet(here, timeout_s, asked)
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return World(rank, ranks, local_rank, where).regrouped(tensor_ranks)


def _gpu(local_rank: int) -> int:
    """The GPU of a rank, among those it can see: SLURM may show each task its own alone.

    Raises:
        ConfigError: if there is none for it.
    """
    seen = torch.cuda.device_count()
    if seen == 1 and os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1":
        return 0
    if local_rank >= seen:
        raise ConfigError(
            f"local rank {local_rank} needs a GPU of its own, but sees {seen}; start as many processes on a host as "
            "it has GPUs (SLURM: --gpus-per-node, or --gpus-per-task 1)"
        )
    return local_rank


def _check(device: str, ranks: int, tensor_ranks: int) -> None:
    """Refuse what is wrong for all ranks of this host alike.

    Raises:
        ConfigError: as in :func:`join_world`.
    """
    if ranks % tensor_ranks:
        raise ConfigError(
            f"engine.tensor_parallel must divide the number of processes, but is {tensor_ranks} with {ranks} "
            f"{'process' if ranks == 1 else 'processes'}; start a multiple of {tensor_ranks}, or lower it"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but torch finds no GPU; use engine.device=cpu or install a CUDA build"
        )
    if ranks > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            f"{ranks} processes need MASTER_ADDR and MASTER_PORT to find each other, but they are not set; "
            "start with `deepspeed` or `torchrun`, or see launch/"
        )


def leave_world() -> None:
    """Disconnect, so that a next run in this process can connect anew."""
    if dist.is_initialized():
        dist.destroy_process_group()
