"""Starting a run from the weights of another: fine-tuning, direct stacking, depth growing."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import sha256_of
from deepspeed_nmt.runs import Run

ORIGIN_FILE = "origin.json"
_BOTTOM = "bottom."
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


def inherit(
    model: TranslationModel, source: Run, which: str, data: DataDirectory, *, grow: bool
) -> dict[str, object]:
    """Put weights of a checkpoint of another run into a new model.

    Args:
        model: of the new run, freshly initialised.
        source: the other run.
        which: checkpoint: best, last, average, or a path.
        data: of the new run; its vocabulary must be the other run's.
        grow: the weights become the model's frozen bottom (depth growing). Otherwise they are its own; layers above
            those the other run has stay fresh (direct stacking).

    Returns:
        Where the weights came from, for the new run's ORIGIN_FILE.

    Raises:
        ConfigError: if vocabulary or shapes differ, in one sentence.
    """
    where = "--grow-from" if grow else "--init-from"
    if sha256_of(source.path / "vocabulary.model") != sha256_of(data.path / "vocabulary.model"):
        raise ConfigError(
            f"{where} must have the vocabulary of {data.path}, but {source.path} has another; "
            f"prepare the data with --vocab-from {source.path}"
        )
    prefix = _BOTTOM if grow else ""
    own = dict(model.named_parameters())
    if grow and not any(name.startswith(_BOTTOM) for name in own):
        raise ConfigError("--grow-from needs a model that grows; use a recipe such as depth_growing_big_8")
    checkpoint = source.checkpoints.open(which)
    weights = {prefix + name: weight for name, weight in checkpoint.weights().items()}
    expected = {name for name in own if name.startswith(prefix)}
    missing = {name for name in expected - set(weights) if grow or not _above(name, weights)}
    differences = [
        *(f"{name} is {_shape(weights[name])} there and {_shape(own[name])} here"
          for name in sorted(expected & set(weights)) if weights[name].shape != own[name].shape),
        *(f"{name.removeprefix(prefix)} is only there" for name in sorted(set(weights) - expected)),
        *(f"{name.removeprefix(prefix)} is only here" for name in sorted(missing)),
    ]  # fmt: skip
    if differences:
        part = "bottom must have the shape" if grow else "model must have the shape"
        raise ConfigError(
            f"the {part} of {source.path}, but {differences[0].removeprefix(prefix)} (one of {len(differences)} "
            f"differences); make the model.* settings those of {source.path / 'config.yaml'}"
        )
    with torch.no_grad():
        for name in expected & set(weights):
            own[name].copy_(weights[name])
    return {
        "run": str(source.path),
        "checkpoint": str(checkpoint.path),
        "update": checkpoint.progress.update,
        "frozen": grow,
    }


def _above(name: str, weights: dict[str, Tensor]) -> bool:
    """Whether a parameter belongs to a layer above all those that the other run has."""
    found = _LAYER.match(name)
    return found is not None and not any(other.startswith(found[0]) for other in weights)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
