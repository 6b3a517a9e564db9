"""Faults of hosts that tests of `doctor` plant: programs and packages that come first on PATH and PYTHONPATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NVIDIA_SMI = """#!/bin/sh
echo "Tesla V100-SXM2-16GB, 470.82.01, 16384, 3000, 7.0, Enabled, Disabled, 3, Active, Not Active, Not Active"
"""
"""A V100 with an old driver, MIG, memory errors, and a clock that is slowed down."""
CLOCK = """
import time
before = time.time
time.time = lambda: before() + 90.0
"""
PROGRAMS = ("sh", "bash", "env", "python3", "sed", "mount", "unshare", "scontrol", "srun", "hostname")


def plant(place: Path, *, clock: bool = False) -> Path:
    """Fill a directory with faults: bin/ for PATH, where no compiler is, and packages/ for PYTHONPATH.

    Args:
        place: directory to make.
        clock: True for a clock that is 90 s ahead.
    """
    programs, packages = place / "bin", place / "packages"
    for each in (programs, packages / "deepspeed"):
        each.mkdir(parents=True)
    for name in PROGRAMS:
        if found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            (programs / name).symlink_to(found)
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    (packages / "deepspeed/__init__.py").write_text("raise ImportError('libaio.so.1 is missing')\n")
    for name, version in (("deepspeed", "0.19.1"), ("tqdm", "3.0")):
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    if clock:
        (packages / "sitecustomize.py").write_text(CLOCK)
    return place


HOST_FAULTS = (
    "tqdm>=4.66 must be installed, but is 3.0; `pip install -r requirements/v100.txt`",
    "deepspeed must be importable for training on several ranks, but is not (ImportError: libaio.so.1 is missing)",
    "a C compiler is required for Triton's kernels, but neither gcc nor clang is on PATH",
    "GPU 0 (Tesla V100-SXM2-16GB) must have no uncorrected memory errors, but has 3",
    "torch must be built for CUDA to use the Tesla V100-SXM2-16GB here, but ",
    "kernels must run on the GPU, but the trial ends with an error (",
    "GLOO_SOCKET_IFNAME must name a network interface of each host, but is eth99, and here are ",
    "OMP_NUM_THREADS must not exceed the CPUs of a rank (",
    "the limit of open files must be at least 7",
)
"""Beginnings of the faults that a host has with what :func:`plant` makes, a limit of open files of 300,
GLOO_SOCKET_IFNAME=eth99 and OMP_NUM_THREADS=4096."""
HOST_WARNINGS = (
    "GPU 0 (Tesla V100-SXM2-16GB) should not be divided for training on several ranks, but its MIG mode is on",
    "GPU 0 (Tesla V100-SXM2-16GB) should run at its full clock, but is slowed down (hw_slowdown)",
    "GPU 0 (Tesla V100-SXM2-16GB) should be free, but 2.9 of 16 GiB are in use",
    "the persistence mode of GPUs should be on, but is off",
)
