"""The grid of ranks, and connecting to it.

Ranks form a grid as in Megatron. The `tensor_ranks` ranks of a tensor-parallel group hold slices of one copy of the
model and process the same micro-batches. The ranks of a data-parallel group hold the same slices and process
different micro-batches. Consecutive ranks form a tensor-parallel group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_nmt.errors import ConfigError, TrainingError
from deepspeed_nmt.parallel.device import prepare_gpu, uses_cuda
from deepspeed_nmt.parallel.launched import RankPlace, once_per_host, place, pointing_to_doctor
from deepspeed_nmt.parallel.rendezvous import meet


@dataclass(frozen=True)
class World:
    """Position of this process in the grid of ranks.

    Attributes:
        rank: 0..ranks-1.
        ranks: number of processes.
        local_rank: index of this process on its host.
        device: device of its tensors.
        tensor_ranks: size of a tensor-parallel group.
        tensor_group: process group of this rank's tensor-parallel group; None if ``tensor_ranks`` is 1.
        data_group: process group of this rank's data-parallel group; None if ``tensor_ranks`` is 1, when
            it contains all ranks.
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
        """True on rank 0, which writes files and messages."""
        return self.rank == 0

    @property
    def tensor_rank(self) -> int:
        """Rank within the tensor-parallel group."""
        return self.rank % self.tensor_ranks

    @property
    def data_rank(self) -> int:
        """Rank within the data-parallel group."""
        return self.rank // self.tensor_ranks

    @property
    def data_ranks(self) -> int:
        """Size of the data-parallel group."""
        return self.ranks // self.tensor_ranks

    def regrouped(self, tensor_ranks: int) -> World:
        """Return the same ranks as a grid of another shape.

        Collective: all ranks must call it.

        Args:
            tensor_ranks: size of a tensor-parallel group; divides the number of ranks.
        """
        if tensor_ranks == 1:
            return World(self.rank, self.ranks, self.local_rank, self.device)
        # torch requires every rank to create every group, in the same order.
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
    stop_requested: Callable[[], object] = lambda: False,
) -> World:
    """Connect this process to the other ranks.

    Args:
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        timeout_s: seconds after which a rank stops waiting for another.
        tensor_ranks: size of a tensor-parallel group; divides the number of ranks.
        stop_requested: returns a true value when the rank is to stop instead of waiting for others.

    Raises:
        ConfigError: if ``device`` is "cuda" and there is no GPU, if torch has no kernels for it, if MASTER_ADDR or
            MASTER_PORT is missing, or if ``tensor_ranks`` does not divide the number of ranks.
        TrainingError: if a rank is missing after ``timeout_s``, or cannot connect to another.
        ReportedError: if a stop is requested.
    """
    rank, ranks, local_rank = here = place()
    with once_per_host():
        _check(ranks, tensor_ranks)
        with pointing_to_doctor():
            use_cuda = uses_cuda(device, "engine.device")
    with pointing_to_doctor():
        index = gpu_of(local_rank) if use_cuda else local_rank
        where = torch.device("cuda", index) if use_cuda else torch.device("cpu")
        if use_cuda:
            prepare_gpu(where)
    # DeepSpeed reads these even if the processes are already connected, and tries MPI if they are missing.
    # It chooses its GPU by LOCAL_RANK.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(index))
    if ranks == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        with pointing_to_doctor():
            _connect("nccl" if use_cuda else "gloo", here, timeout_s, stop_requested)
    return World(rank, ranks, local_rank, where).regrouped(tensor_ranks)


def _connect(backend: str, here: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> None:
    """Make the process group of all ranks.

    Raises:
        ConfigError: as in :func:`join_world`.
        TrainingError: if a rank is missing after ``timeout_s``, or cannot connect to another.
        ReportedError: if a stop is requested.
    """
    if here.ranks == 1:  # needs no port
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = meet(here, timeout_s, stop_requested)
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.ranks, timeout=timeout)
    except RuntimeError as error:
        raise TrainingError(
            f"ranks must be able to connect by {backend}, but rank {here.rank} cannot ({error}); check the network, "
            f"and {backend.upper()}_SOCKET_IFNAME if it is set"
        ) from error


def take_gpu(local_rank: int) -> None:
    """Make a rank's GPU the current one.

    Raises:
        ConfigError: if there is no GPU for the rank.
    """
    torch.cuda.set_device(gpu_of(local_rank))


def gpu_of(local_rank: int) -> int:
    """Return the index of a rank's GPU among those that are visible to it.

    SLURM can make a single GPU visible to each task, which then has index 0.

    Raises:
        ConfigError: if there is no GPU for the rank.
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


def _check(ranks: int, tensor_ranks: int) -> None:
    """Check the settings that are wrong on all ranks of a host if on any.

    Raises:
        ConfigError: as in :func:`join_world`.
    """
    if ranks % tensor_ranks:
        raise ConfigError(
            f"engine.tensor_parallel must divide the number of processes, but is {tensor_ranks} with {ranks} "
            f"{'process' if ranks == 1 else 'processes'}; start a multiple of {tensor_ranks}, or lower it"
        )
    check_launcher(ranks)


def check_launcher(ranks: int) -> None:
    """Check that several processes can find each other.

    Raises:
        ConfigError: if MASTER_ADDR or MASTER_PORT is missing.
    """
    if ranks > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            f"{ranks} processes need MASTER_ADDR and MASTER_PORT to find each other, but they are not set; "
            "start with `deepspeed` or `torchrun`, or see launch/"
        )


def leave_world() -> None:
    """Disconnect this process, so that a later run in it can connect again."""
    if dist.is_initialized():
        dist.destroy_process_group()
