"""Resolved settings of an engine: the precision, and the complete configuration of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_nmt.engine.config import DEFAULT_DS_CONFIG, EngineConfig, uses_deepspeed
from deepspeed_nmt.engine.ds_config import (
    complete_ds_config,
    load_ds_config,
    wanted_precision,
    zero_stage,
)
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.precision import DTYPES, Precision, native_precision
from deepspeed_nmt.parallel.world import World


@dataclass(frozen=True)
class EngineSettings:
    """Resolved settings of an engine.

    Attributes:
        precision: of the forward and backward pass.
        clip_norm: maximum norm of the gradient; 0 disables clipping.
        ds_config: complete configuration of DeepSpeed; None for plain torch.
    """

    precision: Precision
    clip_norm: float
    ds_config: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> int | None:
        """Stage of ZeRO; None for plain torch."""
        return None if self.ds_config is None else zero_stage(dict(self.ds_config))


def validation_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of validation: that of training on a GPU, fp32 on a CPU."""
    return DTYPES[precision] if device.type == "cuda" else torch.float32


def resolve_engine(config: EngineConfig, clip_norm: float, world: World) -> EngineSettings:
    """Resolve the settings of an engine on the ranks of this run; see :func:`resolve_engine_for`."""
    native = native_precision(world.device)
    return resolve_engine_for(config, clip_norm, ranks=world.ranks, data_ranks=world.data_ranks, native=native)


def resolve_engine_for(
    config: EngineConfig, clip_norm: float, *, ranks: int, data_ranks: int, native: Precision
) -> EngineSettings:
    """Resolve the settings of an engine on a given number of ranks, which need not exist.

    Args:
        config: the engine's section of the run's configuration.
        clip_norm: maximum norm of the gradient; 0 disables clipping.
        ranks: processes of the run.
        data_ranks: size of a data-parallel group.
        native: precision of "auto" on the device; see :func:`deepspeed_nmt.kernels.precision.native_precision`.

    Raises:
        ConfigError: if the device does not support the precision, or the DeepSpeed configuration is missing or
            contradicts the run.
    """
    content = None
    if uses_deepspeed(config, ranks):
        content = load_ds_config(DEFAULT_DS_CONFIG if config.ds_config is None else config.ds_config)
    wanted = config.precision if content is None else wanted_precision(content, config.precision)
    precision: Precision = native if wanted == "auto" else wanted  # type: ignore[assignment]
    if precision == "bf16" and native == "fp16":
        raise ConfigError(
            "engine.precision must be fp16 or fp32 on a GPU older than sm_80, which has no bf16, but is bf16; use "
            "engine.precision=fp16"
        )
    if content is not None:
        content = complete_ds_config(content, ranks=data_ranks, clip_norm=clip_norm, precision=precision)
    return EngineSettings(precision, clip_norm, content)
