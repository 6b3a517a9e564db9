"""Rank and number of processes, read from the launcher's environment variables.

The `deepspeed` launcher and `torchrun` set RANK, WORLD_SIZE and LOCAL_RANK. `srun` sets SLURM_PROCID, SLURM_NTASKS
and SLURM_LOCALID. A process started by plain `python` is the only rank.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.errors import EXIT_USER_ERROR, ConfigError, ReportedError, TrainingError, UserError, shown

_SPECIAL_STEPS = 0xFFFFFFF0
"""First of the step numbers that SLURM reserves for batch scripts and interactive shells; `srun` counts from 0."""
_REPORT_DELAY_S = 5.0
"""Seconds that other ranks wait before they exit, so that the first rank of the host can report an error."""
_POINTER = "; `deepspeed-nmt doctor`, started in the same way, finds out more"


class RankPlace(NamedTuple):
    """Rank of a process among ``ranks``, and its index on its host, as its launcher assigned them."""

    rank: int
    ranks: int
    local_rank: int


def place() -> RankPlace:
    """Return the place of this process: rank 0 of 1 if no launcher started it."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _place("RANK", "WORLD_SIZE", "LOCAL_RANK")
    # The shell of a job also has SLURM_PROCID and SLURM_NTASKS, but what a user starts in it is the only rank.
    is_task = "SLURM_STEP_ID" in os.environ and _number("SLURM_STEP_ID") < _SPECIAL_STEPS
    if is_task and "SLURM_PROCID" in os.environ and "SLURM_NTASKS" in os.environ:
        return _place("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    return RankPlace(0, 1, 0)


def _place(rank: str, ranks: str, local_rank: str) -> RankPlace:
    here = RankPlace(_number(rank), _number(ranks), _number(local_rank))
    if here.rank >= here.ranks:
        raise ConfigError(
            f"{rank} is {shown(here.rank)}, but {ranks}, the number of processes, is {shown(here.ranks)}; unset "
            "both, or start with `deepspeed`, `torchrun` or `srun`, which set them"
        )
    return here


def requeued() -> bool:
    """Return True if SLURM has requeued this job."""
    return _number("SLURM_RESTART_COUNT") > 0


def restarts() -> str:
    """Return the number of restarts by torchrun, whose store outlives ranks: keys of each restart must differ."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{name} is {shown(text)}, which is no number; unset it, or start with `deepspeed`, `torchrun` or "
            "`srun`, which set it"
        )
    return int(text)


def local_ranks(environment: Mapping[str, str]) -> int:
    """Return the number of ranks on this host as the launcher tells it; 0 if it does not."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        # `torchrun` sets the first, `deepspeed` the second.
        return _count(environment.get("LOCAL_WORLD_SIZE", environment.get("LOCAL_SIZE", "0")))
    counts = expanded(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _count(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else 0


def expanded(counts: str) -> list[int]:
    """Return the numbers of a list as SLURM writes it: "8(x2),4" is 8, 8 and 4."""
    numbers = []
    for part in filter(None, counts.split(",")):
        number, _, times = part.partition("(x")
        numbers += [_count(number)] * (_count(times.rstrip(")")) if times else 1)
    return numbers


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def use_expandable_segments() -> None:
    """Let torch grow its blocks of GPU memory, unless the user has configured its allocator; torch reads it once.

    Nearly every padded micro-batch has sizes of its own, for which blocks of fixed size are too small or too large.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def isolate_extension_builds() -> None:
    """Set TORCH_EXTENSIONS_DIR to a directory that only this start of the program uses, unless it is set already.

    torch compiles C++ extensions in that directory. A build that is killed leaves a lock there, and every later build
    in the same directory waits for it without end. All ranks of a host use the same directory: its name contains the
    process id of their common parent. The rank that makes it removes it when it ends.
    """
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return
    start = os.getpid() if place().ranks == 1 else os.getppid()
    name = f"torch_extensions-{os.getuid()}-{start}-{restarts()}"
    directory = Path(tempfile.gettempdir(), name)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    status = directory.lstat()  # of a link itself, which another user may have put there
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{directory} is no directory that only this user can enter; remove it, or set TORCH_EXTENSIONS_DIR to "
            "another directory"
        )
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)


@contextmanager
def once_per_host() -> Iterator[None]:
    """Report an error that all ranks of a host find alike once per host, before ranks are connected.

    On the other ranks of the host, a ReportedError takes its place.
    """
    try:
        yield
    except UserError as error:
        if place().local_rank == 0:
            raise
        time.sleep(_REPORT_DELAY_S)  # A launcher ends all ranks as soon as one exits.
        raise ReportedError(EXIT_USER_ERROR) from error


@contextmanager
def pointing_to_doctor() -> Iterator[None]:
    """Let an error of a start's dependence on GPUs, drivers and the network point to the command that examines them.

    An error of torch, such as a lost connection, becomes a TrainingError.
    """
    try:
        yield
    except (ConfigError, TrainingError) as error:
        raise type(error)(f"{error}{_POINTER}") from error
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingError(
            f"rank {place().rank} on {socket.gethostname()} cannot start ({reason}){_POINTER}"
        ) from error
