"""The grid of ranks, and their rendezvous at a TCP store of rank 0.

Each rank registers at the store and waits until all ranks have. Meanwhile it logs the ranks that are missing, and
stops on request.

Ranks form a grid as in Megatron. The `tensor_ranks` ranks of a tensor-parallel group hold slices of one copy of the
model and process the same micro-batches. The ranks of a data-parallel group hold the same slices and process
different micro-batches. Consecutive ranks form a tensor-parallel group.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, ReportedError, TrainingError, counted, listed, shown
from deepspeed_nmt.parallel.hardware import prepare_gpu, uses_cuda
from deepspeed_nmt.parallel.launched import RankPlace, once_per_host, place, pointing_to_doctor, restarts

_FIRST_REPORT_S, _REPORT_EVERY_S = 10.0, 60.0
"""Seconds of waiting before the missing ranks are logged for the first time, and between later times."""
_ANSWER_S = 5.0
"""Seconds that rank 0's store has to answer a new connection before the next attempt."""
_ATTEMPT_S = 30.0
"""Seconds after which a connection that neither fails nor answers is tried anew."""
_LEAVE_S = 5.0
"""Seconds that rank 0 waits, when all stop, until the ranks that have registered know it."""
_START, _STOP = b"start", b"stop"


@dataclass(frozen=True)
class World:
    """Position of this process in the grid of ranks.

    Attributes:
        local_rank: index of this process on its host.
        device: device of its tensors.
        tensor_ranks: size of a tensor-parallel group.
        tensor_group: process group of this rank's tensor-parallel group; None if ``tensor_ranks`` is 1.
        data_group: process group of this rank's data-parallel group; None for all ranks.
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
        """Return the same ranks as a grid of another shape. All ranks call it together."""
        if tensor_ranks == 1:
            return World(self.rank, self.ranks, self.local_rank, self.device)
        everyone, start = range(self.ranks), self.rank - self.rank % tensor_ranks
        # Each rank makes its own two groups. If every rank made every group, that would be a square of their number.
        members = (everyone[start : start + tensor_ranks], everyone[self.rank % tensor_ranks :: tensor_ranks])
        groups = [dist.new_group(list(ranks), use_local_synchronization=True) for ranks in members]
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
        ConfigError: if there is no such device or group of ranks, or the launcher has not set the address of rank 0.
        TrainingError: if a rank is missing after ``timeout_s``, or cannot connect to another.
        ReportedError: if a stop is requested.
    """
    rank, ranks, local_rank = here = place()
    with once_per_host():
        if ranks % tensor_ranks:
            raise ConfigError(
                f"engine.tensor_parallel is {tensor_ranks}, which does not divide {counted(ranks, 'ranks')}; start a "
                f"multiple of {tensor_ranks}, or lower it"
            )
        check_launcher(ranks)
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
        backend, timeout = "nccl" if use_cuda else "gloo", timedelta(seconds=timeout_s)
        with pointing_to_doctor():
            # Groups that are made without a limit of their own, by DeepSpeed too, would otherwise have NCCL's.
            dist.distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]
            # A single rank needs no port.
            store = dist.HashStore() if ranks == 1 else meet(here, timeout_s, stop_requested)  # type: ignore[attr-defined]
            try:
                dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
            except RuntimeError as error:
                raise TrainingError(
                    f"rank {rank} cannot connect to the others by {backend} ({error}); check the network, and "
                    f"{backend.upper()}_SOCKET_IFNAME if it is set"
                ) from error
    return World(rank, ranks, local_rank, where).regrouped(tensor_ranks)


def gpu_of(local_rank: int) -> int:
    """Return the index of a rank's GPU among those that are visible to it."""
    seen = torch.cuda.device_count()
    if seen == 1 and os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1":
        return 0  # SLURM can make a single GPU visible to each task
    if local_rank >= seen:
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own, because it sees {seen}; start as many processes on a "
            "host as it has GPUs (SLURM: --gpus-per-node)"
        )
    return local_rank


def check_launcher(ranks: int) -> None:
    """Check that several processes can find each other."""
    if ranks > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            f"MASTER_ADDR or MASTER_PORT is not set, by which {ranks} processes find each other; start with "
            "`deepspeed` or `torchrun`, or see launch/"
        )


def leave_world() -> None:
    """Disconnect this process, so that a later run in it can connect again."""
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> Any:
    """Wait until all ranks have registered at MASTER_ADDR and MASTER_PORT, and return the store that they share.

    Raises:
        TrainingError: if a rank is missing after ``timeout_s``.
        ReportedError: if a stop was requested of a rank before all had registered; all registered ranks raise it.
    """
    waiting, key = _Wait(place, timeout_s, stop_requested), f"rendezvous/{restarts()}"
    while True:
        store = connect(place, waiting.pause, timeout_s)
        try:
            starts = _decide(store, key, place, waiting)
        except dist.DistError:  # the connection was closed
            if _hosts_store(place):
                raise
            waiting.pause("for rank 0, which has left")
            continue
        if starts:
            return dist.PrefixStore(f"{key}/group", store)  # type: ignore[attr-defined]
        raise waiting.stopped(_missing(store, key, place.ranks) if _hosts_store(place) else "for other ranks")


