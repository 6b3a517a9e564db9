"""Builders of the model, the objective and the kernels that a configuration chooses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.choice import DEFAULT, Kernels, use_kernels
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS


def build_kernels(config: RunConfig) -> Kernels:
    """Build the kernels of a run."""
    return Kernels(config.engine.kernels, config.engine.attention)


def build_model(config: RunConfig, vocabulary: Vocabulary, kernels: Kernels = DEFAULT) -> TranslationModel:
    """Build the model of a run, initialised from the run's seed."""
    torch.manual_seed(config.training.seed)
    make_layer = partial(LAYERS[config.layer.name].build, config.layer)
    model = MODELS[config.model.name].build(config.model, vocabulary, make_layer)
    for part in config.objective.values():
        if isinstance(part, LikelihoodConfig):
            part.extend(model)
    use_kernels(model, kernels)
    return model


def build_meta_model(config: RunConfig, vocabulary: Vocabulary, kernels: Kernels = DEFAULT) -> TranslationModel:
    """Build the model of a run on the meta device, where parameters have shapes and no data."""
    with torch.device("meta"), _Uninitialised():
        return build_model(config, vocabulary, kernels)


class _Uninitialised(TorchFunctionMode):
    """Mode in which tensors are not filled with random numbers.

    Meta tensors have no data to fill, and torch would first import parts of its compiler, which takes seconds.
    """

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func in (torch.Tensor.normal_, torch.Tensor.uniform_) else func(*args, **(kwargs or {}))


def build_objective(config: RunConfig, vocabulary: Vocabulary) -> Objective:
    """Build the objective of a run."""
    parts = config.objective.items()
    (likelihood,) = (LIKELIHOODS[name].build(part, vocabulary) for name, part in parts if name in LIKELIHOODS)
    regularizers = [REGULARIZERS[name].build(part, vocabulary) for name, part in parts if name in REGULARIZERS]
    return Objective(likelihood, regularizers)
