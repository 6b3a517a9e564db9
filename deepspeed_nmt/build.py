"""The parts that a run's configuration names, built: model, objective, kernels."""

from __future__ import annotations

from functools import partial

import torch

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS


def build_model(config: RunConfig, vocabulary: Vocabulary) -> TranslationModel:
    """Build the model of a run, freshly initialised; the weights follow the run's seed."""
    torch.manual_seed(config.training.seed)
    make_layer = partial(LAYERS[config.layer.name].build, config.layer)
    return MODELS[config.model.name].build(config.model, vocabulary, make_layer)


def build_meta_model(config: RunConfig, vocabulary: Vocabulary) -> TranslationModel:
    """Build the model of a run on the meta device, where parameters have shapes and no memory."""
    with torch.device("meta"):
        return build_model(config, vocabulary)


def build_objective(config: RunConfig, vocabulary: Vocabulary) -> Objective:
    """Build the objective of a run."""
    (likelihood,) = (
        LIKELIHOODS[name].build(part, vocabulary) for name, part in config.objective.items() if name in LIKELIHOODS
    )
    regularizers = [
        REGULARIZERS[name].build(part, vocabulary) for name, part in config.objective.items() if name in REGULARIZERS
    ]
    return Objective(likelihood, regularizers)


def build_kernels(config: RunConfig) -> Kernels:
    """Return the kernels that a run asks for, to be given to its models by `use_kernels`.

    Raises:
        ConfigError: if ``engine.kernels`` names an unknown operation or backend.
    """
    return Kernels(config.engine.kernels, config.engine.attention)
