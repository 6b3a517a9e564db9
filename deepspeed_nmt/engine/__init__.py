"""Engines that carry out updates: plain torch and DeepSpeed."""

from __future__ import annotations

import copy

from pydantic import ValidationError

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.engine.eager import without_dynamo
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.engine.settings import EngineSettings
from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.parallel.world import World


def build_engine(settings: EngineSettings, module: TrainModule, world: World, dummy: Batch) -> Engine:
    """Build an engine over a module whose weights are loaded already; ``dummy`` is a batch without target tokens."""
    if settings.ds_config is None:
        return PlainEngine(module, settings.optimizer, settings.precision, world)
    with without_dynamo():  # DeepSpeed imports some of its modules as it is initialised
        try:
            from deepspeed_nmt.engine.deepspeed import DeepSpeedEngine
        except ImportError as error:
            raise ConfigError(
                f"engine.name is deepspeed, but it cannot be imported ({error}); install it, or use engine.name=plain"
            ) from error
        try:
            return DeepSpeedEngine(module, settings.optimizer, copy.deepcopy(dict(settings.ds_config)), world, dummy)
        except ValidationError as error:  # of DeepSpeed's models of its sections
            problems = [(".".join(map(str, one["loc"])), shown(one["input"]), one["msg"]) for one in error.errors()]
            raise ConfigError(
                [
                    f"DeepSpeed refuses '{name}' in its configuration, which is {value} ({message}); correct it there"
                    for name, value, message in problems
                ]
            ) from error
