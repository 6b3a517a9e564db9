"""Agreement of the ranks of a run before training: on settings, data and kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.kernels.backends import OPERATIONS
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import from_main, sum_over_ranks
from deepspeed_nmt.parallel.world import World


def check_ranks_agree(config: RunConfig, data: TrainingData, world: World) -> None:
    """Check that all ranks have the settings and the data of rank 0, since each host may have files of its own.

    Args:
        config: settings that this rank has read.
        data: data that this rank has opened.
        world: the ranks, which call it together.

    Raises:
        ConfigError: if settings differ, naming their sections.
        DataError: if the data differs.
    """
    own: dict[str, Any] = {
        "settings": config.model_dump(mode="json"),
        "data": [data.main.text_form.form, *(f"{part.identity} {part.weights}" for part in data.parts)],
    }
    own["settings"]["validation"]["sets"] = list(config.validation.sets)  # at places of their own on each host
    main = from_main(own, world)
    with fail_together(world):
        if differing := [name for name, value in own["settings"].items() if value != main["settings"][name]]:
            raise ConfigError(
                f"all ranks must have the same settings, but this one differs from rank 0 in {', '.join(differing)}; "
                "start all of them with the same command and files"
            )
        if own["data"] != main["data"]:
            raise DataError(
                f"all ranks must have the same data, but {data} is not that of rank 0 here; copy that to this host"
            )


def agree_on_kernels(kernels: Kernels, world: World, dtypes: Iterable[torch.dtype]) -> Kernels:
    """Return kernels that all ranks have: if any rank lacks one, all ranks fall back to torch for its operation.

    Otherwise ranks that share a model would draw different dropout masks.

    Args:
        kernels: kernels of the run.
        world: the ranks.
        dtypes: dtypes to compute in.

    Raises:
        ConfigError: on all ranks, if a backend that the settings name is not available on one.
    """
    with fail_together(world):
        chosen = [kernels.choices(world.device, dtype) for dtype in dtypes]
        plain = {name: float(any(each[name] == "torch" for each in chosen)) for name in OPERATIONS}
    counts = sum_over_ranks(plain, world)
    differing = [operation for operation, count in counts.items() if 0.0 < count < world.ranks]
    if not differing:
        return kernels
    logger.warning("%s: all ranks fall back to torch, because some have no other kernel", ", ".join(differing))
    return kernels.fall_back_to_torch(differing)
