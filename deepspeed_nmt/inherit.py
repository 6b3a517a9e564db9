"""Starting a run from the weights of another: fine-tuning, direct stacking, depth growing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.methods.bert import BertPair
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig
from deepspeed_nmt.methods.transformer import TransformerConfig, TransformerShape
from deepspeed_nmt.runs import ORIGIN_FILE, Run, read_record
from deepspeed_nmt.train.checkpoint import Checkpoint

_BOTTOM = "bottom."
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")

# Settings of a model that say how it learns, not what it computes.
_LEARNING = {"init", "dropout", "attention_dropout", "activation_dropout", "frozen_dropout"}
_LEARNING |= {"freeze", "pretrained", "source_encoder", "target_encoder"}
_DEPTH = {"encoder_layers", "decoder_layers"}


def inherit(
    model: TranslationModel, config: RunConfig, path: Path, which: str, data: DataDirectory, *, grow: bool
) -> dict[str, object]:
    """Put weights of a checkpoint of another run into a new model.

    Args:
        model: of the new run, freshly initialised.
        config: of the new run.
        path: the other run.
        which: checkpoint: best, last, average, or a path.
        data: of the new run; its vocabulary must be the other run's.
        grow: the weights become the model's frozen bottom (depth growing). Otherwise they are its own; layers above
            those the other run has stay fresh (direct stacking).

    Returns:
        Where the weights came from, for the new run's ORIGIN_FILE.

    Raises:
        ConfigError: if vocabulary, shapes, or what the weights compute differ, in one sentence.
        CheckpointError: if there is no such checkpoint.
    """
    option = _option(grow)
    source = Run.open(path, option)
    if source.tokenizer.digest != data.tokenizer().digest:
        raise ConfigError(
            f"{option} must have the vocabulary of {data.path}, but {path} has another; "
            f"prepare the data with --vocab-from {path}"
        )
    if grow:
        if not any(name.startswith(_BOTTOM) for name, _ in model.named_parameters()):
            raise ConfigError("--grow-from needs a model that grows; use a recipe such as depth_growing_big_8")
        _check_bottom(config, source)
    else:
        _check_same_function(config, source)
    differences = [] if grow else _other_walks(config, source)
    checkpoint = source.checkpoints.open(which, "--from-checkpoint")
    _copy(model, checkpoint, source, grow)
    return {
        "run": str(path.resolve()),
        "which": which,
        "checkpoint": str(checkpoint.path.resolve()),
        "update": checkpoint.progress.update,
        "frozen": grow,
        "differences": differences,
    }


def write_origin(run: Path, origin: dict[str, Any]) -> None:
    """Write ORIGIN_FILE, and warn of weights that fit but were trained as another network."""
    if origin["differences"]:
        logger.warning(
            "--init-from %s: %s; the weights fit, but were trained as another network",
            origin["run"],
            " and ".join(origin["differences"]),
        )
    atomic_write_text(run / ORIGIN_FILE, json.dumps(origin, indent=1))


def check_origin(run: Path, origin: Path, which: str, *, grow: bool) -> None:
    """Refuse to go on with a run under the name of another origin than it has; the same one may be named again.

    Args:
        run: that has begun.
        origin, which, grow: as in :func:`inherit`.

    Raises:
        ConfigError: if the run came from elsewhere, or from nowhere.
        DataError: if ORIGIN_FILE cannot be read.
    """
    option, file = _option(grow), run / ORIGIN_FILE
    remedy = f"leave {option} out to go on, or start a new run with another --run directory"
    if not file.exists():
        raise ConfigError(f"{option} is for the start of a run, but {run} has begun without it; {remedy}")
    record = read_record(file, ("run", "checkpoint", "frozen"))
    asked = record.get("which", which)  # older versions did not write it down
    same_run = _same_path(origin, record["run"]) and grow == record["frozen"]
    if not same_run or not (which == asked or _same_path(Path(which), record["checkpoint"])):
        began = f"{_option(record['frozen'])} {record['run']} --from-checkpoint {asked}"
        raise ConfigError(
            f"{run} began with {began}, but now {option} is {origin} and --from-checkpoint {which}; {remedy}"
        )


def _check_bottom(config: RunConfig, source: Run) -> None:
    """Refuse a bottom that would be another network than the run it comes from."""
    if not isinstance(source.config.model, TransformerConfig):
        raise ConfigError(
            f"--grow-from must be a run with model.name=transformer, but {source.path} has "
            f"model.name={source.config.model.model_dump()['name']}, which cannot be grown"
        )
    layer, depth = source.config.layer, source.config.model.decoder_layers
    if isinstance(layer, CrossAttentionDropConfig) and any(layer.rate(n) == 1.0 for n in range(1, depth + 1)):
        raise ConfigError(
            f"--grow-from must be a run whose decoder layers all have cross-attention, but {source.path} has some "
            "without (layer.drop_ratio=1 or layer.beyond=1); such runs cannot be grown"
        )
    _refuse_differences(config, source, "bottom", set(TransformerShape.model_fields) - _LEARNING)


def _check_same_function(config: RunConfig, source: Run) -> None:
    """Refuse weights whose layers would compute something else here."""
    if isinstance(config.model, DepthGrowingConfig) and not isinstance(source.config.model, DepthGrowingConfig):
        raise ConfigError(
            f"--init-from must be a run with model.name=depth_growing, as this one, but {source.path} has "
            f"model.name={source.config.model.model_dump()['name']}; use --grow-from to grow on top of it"
        )
    _refuse_differences(config, source, "model", set(TransformerShape.model_fields) - _LEARNING - _DEPTH)
    ours, theirs = config.model, source.config.model
    if isinstance(ours, BertPair) and isinstance(theirs, BertPair):
        for side in ("source", "target"):
            here, there = (getattr(each, side).model_dump(exclude={"layers"}) for each in (ours, theirs))
            if here != there:
                key = next(key for key in here if here[key] != there[key])
                raise ConfigError(
                    f"the model must be that of {source.path}, but model.{side}.{key} is {there[key]} there and "
                    f"{here[key]} here; name the BERTs that run was made of"
                )


def _other_walks(config: RunConfig, source: Run) -> list[str]:
    """Settings by which the same layers are put together otherwise."""
    names = {name for each in (config, source.config) for name in each.model.model_dump()}
    names -= {"source", "target"}  # of BERTs; refused where they differ
    return _differences(config, source, names - set(TransformerShape.model_fields) - _LEARNING)


def _refuse_differences(config: RunConfig, source: Run, part: str, keys: Iterable[str]) -> None:
    if differences := _differences(config, source, keys):
        raise ConfigError(
            f"the {part} must be that of {source.path}, but {' and '.join(differences)}; make these settings those "
            f"of {source.path / 'config.yaml'}"
        )


def _differences(config: RunConfig, source: Run, keys: Iterable[str]) -> list[str]:
    there, here = source.config.model.model_dump(), config.model.model_dump()
    return [
        f"model.{key} is {there.get(key, 'unset')} there and {here.get(key, 'unset')} here"
        for key in sorted(keys)
        if there.get(key) != here.get(key)
    ]


def _copy(model: TranslationModel, checkpoint: Checkpoint, source: Run, grow: bool) -> None:
    """Put a checkpoint's weights into a model, or into its bottom.

    Raises:
        ConfigError: if names or shapes differ.
    """
    prefix = _BOTTOM if grow else ""
    own = dict(model.named_parameters())
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
    return str(path) == recorded or path.resolve() == Path(recorded).resolve()


def _above(name: str, weights: dict[str, Tensor]) -> bool:
    """Whether a parameter belongs to a layer above all those that the other run has."""
    found = _LAYER.match(name)
    return found is not None and not any(other.startswith(found[0]) for other in weights)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
