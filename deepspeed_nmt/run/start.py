"""Start of a run: lock, environment, files of the directory, and a warm start from the weights of another run."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from deepspeed_nmt import __version__
from deepspeed_nmt.config import RunConfig, load_recorded
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import ModelConfig
from deepspeed_nmt.data.data_directory import VOCABULARY_FILES, DataDirectory
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.files import atomic_write_text, exclusive, made, parse_json, read_regular, remove_orphans, resolved
from deepspeed_nmt.manifest import MANIFEST_FILE, DamagedRecordError
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.registry import Config
from deepspeed_nmt.run.directory import (
    ALIGNMENT_FILE,
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    ORIGIN_FILE,
    SCORES_FILE,
    DataRecord,
    Run,
    RunManifest,
    changed_fixed_settings,
    check_record,
    replace_files,
    verify_run,
)
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore, RunRecord
from deepspeed_nmt.train.log import METRICS_FILE

_LEARNING = ("optimizer.", "schedule.")
"""Settings whose change in a resumed run is logged, because a recipe may have changed them."""


def has_begun(path: Path) -> bool:
    """Return True if a run has a checkpoint. Until then, all its settings can change."""
    return bool(CheckpointStore(path / CHECKPOINTS).names())


def record_of(config: RunConfig, data: TrainingData) -> RunRecord:
    """Return the record of a run, for its checkpoints."""
    return RunRecord(
        config=config.model_dump(mode="json"),
        data=str(data.main.path.resolve()),
        fingerprint=data.main.fingerprint,
        longest_source=data.longest_source,
        text=data.main.text_form,
        tags=data.tags,
        corpora=data.records,
        vocabulary=data.main.vocabulary,
    )


def begin(path: Path, config: RunConfig, data: TrainingData) -> None:
    """Write the files of a new run, or check that a resumed one has the same fixed settings and the same data.

    Args:
        path: run directory.
        config: settings of the run.
        data: data to train on.

    Raises:
        ConfigError: if a setting has changed that cannot change, all of them at once; or if files are in the way that
            `train` did not write.
        CheckpointError: if the newest checkpoint is of another run.
        DataError: if the data has changed.
    """
    files = {
        CONFIG_FILE: config.to_yaml().encode(),
        DATA_FILE: DataRecord.of(data).content(),
    }
    if has_begun(path):
        verify_run(path, data.main.path)
        _check_same(path, config, data)
    else:
        path.mkdir(parents=True, exist_ok=True)
        _check_own(path)
        if (path / METRICS_FILE).exists():
            logger.warning("%s has no checkpoint: training starts from the beginning, and its metrics with it", path)
        for name in (ORIGIN_FILE, MANIFEST_FILE, SCORES_FILE, ALIGNMENT_FILE):
            (path / name).unlink(missing_ok=True)
        files |= {name: read_regular(data.main.path / name) for name in data.main.vocabulary}
    for directory in (path, path / CHECKPOINTS, *(path / CHECKPOINTS).glob("update-*/")):
        remove_orphans(directory)
    replace_files(path, files)
    atomic_write_text(path / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))


def recorded_data(path: Path) -> TrainingData:
    """Open the data directories that a run was last trained on.

    Args:
        path: run directory.

    Raises:
        DataError: if one is not where it was, or is incomplete.
    """
    record = DataRecord.read(path)
    options = [each.option for each in record.corpora] or [DataOption(Path(record.path))]
    for option in options:
        if not option.path.is_dir():
            raise DataError(
                f"--data is not given, so it is that of {path}, but there is no directory {option.path}; give the "
                "place of its data by --data"
            )
    return TrainingData(options)


def _check_same(path: Path, config: RunConfig, data: TrainingData) -> None:
    recorded = DataRecord.read(path)
    main = data.main
    if recorded.fingerprint != main.fingerprint:
        if recorded.fingerprint in (part.directory.fingerprint for part in data.parts):
            raise ConfigError(
                f"the first --data must be that of {recorded.path}, which gives {path} its vocabulary and validation "
                f"set, but is {main.path}; give that one first"
            )
        raise DataError(
            f"{main.path} must hold the data that {path} began with (from {recorded.path}), but it has changed; "
            "restore it, or start a new run with another --run directory"
        )
    before_at = {each.path: each.fingerprint for each in recorded.corpora}
    for part in data.parts:
        where = str(part.directory.path.resolve())
        if before_at.get(where, part.directory.fingerprint) != part.directory.fingerprint:
            raise DataError(
                f"{where} must hold the data that {path} was trained on, but it has changed; restore it, or give the "
                "new data another directory"
            )
    before = load_recorded(path / CONFIG_FILE).flat()
    now = config.flat()
    problems = [
        f"{key} must stay {before.get(key, 'unset')} once {path} has a checkpoint, but is {now.get(key, 'unset')}; "
        "without --recipe, --config and this setting the run keeps its own; for another one, start a new run"
        for key in changed_fixed_settings(before, now)
    ]
    if problems:
        raise ConfigError(problems)
    if learning := [key for key in sorted(now) if key.startswith(_LEARNING) and before.get(key) != now[key]]:
        changes = [f"{key} was {before.get(key, 'unset')} and is {now[key]}" for key in learning]
        logger.warning("%s continues with other settings: %s", path, ", ".join(changes))
    if config.layer.depends_on_micro_batches:
        _warn_of_micro_batches(path, before, now)
    store = CheckpointStore(path / CHECKPOINTS)
    newest = None
    with suppress(CheckpointError):  # a damaged one is skipped later
        newest = store.read(store.names()[-1], verify=False)
    if newest is not None:
        check_record(newest, config, main.vocabulary)


def _warn_of_micro_batches(path: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Warn if updates are divided into other micro-batches than at the last start, on which random choices depend.

    Args:
        path: run directory.
        before: settings of the last start.
        now: settings of this one.
    """
    changes = [
        f"{key} was {before.get(key, 'unset')} and is {now[key]}"
        for key in sorted(now)
        if key.startswith("batch.") and before.get(key) != now[key]
    ]
    with suppress(OSError, ValueError, KeyError, TypeError):  # of an older version, or damaged
        ranks = int(parse_json(read_regular(path / ENVIRONMENT_FILE))["ranks"])
        sizes = [(ranks, before), (int(environment()["ranks"]), now)]
        old, new = (count // int(str(settings["engine.tensor_parallel"])) for count, settings in sizes)
        if old != new:
            changes.append(f"there were {old} data-parallel ranks and are {new}")
    if changes:
        logger.warning(
            "%s: the random choices of layer.name=%s for each micro-batch are others from now on, because %s",
            path,
            now["layer.name"],
            " and ".join(changes),
        )


def _check_own(path: Path) -> None:
    """Check that a new run replaces only files of a run that has no checkpoint yet.

    Raises:
        ConfigError: if there are other files of these names.
    """
    with suppress(DamagedRecordError, ValidationError):
        RunManifest.read(path)
        return
    if all((path / name).is_file() for name in (CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE)):
        return  # of an older version
    names = (CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE, ORIGIN_FILE, MANIFEST_FILE, METRICS_FILE, *VOCABULARY_FILES)
    if found := [name for name in names if (path / name).exists()]:
        raise ConfigError(
            f"--run must be a new directory or one made by `train`, but {path} has {' and '.join(found[:3])} that "
            "`train` did not write; give another directory"
        )


LOCK_FILE = ".lock"
"""File that names the process that trains in a run directory."""


@contextmanager
def run_lock(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Lock a run directory against a second training during the block.

    Args:
        path: run directory. It is made if it does not exist, and removed again if nothing is written into it.
        patience_s: time limit in seconds of waiting for another holder. A network file system may release the lock of
            a lost host late.

    Raises:
        ConfigError: if it is a file.
        DataError: if another process holds the lock.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--run must be a directory, but {path} is a file; give another name")
    refusal = (
        f"--run must not be in use, but {{holder}} is training in {path}; wait for it, or stop it (`kill -USR1` to "
        "that process lets all its ranks save and stop)"
    )
    with made(path), exclusive(path / LOCK_FILE, refusal, patience_s) as locked:
        if not locked:
            logger.warning("%s cannot be locked; do not start the same run twice", path)
        yield


_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


def environment() -> dict[str, Any]:
    """Return the environment of this process, as values for JSON."""
    packages = ["torch", "deepspeed", "numpy", "sentencepiece", "sacrebleu", "safetensors", "pydantic"]
    packages += ["sacremoses", "transformers", "tokenizers"]
    versions = {name: _version(name) for name in packages}
    return {
        "deepspeed_nmt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "git": _git(),
        "command": sys.argv,
        "slurm": {name: value for name, value in os.environ.items() if name in _SLURM},
    }


def summary(found: Mapping[str, Any]) -> str:
    """Return a line about an environment, for the log of each start."""
    job, versions = found["slurm"].get("SLURM_JOB_ID"), found["packages"]
    ours = f"deepspeed_nmt {found['deepspeed_nmt']} (git {found['git'] or 'unknown'})"
    return f"{ours}, torch {versions['torch']} on {platform.node()}{f', job {job}' if job else ''}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


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
        content = parse_json(read_regular(file))
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
