"""GPUs by name: memory, peak of their tensor cores, and links."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown

CONTEXT_GIB = 1.0
"""Memory (GiB) that the driver, cuBLAS and NCCL use."""
FRAGMENTED = 0.06
"""Share of the rest that is lost to fragmentation."""


def usable_gib(gib: float) -> float:
    """Return the memory (GiB) that a program can use of a GPU's ``gib``, after the driver and fragmentation."""
    return (gib - CONTEXT_GIB) * (1.0 - FRAGMENTED)


_LINKS = {"NVLink": 0.0, "InfiniBand": 25.0, "PCIe": 32.0}
"""Links by default: PCIe 4.0 x16, and HDR InfiniBand."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, by its data sheet.

    Attributes:
        tflops: dense 16-bit operations in 10^12 a second; 0 if unknown.
        links: GB/s in one direction of the links of a GPU to others; 0 if it has none. InfiniBand is that of the
            time: EDR (100 Gb/s), HDR (200) or NDR (400), an adapter for each GPU.
    """

    name: str
    gib: float
    tflops: float
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    capability: tuple[int, int] = (8, 0)
    links: Mapping[str, float] = field(default_factory=lambda: _LINKS)

    @property
    def usable_gib(self) -> float:
        """Memory (GiB) that a program can use."""
        return usable_gib(self.gib)


_V100, _A100, _H100 = (
    {"NVLink": nvlink, "InfiniBand": infiniband, "PCIe": pcie}
    for nvlink, infiniband, pcie in ((150.0, 12.5, 16.0), (300.0, 25.0, 32.0), (450.0, 50.0, 64.0))
)
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100-16g", 16.0, 125.0, "fp16", (7, 0), _V100),
        Gpu("v100-32g", 32.0, 125.0, "fp16", (7, 0), _V100),
        Gpu("a100-40g", 40.0, 312.0, links=_A100),
        Gpu("a100-80g", 80.0, 312.0, links=_A100),
        Gpu("l40s-48g", 48.0, 362.0, capability=(8, 9)),
        Gpu("h100-80g", 80.0, 989.0, capability=(9, 0), links=_H100),
        Gpu("h200-141g", 141.0, 989.0, capability=(9, 0), links=_H100),
    )
}

_CARDS = {"h100 pcie": 756.0, "h100 nvl": 835.0, "h200 nvl": 835.0, "v100-pcie": 112.0}
"""Peaks of cards with less power than those of :data:`GPUS`, by a part of their names."""


def gpu_named(name: str) -> Gpu:
    """Return the GPU named by ``--gpu``: a known name, or NAME:GiB for any other."""
    if name in GPUS:
        return GPUS[name]
    label, _, size = name.rpartition(":")
    gib = 0.0
    with suppress(ValueError):
        gib = float(size)
    if not label or not 0.0 < gib < math.inf:
        raise ConfigError(
            f"--gpu is {shown(name)}, which is neither a known GPU nor NAME:GiB such as rtx4090:24"
            f"{did_you_mean(name, GPUS)}"
        )
    kind = kind_of(label)
    return Gpu(name, gib, 0.0) if kind is None else replace(kind, name=name, gib=gib)


def kind_of(device_name: str) -> Gpu | None:
    """Return the known GPU that matches a device's name, such as "Tesla V100-SXM2-16GB"; its memory may differ.

    None of a slice of a GPU, by MIG, whose peak is a share that its name does not say.
    """
    lowered = device_name.lower()
    if re.search(r"\bmig\b", lowered):
        return None
    # Not an RTX A1000 as an A100.
    kinds = [gpu for gpu in GPUS.values() if re.search(rf"{gpu.name.partition('-')[0]}(?!\d)", lowered)]
    kind = max(kinds, key=lambda gpu: gpu.gib, default=None)
    slower = next((tflops for card, tflops in _CARDS.items() if card in lowered), None)
    return kind if kind is None or slower is None else replace(kind, tflops=slower)
