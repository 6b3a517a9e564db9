"""How an update is carried out: plain torch, or DeepSpeed."""

from __future__ import annotations

import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.engine.base import Engine, EngineConfig, choose_precision, uses_deepspeed
from deepspeed_nmt.engine.ds_config import complete_ds_config, load_ds_config, precision_asked_for
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.world import World


def build_engine(
    config: EngineConfig,
    module: TrainModule,
    optimizer: torch.optim.Optimizer,
    clip_norm: float,
    world: World,
    dummy: Batch,
) -> Engine:
    """The engine a run asks for, around a module whose weights are loaded.

    Args:
        clip_norm: gradients are scaled down to this norm; 0 leaves them.
        dummy: a batch of no weight.

    Raises:
        ConfigError: for a precision the device lacks, a DeepSpeed configuration that contradicts the run, or
            DeepSpeed asked for and not installed.
    """
    precision = choose_precision(precision_asked_for(config, world.ranks), world.device)
    if not uses_deepspeed(config, world.ranks):
        return PlainEngine(module, optimizer, clip_norm, precision, world)
    try:
        from deepspeed_nmt.engine.deepspeed import DeepSpeedEngine
    except ImportError as error:
        raise ConfigError(
            f"engine.name is deepspeed, but it cannot be imported ({error}); install it, or use engine.name=plain"
        ) from error
    content = load_ds_config(config.ds_config)
    completed = complete_ds_config(content, ranks=world.data_ranks, clip_norm=clip_norm, precision=precision)
    return DeepSpeedEngine(module, optimizer, completed, world, dummy)
