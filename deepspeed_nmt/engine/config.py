"""Configuration of the engine."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import override

from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.kernels.backends import parse_setting
from deepspeed_nmt.registry import Config


def _recompute(value: object) -> object:
    """Check a recomputation setting."""
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"must be auto or a whole number from 0 up, but is {shown(value)}")
    return value


def _kernels(value: object) -> object:
    """Check the names of operations and backends."""
    if isinstance(value, str):
        parse_setting(value, "it")
    return value


def _off(value: object) -> object:
    """Read `off` as YAML does, for which it is false."""
    if value is True:
        raise ValueError("must be off or layers, but is true (as YAML reads yes and on)")
    return "off" if value is False else value


KernelsSetting = Annotated[str, BeforeValidator(_kernels)]
Recompute = Annotated[int | Literal["auto"], BeforeValidator(_recompute)]
DEFAULT_DS_CONFIG = "zero2"
"""DeepSpeed's configuration where ``engine.ds_config`` is not set. Runs of older versions record it."""


class EngineConfig(Config):
    """Settings of the engine that carries out updates."""

    name: Literal["auto", "plain", "deepspeed"] = Field(
        default="auto",
        description="plain (torch alone) or deepspeed; auto: deepspeed on several ranks, or if `ds_config` is given, "
        "else plain",
    )
    ds_config: str | None = Field(
        default=None,
        description="DeepSpeed's JSON: a path, or the name of a file in ds_configs/ without .json; null: zero2, if "
        "the run uses DeepSpeed",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto: bf16 on a GPU that supports it, fp16 on an older GPU, fp32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is a GPU, else cpu"
    )
    deterministic: bool = Field(
        default=False, description="bit-identical results on a GPU too, at some cost in speed"
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="size of a tensor-parallel group, whose ranks hold slices of one copy of the model",
    )
    recompute_encoder: Recompute = Field(
        default=0,
        description="recompute the activations of every k-th encoder layer in the backward pass, to save memory: "
        "1: all layers; 0: none; auto: as few as fit",
    )
    recompute_decoder: Recompute = Field(default=0, description="as recompute_encoder, for decoder layers")
    memory_gib: float = Field(
        default=0.0, ge=0.0, description="memory per GPU that auto may use, in GiB; 0: all of it (required on a CPU)"
    )
    kernels: KernelsSetting = Field(
        default="auto",
        description="backends of fused operations: auto, torch, triton, apex, or operation=backend,... such as "
        "softmax=torch",
    )
    compile: Annotated[Literal["off", "layers"], BeforeValidator(_off)] = Field(
        default="off",
        description="layers: torch.compile each layer for training, which fuses operations instead of `kernels`; "
        "takes up to minutes at the start, and suits the packed layout, which has few shapes",
    )
    attention: Literal["auto", "sdpa", "fused"] = Field(
        default="auto",
        description="sdpa: torch's kernels that never store attention weights; fused: matrix products and a fused "
        "softmax; auto: sdpa if torch has such a kernel",
    )
    silent_s: float = Field(
        default=60.0,
        ge=0.0,
        description="seconds without a heartbeat after which a rank is considered lost and all ranks end; 0: never",
    )
    stuck_s: float = Field(
        default=600.0,
        gt=0.0,
        description="time limit of a micro-batch in seconds; a rank that exceeds it is considered stuck and all "
        "ranks end",
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        le=1e8,
        description="time limit in seconds of waiting for another rank, and of saving or validating",
    )

    @override
    @classmethod
    def upgraded(cls, recorded: Mapping[str, Any]) -> Mapping[str, Any]:
        if recorded.get("name") in ("auto", "plain") and recorded.get("ds_config") == DEFAULT_DS_CONFIG:
            return {**recorded, "ds_config": None}
        return recorded

    def chosen_by(self, given: Container[str]) -> EngineConfig:
        """Return the settings with DeepSpeed as the engine, if the user gives a configuration of DeepSpeed.

        A recorded ``ds_config`` chooses nothing: older versions ignored it on one rank, and with ``name=plain``.

        Args:
            given: names of the settings that the user gives, now and not in the run that is resumed.

        Raises:
            ConfigError: if the engine is plain torch, which would ignore it.
        """
        if "ds_config" not in given or self.ds_config is None or self.name == "deepspeed":
            return self
        if self.name == "plain":
            raise ConfigError(
                f"engine.ds_config must be left out with engine.name=plain, which ignores it, but is "
                f"{shown(self.ds_config)}; use engine.name=deepspeed, or engine.ds_config=null"
            )
        return self.model_copy(update={"name": "deepspeed"})


def uses_deepspeed(config: EngineConfig, ranks: int) -> bool:
    """Return True if a run on ``ranks`` ranks uses DeepSpeed, False if it uses plain torch."""
    return config.name == "deepspeed" or (config.name == "auto" and ranks > 1)
