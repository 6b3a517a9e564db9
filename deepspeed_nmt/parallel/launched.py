"""What a launcher says of this process.

The `deepspeed` launcher and `torchrun` describe it by RANK, WORLD_SIZE and LOCAL_RANK; `srun` by SLURM_PROCID,
SLURM_NTASKS and SLURM_LOCALID. A process started by plain `python` is alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.errors import EXIT_USER_ERROR, ConfigError, ReportedError, UserError

_SPECIAL_STEPS = 0xFFFFFFF0
"""SLURM numbers batch scripts and interactive shells from here on; `srun` counts its steps from 0."""
_TIME_TO_SPEAK_S = 5.0


class Place(NamedTuple):
    """A process among all that were launched with it."""

    rank: int
    ranks: int
    local_rank: int


def place() -> Place:
    """This process's place; that of a single one where no launcher started it.

    Raises:
        ConfigError: if a variable is not a number.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Place(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK"))
    if "SLURM_PROCID" in os.environ and "SLURM_NTASKS" in os.environ and _started_by_srun():
        return Place(_number("SLURM_PROCID"), _number("SLURM_NTASKS"), _number("SLURM_LOCALID"))
    return Place(0, 1, 0)


def _started_by_srun() -> bool:
    """Whether this is a task of a step. The shell of a job has SLURM_PROCID=0, too, but what one starts there by hand
    is alone, however many tasks the job may have.
    """
    return "SLURM_STEP_ID" in os.environ and _number("SLURM_STEP_ID") < _SPECIAL_STEPS


def requeued() -> bool:
    """Whether SLURM started this job before."""
    return _number("SLURM_RESTART_COUNT") > 0


def _number(name: str) -> int:
    text = os.environ.get(name, "0")
    if not text.isdecimal():
        raise ConfigError(
            f"{name} must be a number, but is '{text}'; it is for a launcher to set, so unset it, or start with "
            "`deepspeed`, `torchrun` or `srun`"
        )
    return int(text)


def isolate_extension_builds() -> None:
    """Have extensions that are compiled on the way built in a directory of this start alone, unless one is set.

    A build that was killed leaves a lock behind on which every later one in the same directory waits for ever. The
    ranks of a host have a parent in common, by which they find the same directory.
    """
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        return
    start = os.getpid() if place().ranks == 1 else os.getppid()
    name = f"torch_extensions-{os.getuid()}-{start}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    directory = Path(tempfile.gettempdir(), name)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if directory.stat().st_uid != os.getuid():
        raise ConfigError(
            f"{directory} belongs to somebody else; set TORCH_EXTENSIONS_DIR to a directory of your own"
        )
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)


@contextmanager
def once_per_host() -> Iterator[None]:
    """For errors that come of settings, files and the host, found where ranks cannot talk to one another: of all that
    find them, the first rank of each host reports them.

    Raises:
        ReportedError: on the other ranks.
    """
    try:
        yield
    except UserError as error:
        if place().local_rank == 0:
            raise
        time.sleep(_TIME_TO_SPEAK_S)  # A launcher ends all ranks as soon as one is gone.
        raise ReportedError(EXIT_USER_ERROR) from error
