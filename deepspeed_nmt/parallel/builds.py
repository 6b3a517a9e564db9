"""Builds of torch, and the GPUs and drivers that run them. This module does not import torch."""

from __future__ import annotations

import re

_OLDEST_OF_CUDA_13 = (7, 5)
"""Compute capability from which on GPUs run builds for CUDA 13."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Oldest driver (first part of its version) that runs torch's builds, by CUDA's major version."""
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)([af]?)")


def runs_on(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return True if code for some of these architectures runs on a GPU, or they are of no NVIDIA GPU.

    Code for sm_80 runs on sm_80 and sm_86, but not on sm_90. The driver compiles compute_80's for any later GPU.

    Args:
        capability: of the GPU.
        architectures: as ``torch.cuda.get_arch_list`` names them.
    """
    found = [match.groups() for text in architectures if (match := _ARCHITECTURE.fullmatch(text))]
    for kind, digits, suffix in found:
        built = (int(digits) // 10, int(digits) % 10)
        if suffix == "a":
            fits = built == capability
        elif kind == "sm" or suffix == "f":
            fits = built[0] == capability[0] and built[1] <= capability[1]
        else:
            fits = built <= capability
        if fits:
            return True
    return not found


def lock_for(capability: tuple[int, int], driver: str | None = None) -> str:
    """Return the lock whose torch runs on a GPU.

    Args:
        capability: of the GPU.
        driver: version of its driver; None for one that is new enough.
    """
    old = driver is not None and _major(driver) < _DRIVERS[13]
    return f"requirements/{'v100' if capability < _OLDEST_OF_CUDA_13 or old else 'cuda'}.txt"


def driver_problem(driver: str, capability: tuple[int, int], torch_version: str, cuda: str | None) -> str | None:
    """Return a sentence if a driver is too old for a build of torch, None if it is not.

    Args:
        driver: its version, such as "535.104.05".
        capability: of the GPU.
        torch_version: version of torch.
        cuda: version of CUDA that it is built for; None if for CPUs.
    """
    needed = None if cuda is None else _DRIVERS.get(_major(cuda))
    if needed is None or _major(driver) >= needed:
        return None
    remedy = "update the driver"
    if _major(driver) >= _DRIVERS[12] and needed > _DRIVERS[12]:
        remedy += f", or `pip install -r {lock_for(capability, driver)}`"
    build = f"torch {torch_version} (CUDA {cuda})"
    return f"the NVIDIA driver must be {needed} or newer for {build}, but is {driver}; {remedy}"


def _major(version: str) -> int:
    """Return the first number of a version; 0 if there is none."""
    first = version.partition(".")[0]
    return int(first) if first.isdecimal() else 0
