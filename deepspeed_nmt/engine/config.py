"""Settings of engines."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field

from deepspeed_nmt.kernels.backends import parse_setting
from deepspeed_nmt.registry import Config

Precision = Literal["fp32", "bf16", "fp16"]


def _recompute(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"must be auto or a whole number from 0 up, but is {value!r}")
    return value


def _kernels(value: object) -> object:
    if isinstance(value, str):
        parse_setting(value, "it")
    return value


KernelsSetting = Annotated[str, BeforeValidator(_kernels)]
Recompute = Annotated[int | Literal["auto"], BeforeValidator(_recompute)]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class EngineConfig(Config):
    """Settings of the engine that carries out updates."""

    name: Literal["auto", "plain", "deepspeed"] = Field(
        default="auto", description="plain torch, or DeepSpeed; auto takes DeepSpeed when there are several ranks"
    )
    ds_config: str = Field(
        default="zero2", description="DeepSpeed's JSON: a path, or the name of a file in ds_configs/ without .json"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto: bf16 where the GPU has it, fp16 on older ones, fp32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU where there is one")
    deterministic: bool = Field(default=False, description="bitwise repeatable on a GPU too, at some cost in speed")
    tensor_parallel: int = Field(
        default=1, ge=1, description="neighbouring ranks that share a model, each with a slice of its matrices"
    )
    recompute_encoder: Recompute = Field(
        default=0,
        description="recompute every k-th encoder layer in the backward pass, to save memory: 1 all, 0 none, auto: "
        "as few as fit",
    )
    recompute_decoder: Recompute = Field(default=0, description="the same for decoder layers")
    memory_gib: float = Field(
        default=0.0, ge=0.0, description="what auto may take of each GPU; 0: all it has (a CPU has to be told)"
    )
    kernels: KernelsSetting = Field(
        default="auto",
        description="backends of fused operations: auto, torch, triton, apex, or operation=backend,... such as "
        "softmax=torch",
    )
    attention: Literal["auto", "sdpa", "fused"] = Field(
        default="auto",
        description="sdpa: torch's kernels that hold no weights; fused: products and a fused softmax; auto: sdpa "
        "where it has such a kernel",
    )
    silent_s: float = Field(
        default=60.0,
        ge=0.0,
        description="seconds without a sign of life after which a rank is taken to be gone; 0: never",
    )
    stuck_s: float = Field(
        default=600.0, gt=0.0, description="seconds a micro-batch may take before its rank is taken to be stuck"
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="seconds a rank waits for another before giving up, and that saving or validating may take",
    )


def uses_deepspeed(config: EngineConfig, ranks: int) -> bool:
    """Return True if a run on so many ranks uses DeepSpeed; False for plain torch."""
    return config.name == "deepspeed" or (config.name == "auto" and ranks > 1)
