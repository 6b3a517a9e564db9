"""The environment of a run: versions, devices, git state, command."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt import __version__

_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


def environment() -> dict[str, Any]:
    """Return the environment of this process, as values for JSON."""
    packages = ["torch", "deepspeed", "numpy", "sentencepiece", "sacrebleu", "safetensors", "pydantic"]
    packages += ["sacremoses", "transformers", "tokenizers"]
    versions = {name: _version(name) for name in packages}
    return {
        "deepspeed_nmt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "git": _git(),
        "command": sys.argv,
        "slurm": {name: value for name, value in os.environ.items() if name in _SLURM},
    }


def summary(found: Mapping[str, Any]) -> str:
    """Return a line about an environment, for the log of each start."""
    job, versions = found["slurm"].get("SLURM_JOB_ID"), found["packages"]
    ours = f"deepspeed_nmt {found['deepspeed_nmt']} (git {found['git'] or 'unknown'})"
    return f"{ours}, torch {versions['torch']} on {platform.node()}{f', job {job}' if job else ''}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
