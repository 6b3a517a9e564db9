"""Faults of hosts that tests of `doctor` plant: programs and packages that come first on PATH and PYTHONPATH."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

NVIDIA_SMI = """#!/bin/sh
echo "Tesla V100-SXM2-16GB, 470.82.01, 16384, 3000, 7.0, Enabled, Disabled, 3, Active"
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
    for directory in (programs, packages / "deepspeed"):
        directory.mkdir(parents=True)
    for name in PROGRAMS:
        if program := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
            (programs / name).symlink_to(program)
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
    "tqdm>=4.66 is required, but 3.0",
    "deepspeed, by which several ranks train, cannot be imported (ImportError: libaio.so.1 is missing)",
    "no C compiler (gcc or clang) is on PATH, which Triton's kernels require",
    "GPU 0: uncorrected memory errors",
    f"torch {torch.__version__} is built for CPUs and cannot use the Tesla V100-SXM2-16GB",
    "the trial of kernels on the GPU ended with an error (",
    "GLOO_SOCKET_IFNAME is eth99",
    "OMP_NUM_THREADS is 4096",
    "the limit of open files is 300",
)
"""Beginnings of the faults that a host has with what :func:`plant` makes, a limit of open files of 300,
GLOO_SOCKET_IFNAME=eth99 and OMP_NUM_THREADS=4096."""
HOST_WARNINGS = (
    "GPU 0: MIG mode",
    "GPU 0: the clock is slowed down",
    "GPU 0 has 2.9 of 16 GiB in use",
    "GPU 0: persistence mode is off",
)
