"""How an update is carried out: plain torch, or DeepSpeed."""

from __future__ import annotations

import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.engine.base import Engine, EngineConfig, choose_precision
from deepspeed_nmt.engine.ds_config import complete_ds_config, load_ds_config, wanted_precision
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
    name = config.name if config.name != "auto" else ("deepspeed" if world.ranks > 1 else "plain")
    if name == "plain":
        precision = choose_precision(config.precision, world.device)
        return PlainEngine(module, optimizer, clip_norm, precision, world)
    try:
        from deepspeed_nmt.engine.deepspeed import DeepSpeedEngine
    except ImportError as error:
        raise ConfigError(
            f"engine.name is deepspeed, but it cannot be imported ({error}); install it, or use engine.name=plain"
        ) from error
    content = load_ds_config(config.ds_config)
    precision = choose_precision(wanted_precision(content, config.precision), world.device)
    completed = complete_ds_config(content, ranks=world.data_ranks, clip_norm=clip_norm, precision=precision)
    return DeepSpeedEngine(module, optimizer, completed, world, dummy)
