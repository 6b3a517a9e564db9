"""Warm start of a run from the weights of another one: fine-tuning, direct stacking, depth growing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import ModelConfig
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.files import atomic_write_text, parse_json, resolved
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.registry import Config
from deepspeed_nmt.run.directory import ORIGIN_FILE, Run
from deepspeed_nmt.train.checkpoint import Checkpoint

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Origin:
    """Run and checkpoint of a warm start.

    Attributes:
        run: run directory.
        checkpoint: best, last, average, or a path.
        grow: True if its model becomes the frozen bottom of the new one; False if its weights are trained further.
    """

    run: Path
    checkpoint: str
    grow: bool

    @property
    def option(self) -> str:
        """Option by which the user named it."""
        return _option(self.grow)


def warm_start(model: TranslationModel, config: RunConfig, origin: Origin, data: DataDirectory) -> dict[str, object]:
    """Copy the weights of a checkpoint of another run into a new model.

    With ``origin.grow`` they become the model's frozen bottom (depth growing). Otherwise they are the model's own,
    and layers above those of the other run keep their initial weights (direct stacking).

    Args:
        model: model of the new run, which has its initial weights.
        config: settings of the new run.
        origin: the other run.
        data: data of the new run; both runs must have the same vocabulary.

    Returns:
        Content of ORIGIN_FILE of the new run.

    Raises:
        ConfigError: if vocabularies, shapes, or the computations with the weights differ.
        CheckpointError: if the checkpoint does not exist or is damaged.
    """
    source = Run.open(origin.run, origin.option)
    if source.tokenizer.digest != data.tokenizer().digest:
        raise ConfigError(
            f"{origin.option} must have the vocabulary of {data.path}, but {origin.run} has another; "
            f"prepare the data with --vocab-from {origin.run}"
        )
    differences: list[str] = []
    prefix = ""
    if origin.grow:
        prefix = _grown_prefix(config)
        config.model.check_bottom(source.config.parts, str(source.path))
    else:
        config.model.check_weights_of(source.config.model, str(source.path))
        differences = config.model.composition_differences(source.config.model)
    checkpoint = source.checkpoint(origin.checkpoint, "--from-checkpoint")
    _copy(model, checkpoint, source, prefix)
    return {
        "run": str(origin.run.resolve()),
        "which": origin.checkpoint,
        "checkpoint": str(checkpoint.path.resolve()),
        "update": checkpoint.progress.update,
        "frozen": origin.grow,
        "differences": differences,
    }


def _grown_prefix(config: RunConfig) -> str:
    if config.model.grown_prefix is None:
        growing = [f"model.name={entry.name}" for entry in MODELS.entries if _grows(entry.config)]
        raise ConfigError(
            f"--grow-from needs a model that grows on top of another, but model.name={config.model.name} does not; "
            f"use {' or '.join(growing)}"
        )
    return config.model.grown_prefix


def _grows(model: type[Config]) -> bool:
    return issubclass(model, ModelConfig) and model.grown_prefix is not None


def write_origin(run: Path, origin: dict[str, Any]) -> None:
    """Write ORIGIN_FILE, and warn if the weights fit but were trained in a different network."""
    if origin["differences"]:
        logger.warning(
            "--init-from %s: %s; the weights fit, but were trained in a different network",
            origin["run"],
            " and ".join(origin["differences"]),
        )
    atomic_write_text(run / ORIGIN_FILE, json.dumps(origin, indent=1))


def check_origin(run: Path, origin: Origin) -> None:
    """Check that a resumed run had the same warm start.

    Args:
        run: directory of a run that has a checkpoint.
        origin: warm start that the user requests now.

    Raises:
        ConfigError: if the run began with another warm start, or without one.
        DataError: if ORIGIN_FILE cannot be read.
    """
    file = run / ORIGIN_FILE
    remedy = f"leave {origin.option} out to resume, or start a new run with another --run directory"
    if not file.exists():
        raise ConfigError(f"{origin.option} applies to the start of a run, but {run} has begun without it; {remedy}")
    record = _read_origin(file)
    asked = record.get("which", origin.checkpoint)  # older versions did not record it
    same_run = _same_path(origin.run, record["run"]) and origin.grow == record["frozen"]
    same_checkpoint = origin.checkpoint == asked or _same_path(Path(origin.checkpoint), record["checkpoint"])
    if not (same_run and same_checkpoint):
        began = f"{_option(record['frozen'])} {record['run']} --from-checkpoint {asked}"
        raise ConfigError(
            f"{run} began with {began}, but now {origin.option} is {origin.run} and --from-checkpoint "
            f"{origin.checkpoint}; {remedy}"
        )


def _read_origin(file: Path) -> dict[str, Any]:
    """Read ORIGIN_FILE.

    Raises:
        DataError: if it cannot be read, or lacks a key.
    """
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return {**content, **{key: content[key] for key in ("run", "checkpoint", "frozen")}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} must be what `train` wrote when the run began, but is not; restore it from a copy, or leave out "
            "--init-from and --grow-from to resume the run"
        ) from error


def _copy(model: TranslationModel, checkpoint: Checkpoint, source: Run, prefix: str) -> None:
    """Copy a checkpoint's weights into a model, or into the part of it that has a prefix.

    Raises:
        ConfigError: if names or shapes differ, naming the first difference.
    """
    grow = bool(prefix)
    own = dict(model.named_parameters())
    weights = {prefix + name: weight for name, weight in checkpoint.weights().items()}
    expected = {name for name in own if name.startswith(prefix)}
    missing = {name for name in expected - set(weights) if grow or not _above(name, weights)}
    differences = [
        *(f"{name} is {_shape(weights[name])} instead of {_shape(own[name])}"
          for name in sorted(expected & set(weights)) if weights[name].shape != own[name].shape),
        *(f"{name.removeprefix(prefix)} is unexpected" for name in sorted(set(weights) - expected)),
        *(f"{name.removeprefix(prefix)} is missing" for name in sorted(missing)),
    ]  # fmt: skip
    if differences:
        part = "bottom must have the shape" if grow else "model must have the shape"
        raise ConfigError(
            f"the {part} of {source.path}, but {differences[0].removeprefix(prefix)} (one of {len(differences)} "
            f"differences); make the model.* and layer.* settings those of {source.path / 'config.yaml'}"
        )
    fresh = sorted(name for name in expected - set(weights) if not own[name].requires_grad)
    if fresh and not grow:
        raise ConfigError(
            f"{source.path} must have all layers that are frozen here, but lacks {fresh[0]}; use BERTs of its depth, "
            "or start without --init-from"
        )
    with torch.no_grad():
        for name in expected & set(weights):
            own[name].copy_(weights[name])


def _option(grow: bool) -> str:
    return "--grow-from" if grow else "--init-from"


def _same_path(path: Path, recorded: str) -> bool:
    return str(path) == recorded or resolved(path) == resolved(Path(recorded))


def _above(name: str, weights: dict[str, Tensor]) -> bool:
    """Return True if a parameter belongs to a layer above all those of the other run."""
    found = _LAYER.match(name)
    return found is not None and not any(other.startswith(found[0]) for other in weights)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
