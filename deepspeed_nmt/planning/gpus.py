"""GPUs by name: memory, and what their tensor cores can do at best."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from deepspeed_nmt.errors import ConfigError, did_you_mean

CONTEXT_GIB = 1.0
"""What the driver, cuBLAS and NCCL take for themselves."""
FRAGMENTED = 0.06
"""Share of the rest that the allocator cannot use."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as given.
        gib: memory.
        tflops: 10^12 dense 16-bit operations a second, by its data sheet; 0 if unknown.
        precision: the format to train in.
        capability: CUDA's compute capability.
    """

    name: str
    gib: float
    tflops: float
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    capability: tuple[int, int] = (8, 0)

    @property
    def usable_gib(self) -> float:
        """What is left for a program beside the driver and what the allocator cannot use."""
        return (self.gib - CONTEXT_GIB) * (1.0 - FRAGMENTED)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-16g", 16.0, 125.0, "fp16", (7, 0)),
        Gpu("v100-32g", 32.0, 125.0, "fp16", (7, 0)),
        Gpu("a100-40g", 40.0, 312.0),
        Gpu("a100-80g", 80.0, 312.0),
        Gpu("l40s-48g", 48.0, 362.0, capability=(8, 9)),
        Gpu("h100-80g", 80.0, 989.0, capability=(9, 0)),
        Gpu("h200-141g", 141.0, 989.0, capability=(9, 0)),
    )
}

# What drivers call them, in the order in which to look.
_KINDS = {"V100": "v100-32g", "A100": "a100-80g", "L40S": "l40s-48g", "H100": "h100-80g", "H200": "h200-141g"}


def gpu_named(name: str) -> Gpu:
    """The GPU meant by ``--gpu``: a known name, or NAME:GiB for any other.

    Raises:
        ConfigError: if it is neither.
    """
    if name in GPUS:
        return GPUS[name]
    label, colon, size = name.rpartition(":")
    try:
        gib = float(size) if colon and label else 0.0
    except ValueError:
        gib = 0.0
    if not 0.0 < gib < math.inf:
        raise ConfigError(
            f"--gpu must be one of {', '.join(GPUS)}, or NAME:GiB such as rtx4090:24, but is '{name}'"
            f"{did_you_mean(name, GPUS)}"
        )
    kind = kind_of(label)
    return Gpu(name, gib, 0.0) if kind is None else replace(kind, name=name, gib=gib)


def kind_of(device_name: str) -> Gpu | None:
    """The known kind that a device's name, such as "Tesla V100-SXM2-16GB", belongs to; its memory may differ."""
    for part, kind in _KINDS.items():
        if part.lower() in device_name.lower():
            return GPUS[kind]
    return None