def _decide(store: Any, key: str, place: RankPlace, waiting: _Wait) -> bool:
    """Register this rank, and wait for the decision that holds for all ranks: True to start, False to stop.

    The first rank that sees all others there, or is asked to stop, decides. If a rank could stop by itself, one that
    saw it registered would wait for it in a process group that is never complete.
    """
    # They are counted: if each rank looked for every other one, rank 0 would answer the square of their number.
    if store.add(f"{key}/{place.rank}", 1) == 1:
        store.add(f"{key}/here", 1)
    while True:
        proposed = (
            _START if store.add(f"{key}/here", 0) == place.ranks else _STOP if waiting.stop_requested() else None
        )
        if proposed is not None:
            decided = store.compare_set(f"{key}/decided", "", proposed)
        elif store.check([f"{key}/decided"]):
            decided = store.get(f"{key}/decided")
        else:
            waiting.sleep(lambda: _missing(store, key, place.ranks))
            continue
        if decided == _STOP:
            _leave(store, key, place)
        return bool(decided == _START)


def _leave(store: Any, key: str, place: RankPlace) -> None:
    """Record that this rank knows that all stop; on rank 0, which hosts the store, wait until the others know it."""
    store.add(f"{key}/left", 1)
    deadline = time.monotonic() + _LEAVE_S
    while _hosts_store(place) and time.monotonic() < deadline:
        registered = sum(store.check([f"{key}/{rank}"]) for rank in range(place.ranks))
        if store.add(f"{key}/left", 0) >= registered:
            return
        time.sleep(0.02)


def _missing(store: Any, key: str, ranks: int) -> str:
    missing = [rank for rank in range(ranks) if not store.check([f"{key}/{rank}"])]
    return f"for {listed_ranks(missing)}" if missing else "for the last rank"


def listed_ranks(ranks: list[int]) -> str:
    """Return the first of some ranks, and the number of further ones, as text: "ranks 1, 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks, 8)}"


def connect(place: RankPlace, pause: Callable[[str], None], timeout_s: float) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 makes, unless torchrun has made one there."""
    address, port, timeout = os.environ["MASTER_ADDR"], _port(), timedelta(seconds=timeout_s)
    if _hosts_store(place):
        try:
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ConfigError(
                f"rank 0 cannot listen on MASTER_PORT {port} ({str(error).splitlines()[0]}); choose another"
            ) from error
    while True:
        if not _listens(address, port):
            pause(f"for rank 0 at {address}:{port}")
        elif (store := _connected(address, port, pause, min(timeout_s, _ANSWER_S))) is not None:
            store.set_timeout(timeout)
            return store


def _connected(address: str, port: int, pause: Callable[[str], None], answer_s: float) -> Any:
    """Return the store at an address, or None if it does not answer.

    Another thread connects, since torch waits without end for a silent service, and so that this one notices signals.
    """
    stores: list[Any] = []

    def connect() -> None:
        # Rank 0 may stop at any moment, and torch tries to reach a store for all of this time.
        limit = timedelta(seconds=answer_s)
        with suppress(RuntimeError):
            stores.append(dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))  # type: ignore[attr-defined]

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    given_up_at = time.monotonic() + _ATTEMPT_S
    thread.start()
    while thread.is_alive() and time.monotonic() < given_up_at:
        thread.join(timeout=0.05)
        if not stores:
            pause(f"for rank 0 at {address}:{port}, which does not answer")
    return stores[0] if stores else None


def _hosts_store(place: RankPlace) -> bool:
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class _Wait:
    """A wait for other ranks, in steps."""

    def __init__(self, place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> None:
        self._place, self._timeout_s, self.stop_requested = place, timeout_s, stop_requested
        self._began = time.monotonic()
        self._report_at = _FIRST_REPORT_S

    def pause(self, what: str) -> None:
        """Sleep for a moment; raise if a stop is requested, or the time is over."""
        if self.stop_requested():
            raise self.stopped(what)
        self.sleep(lambda: what)

    def stopped(self, what: str) -> ReportedError:
        """Log that the ranks stop, and return the error to raise."""
        if self._place.local_rank == 0:
            logger.info("stopped while waiting %s; start the same command again to resume", what)
        return ReportedError(EXIT_STOPPED)

    def sleep(self, what: Callable[[], str]) -> None:
        """Sleep for a moment; raise if the time is over, and log what the rank waits for if a report is due."""
        waited = time.monotonic() - self._began
        if waited > self._timeout_s:
            raise TrainingError(
                f"rank {self._place.rank} has waited {what()} for {self._timeout_s:.0f} s (engine.timeout_s); start "
                f"all {self._place.ranks} with the same MASTER_ADDR and MASTER_PORT, which every host must reach"
            )
        if waited > self._report_at and self._place.local_rank == 0:
            logger.info("rank %d has been waiting %s for %.0f s", self._place.rank, what(), waited)
            self._report_at = waited + _REPORT_EVERY_S
        time.sleep(min(0.5, 0.02 + waited / 20))


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT is {shown(text)}, which is no port; set a number from 1024 to 65535")
    return int(text)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True
