"""Precisions to compute in, and those that a device has."""

from __future__ import annotations

from typing import Literal

import torch

Capability = tuple[int, int]
"""Compute capability of a GPU, such as (7, 0)."""
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types of weights and activations, by precision."""
SM_80: Capability = (8, 0)
"""First GPUs with matrix products in bf16, and with FlashAttention's kernels."""


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of a GPU; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_bf16(capability: Capability | None) -> bool:
    """Return True if a device computes in bf16; arguments as :func:`capability_of` returns them."""
    return capability is None or capability >= SM_80


def native_precision(device: torch.device) -> Precision:
    """Return the precision of "auto": bf16 on a GPU from sm_80 up, fp16 on an older GPU, fp32 on a CPU."""
    if device.type != "cuda":
        return "fp32"
    return "bf16" if has_bf16(capability_of(device)) else "fp16"
