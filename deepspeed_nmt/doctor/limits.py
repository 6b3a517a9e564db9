"""Checks of memory, shared memory, limits of processes, and CPU threads."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path

from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, gib, ok, warning
from deepspeed_nmt.errors import counted
from deepspeed_nmt.parallel.host_memory import UNKNOWN, host_memory

_ROOT, _SHM = Path("/"), Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_MEMORY_OF_A_RANK = 3 * 2**30
"""Bytes of host memory that a rank needs for its libraries and buffers."""
_SHM_OF_A_RANK = 64 * 2**20
"""Bytes of shared memory that NCCL takes for a rank."""
_FILES, _FILES_OF_A_RANK = 768, 8
"""Open files that a rank needs for itself, and for each other rank."""


def memory(context: JobContext) -> list[Finding]:
    """Compare the memory of the host, or of its control group, with the number of ranks."""
    found, ranks = host_memory(_ROOT), max(1, context.local_ranks)
    if found.available >= UNKNOWN:
        return [ok("the memory of this host is not known")]
    bounded = " (limit of the job or container)" if found.is_limited else ""
    state = f"{gib(found.available)} of {gib(found.total)}{bounded} are free for {counted(ranks, 'ranks')}"
    if found.available < ranks * _MEMORY_OF_A_RANK:
        return [
            fault(
                f"each rank needs {gib(_MEMORY_OF_A_RANK)} of this host's memory before the model, but {state}; ask "
                "for more (SLURM: --mem), or start fewer ranks"
            )
        ]
    return [ok(f"memory: {state}"), *_overcommit()]


def _overcommit() -> list[Finding]:
    """Return a warning if the system refuses to reserve more memory than it has."""
    if _text(_ROOT / "proc/sys/vm/overcommit_memory").strip() != "2":
        return []
    return [
        warning(
            "vm.overcommit_memory should be 0 or 1, but is 2: CUDA reserves far more addresses than memory, and may "
            "be refused; `sysctl vm.overcommit_memory=0` as root"
        )
    ]


def shared_memory(context: JobContext) -> list[Finding]:
    """Check the size of /dev/shm, over which NCCL joins GPUs of a host that cannot reach each other directly."""
    try:
        state = os.statvfs(_SHM)
    except OSError as error:
        return [warning(f"{_SHM} should exist for NCCL, but cannot be read ({error.strerror}); mount it")]
    free, ranks = state.f_bavail * state.f_frsize, max(1, context.local_ranks)
    text = f"{gib(free)} of {gib(state.f_blocks * state.f_frsize)} free in {_SHM}"
    if free >= ranks * _SHM_OF_A_RANK:
        return [ok(text)]
    return [
        fault(
            f"{_SHM} must have {_SHM_OF_A_RANK >> 20} MiB free for each rank of this host, but has "
            f"{free / 2**20:.0f} MiB for {ranks}; give the container more (`docker run --ipc=host` or `--shm-size "
            "8g`), or remove files that dead processes left there"
        )
    ]


def processes(context: JobContext) -> list[Finding]:
    """Check the limits of open files, locked memory and processes."""
    found = []
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = _FILES + _FILES_OF_A_RANK * context.place.ranks
    if files != resource.RLIM_INFINITY and files < needed:
        found.append(
            fault(
                f"the limit of open files must be at least {needed:,} for "
                f"{counted(context.place.ranks, 'ranks')}, but is {files:,}; `ulimit -n 65536` before the "
                "start, or ask the administrator"
            )
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY and infiniband():
        found.append(
            fault(
                f"locked memory must be unlimited for InfiniBand ({', '.join(infiniband())}), but is limited to "
                f"{gib(locked)}; `ulimit -l unlimited` in slurmd's unit (LimitMEMLOCK=infinity) or the container"
            )
        )
    threads = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if threads != resource.RLIM_INFINITY and threads < 1024:
        found.append(
            warning(
                f"the limit of processes and threads should be at least 1,024, but is {threads:,}; `ulimit -u 4096` "
                "before the start"
            )
        )
    shown = [("open files", files), ("locked memory", locked), ("processes", threads)]
    texts = [f"{name} {'unlimited' if value == resource.RLIM_INFINITY else f'{value:,}'}" for name, value in shown]
    return found or [ok(f"limits: {', '.join(texts)}")]


def infiniband() -> list[str]:
    """Return the names of this host's InfiniBand devices."""
    try:
        return sorted(path.name for path in _INFINIBAND.iterdir())
    except OSError:
        return []


def threads(context: JobContext) -> list[Finding]:
    """Compare the threads of all ranks of this host with its CPUs."""
    allowed, ranks = len(os.sched_getaffinity(0)), max(1, context.local_ranks)
    # Ranks that are bound have CPUs of their own, otherwise they share those of the host.
    bound = ranks > 1 and allowed * ranks <= (os.cpu_count() or 1)
    cpus = allowed if bound else allowed // ranks
    given = context.environment.get("OMP_NUM_THREADS", "")
    if given and not given.replace(",", "").isdecimal():
        return [fault(f"OMP_NUM_THREADS must be a number, but is '{given}'; correct it")]
    if not given and ranks > 1:
        return [
            warning(
                f"OMP_NUM_THREADS should be set for {ranks} ranks on a host, but is not, so each may start as many "
                f"threads as there are CPUs; export OMP_NUM_THREADS={max(1, cpus)}"
            )
        ]
    wanted = int(given.partition(",")[0]) if given else allowed
    state = counted(wanted, "threads") + (f" for each of {ranks} ranks" if ranks > 1 else "")
    if wanted > max(1, cpus):
        return [
            fault(
                f"OMP_NUM_THREADS must not exceed the CPUs of a rank ({max(1, cpus)}), but is {wanted}: threads "
                "would wait for one another, which is many times slower; lower it, or ask for more CPUs (SLURM: "
                "--cpus-per-task)"
            )
        ]
    quota = _cpu_quota()
    if quota < wanted * (1 if bound else ranks):
        return [
            warning(
                f"the job or container should have a CPU for each thread, but may use {quota:.1f} for {state}; raise "
                "its limit, or lower OMP_NUM_THREADS"
            )
        ]
    return [ok(f"{state}, on {allowed} CPUs{' of its own' * bound}")]


def _cpu_quota() -> float:
    """Return the number of CPUs that the control group may use; inf without a limit."""
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            words = _text(_ROOT / "sys/fs/cgroup" / path.lstrip("/") / "cpu.max").split()
            if len(words) == 2 and words[0].isdecimal():
                return int(words[0]) / int(words[1])
    return math.inf


def _text(path: Path) -> str:
    """Return the content of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
