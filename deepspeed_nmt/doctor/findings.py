"""Findings, and what checks know of the process that makes them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from deepspeed_nmt.parallel.launched import RankPlace

NO_END = "no end within"
"""Beginning of the problem of a program that was ended at its time limit."""


class Finding(NamedTuple):
    """A line of the examination, with a remedy if it is not "ok".

    A training fails or is lost by a fault; by a warning it is slower or at risk.
    """

    level: Literal["ok", "warning", "fault"]
    text: str


ok: Callable[[str], Finding] = partial(Finding, "ok")
warning: Callable[[str], Finding] = partial(Finding, "warning")
fault: Callable[[str], Finding] = partial(Finding, "fault")


@dataclass(frozen=True)
class HostGpu:
    """A GPU as the driver reports it: ``states`` are all fields of ``nvidia-smi`` by name.

    An unknown compute capability is (0, 0).
    """

    name: str
    driver: str
    gib: float
    used_gib: float
    capability: tuple[int, int] = (0, 0)
    states: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobContext:
    """Facts that checks start from.

    Attributes:
        directory: an existing directory: the run directory, or where it would be made.
        limit_s: seconds after which a rank stops waiting for another.
        local_ranks: ranks on this host; 0 if the launcher does not tell.
        gpus: of this host; None if there is no ``nvidia-smi``.
        driver_problem: message of an ``nvidia-smi`` that fails.
    """

    place: RankPlace
    host: str
    directory: Path
    limit_s: float = 120.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    local_ranks: int = 0
    gpus: Sequence[HostGpu] | None = None
    driver_problem: str = ""

    @property
    def is_first_of_host(self) -> bool:
        """True on the rank that makes the checks of its host."""
        return self.place.local_rank == 0


class Output(NamedTuple):
    """Exit status of a program (-1 if it is missing or was ended), its output, and its last error, "" if none."""

    status: int
    text: str
    problem: str


def run_program(words: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Output:
    """Run a program with a time limit in seconds."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Output(-1, "", f"{NO_END} {limit_s:.0f} s")
    except OSError as error:
        return Output(-1, "", error.strerror or str(error))
    problem = (last_line(done.stderr or done.stdout) or f"status {done.returncode}") if done.returncode else ""
    return Output(done.returncode, done.stdout, problem)


def last_line(text: str) -> str:
    """Return the last line that is not empty; "" if there is none."""
    return text.strip().rpartition("\n")[2].strip()
