"""All checks by name."""

from __future__ import annotations

from collections.abc import Callable

from deepspeed_nmt.doctor import files, gpu, job, limits, network, software
from deepspeed_nmt.doctor.findings import Finding, JobContext

Check = Callable[[JobContext], list[Finding]]

OF_A_HOST: dict[str, Check] = {
    "python": software.python,
    "packages": software.packages,
    "torch": software.torch,
    "gpu": gpu.gpus,
    "deepspeed": software.deepspeed,
    "compiler": software.compiler,
    "kernels": software.kernels,
    "names": network.names,
    "interfaces": network.interfaces,
    "port": network.port,
    "directory": files.directory,
    "temporary": files.temporary,
    "memory": limits.memory,
    "shm": limits.shared_memory,
    "limits": limits.processes,
    "job": job.job,
    "tasks": job.tasks,
}
"""Checks that the first rank of each host makes, which need no other rank."""
OF_A_RANK: dict[str, Check] = {
    "torch build": gpu.torch_build,
    "gpu of rank": gpu.gpu_of_rank,
    "threads": limits.threads,
}
"""Checks that every rank makes, which need no other rank."""
OF_A_GROUP = ("versions", "clocks", "directory", "collectives")
"""Checks of several hosts together; their functions are in hosts.py, which imports torch."""
