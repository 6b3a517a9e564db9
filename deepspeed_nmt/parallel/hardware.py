"""Memory, GPUs and builds of torch of this host. Nothing here imports torch before it is asked for a device of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.files import system_lines

if TYPE_CHECKING:
    import torch

UNKNOWN = 1 << 62
"""Bytes where the system does not tell: too many to matter."""
_OLDEST_OF_CUDA_13 = (7, 5)
"""Compute capability from which on GPUs run builds for CUDA 13."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver (first part of its version) that runs torch's builds, by CUDA's major version."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)([af]?)")


class HostMemory(NamedTuple):
    """Memory in bytes of the host, or of a control group (a container, a job of SLURM) if that has less.

    ``available`` is what this process can still take, with the cache of files, which the system can take back.
    """

    total: int
    available: int
    is_limited: bool


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this host, by the files under ``root``."""
    sizes = {"MemTotal": UNKNOWN, "MemAvailable": UNKNOWN}
    for line in system_lines(root / "proc/meminfo"):
        name, _, size = line.partition(":")
        if name in sizes:
            sizes[name] = int(size.split()[0]) << 10
    groups = list(_limits(root))
    total = min([sizes["MemTotal"], *(limit for limit, _ in groups)])
    available = min([sizes["MemAvailable"], *(limit - used for limit, used in groups)])
    return HostMemory(total, max(0, available), total < sizes["MemTotal"])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit in bytes of each control group of this process, and of those around it, and what is in use."""
    for line in system_lines(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        # Inside a container the path of a group may be that of the host; then only the top is there.
        for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
            limit, usage = (system_lines(directory / file) for file in files)
            if limit and limit[0].isdecimal():
                cached = [
                    int(line.split()[1])
                    for line in system_lines(directory / "memory.stat")
                    if line.startswith(("inactive_file ", "total_inactive_file "))  # the second also in groups inside
                ]
                used = int(usage[0]) if usage and usage[0].isdecimal() else 0
                yield int(limit[0]), max(0, used - max(cached, default=0))


def uses_cuda(device: str, option: str) -> bool:
    """Return True if a GPU is used: for "cuda", which needs one, and for "auto" if there is one; never for "cpu"."""
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"{option} is {shown(device)}; use auto, cpu or cuda")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError(f"{option} is cuda, but torch finds no GPU; use cpu, or install a CUDA build of torch")
    return device != "cpu" and available


def prepare_gpu(device: torch.device) -> None:
    """Make a GPU the current one, and turn cuDNN's attention and its TF32 off in this process.

    cuDNN builds a plan for every new shape of its tensors, which takes longer than the attention itself, and nearly
    every micro-batch and every batch of a search has a shape of its own. SDPA's other kernels take any shape.

    cuDNN's convolutions and LSTMs would compute in TF32, with 10 bits of mantissa, where fp32 is asked for. torch's
    matrix products do not.
    """
    import torch

    if torch.cuda.is_available() and (problem := kernel_problem(device)):
        raise ConfigError(problem)
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.allow_tf32 = False


def kernel_problem(device: torch.device) -> str | None:
    """Return a sentence if this torch has no kernels for a GPU, with the lock that has; None if it has."""
    import torch

    architectures = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if runs_on(capability, architectures):
        return None
    return (
        f"torch {torch.__version__} has no kernels for the {torch.cuda.get_device_name(device)} (sm_{capability[0]}"
        f"{capability[1]}), only for {', '.join(architectures)}; `pip install -r {lock_for(capability)}`"
    )


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return True if code for some of these architectures runs on a GPU, or they are of no NVIDIA GPU.

    Code for sm_80 runs on sm_80 and sm_86, but not on sm_90. The driver compiles compute_80's for any later GPU.
    """
    builds = [match.groups() for text in architectures if (match := _ARCHITECTURE.fullmatch(text))]

    def fits(kind: str, digits: str, suffix: str) -> bool:
        built = (int(digits) // 10, int(digits) % 10)
        if suffix == "a":
            return built == capability
        is_same_generation = built[0] == capability[0] or (kind == "compute" and suffix != "f")
        return is_same_generation and built <= capability

    return not builds or any(fits(*build) for build in builds)


def lock_for(capability: tuple[int, int], driver: str | None = None) -> str:
    """Return the lock whose torch runs on a GPU with a driver; None for one that is new enough."""
    old = driver is not None and _major(driver) < _DRIVERS[13]
    return f"requirements/{'v100' if capability < _OLDEST_OF_CUDA_13 or old else 'cuda'}.txt"


def driver_problem(driver: str, capability: tuple[int, int], torch_version: str, cuda: str | None) -> str | None:
    """Return a sentence if a driver, such as "535.104.05", is too old for a build of torch for ``cuda``, or None."""
    needed = None if cuda is None else _DRIVERS.get(_major(cuda))
    if needed is None or _major(driver) >= needed:
        return None
    remedy = "update the driver"
    if _major(driver) >= _DRIVERS[12] and needed > _DRIVERS[12]:
        remedy += f", or `pip install -r {lock_for(capability, driver)}`"
    return f"the NVIDIA driver is {driver}, but torch {torch_version} (CUDA {cuda}) needs {needed} or newer; {remedy}"


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0
