"""A run on disk: what it was told, what it learned, and how to open it again.

config.yaml  data.json  environment.json  origin.json  vocabulary.*
metrics.jsonl  tensorboard/  checkpoints/
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt import __version__
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.kernels import attention, dispatch
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS
from deepspeed_nmt.methods.multi_softmax import MultiSoftmaxConfig
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore

CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE, CHECKPOINTS = "config.yaml", "data.json", "environment.json", "checkpoints"
LOGS = "logs"
"""What each rank said, over all restarts."""
ORIGIN_FILE = "origin.json"
"""Where the run's first weights came from, if from another run."""

# What a run cannot change on the way and still be the same run.
_FIXED = ("model.", "layer.", "objective.", "optimizer.name.", "training.seed.", "batch.update_tokens.")


def build_model(config: RunConfig, vocabulary: Vocabulary) -> TranslationModel:
    """The model of a run; its weights follow the run's seed."""
    torch.manual_seed(config.training.seed)
    model, layer = MODELS[config.model.model_dump()["name"]], LAYERS[config.layer.model_dump()["name"]]
    return model.build(config.model, vocabulary, partial(layer.build, config.layer))


def use_kernels(config: RunConfig) -> None:
    """Have operations carried out in this process as a run's configuration says.

    Raises:
        ConfigError: if ``engine.kernels`` names what there is not.
    """
    dispatch.use(config.engine.kernels)
    attention.use(config.engine.attention)


def build_objective(config: RunConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a run."""
    (likelihood,) = (
        LIKELIHOODS[name].build(part, vocabulary) for name, part in config.objective.items() if name in LIKELIHOODS
    )
    terms = [
        REGULARIZERS[name].build(part, vocabulary) for name, part in config.objective.items() if name in REGULARIZERS
    ]
    return Objective(likelihood, terms)


def load_weights(model: TranslationModel, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        CheckpointError: if names or shapes differ, naming the first difference.
    """
    weights = checkpoint.weights()
    own = dict(model.named_parameters())
    missing, extra = sorted(set(own) - set(weights)), sorted(set(weights) - set(own))
    wrong = [
        f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    differences = [f"{name} is missing" for name in missing] + [f"{name} is too much" for name in extra] + wrong
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} must hold the weights of this model, but {differences[0]} "
            f"({len(differences)} differences); open it with its own run's config.yaml"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


@dataclass(frozen=True)
class Run:
    """A run directory that exists."""

    path: Path
    config: RunConfig
    tokenizer: Tokenizer

    @classmethod
    def open(cls, path: Path, option: str = "--run") -> Run:
        """Open the directory of a run for reading.

        Args:
            option: by which the user named it, for messages.

        Raises:
            ConfigError: if it is not one.
        """
        if not (path / CONFIG_FILE).is_file():
            what = "has no config.yaml" if path.is_dir() else "does not exist"
            raise ConfigError(f"{option} must be a directory made by `train`, but {path} {what}")
        return cls(path, load_config(file=path / CONFIG_FILE), Tokenizer.from_directory(path))

    @property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints."""
        training = self.config.training
        return CheckpointStore(self.path / CHECKPOINTS, training.keep_last, training.keep_best)

    def model(self, which: str) -> TranslationModel:
        """The model with the weights of a checkpoint (best, last, average, or a path), for decoding."""
        checkpoint = self.checkpoints.open(which)
        model = build_model(self.config, self.tokenizer.vocabulary)
        load_weights(model, checkpoint)
        logger.info("%s: update %d", checkpoint.path, checkpoint.progress.update)
        return model.eval()

    def trained_at(self, exit: str, stages: tuple[int, int]) -> bool:
        """Whether training looked at an exit of the run's model, which has so many stages. What a grown run calls
        ``deep`` and ``shallow`` was trained, one after the other.
        """
        encoder, both, decoder = exit.partition("-")
        if not both:
            return True
        many = self.config.objective.get("multi_softmax")
        if isinstance(many, MultiSoftmaxConfig):
            return many.trains(int(encoder), int(decoder), stages)
        return (int(encoder), int(decoder)) == stages


def has_begun(path: Path) -> bool:
    """Whether a run has learned anything. Until then, a start that failed or was thought better of binds nobody."""
    return (path / CONFIG_FILE).is_file() and bool(CheckpointStore(path / CHECKPOINTS).names())


def begin(path: Path, config: RunConfig, data: DataDirectory) -> None:
    """Write down what a run is, or check that it is still the same.

    Raises:
        ConfigError: if a setting differs that cannot change on the way; all such are listed.
        DataError: if the data is not what the run began with.
    """
    if not has_begun(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / ORIGIN_FILE).unlink(missing_ok=True)
        data.tokenizer().save(path)
        atomic_write_text(path / DATA_FILE, json.dumps({"path": str(data.path), "fingerprint": data.fingerprint}))
        atomic_write_text(path / CONFIG_FILE, config.to_yaml())
    else:
        _check_same(path, config, data)
        atomic_write_text(path / CONFIG_FILE, config.to_yaml())
    atomic_write_text(path / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))


def _check_same(path: Path, config: RunConfig, data: DataDirectory) -> None:
    recorded = read_record(path / DATA_FILE, ("path", "fingerprint"))
    if recorded["fingerprint"] != data.fingerprint:
        raise DataError(
            f"{data.path} must hold the data that {path} began with (from {recorded['path']}), but it has changed; "
            "restore it, or start a new run with another --run directory"
        )
    before = _flat(load_config(file=path / CONFIG_FILE).model_dump(mode="json"))
    now = _flat(config.model_dump(mode="json"))
    problems = [
        f"{key} must stay {before.get(key, 'unset')} while {path} goes on, but is {now.get(key, 'unset')}; "
        "start a new run instead"
        for key in sorted(before.keys() | now.keys())
        if f"{key}.".startswith(_FIXED) and before.get(key) != now.get(key)
    ]
    if problems:
        raise ConfigError(problems)


def read_record(file: Path, keys: Iterable[str]) -> dict[str, Any]:
    """One of a run's JSON files.

    Raises:
        DataError: if it is missing, cannot be read, or lacks a key.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {**content, **{key: content[key] for key in keys}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "is not" if file.is_file() else "is missing"
        raise DataError(
            f"{file} must be what `train` wrote when the run began, but {what}; restore it from a copy, or start a "
            f"new run with another --run directory (--init-from {file.parent} takes over the weights)"
        ) from error


def _flat(content: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested settings as section.key: value."""
    flat: dict[str, object] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class RunLock:
    """Keeps two trainings from writing to one run directory. Freed when the process ends, however it does.

    Args:
        path: the run directory; made if need be.
        patience_s: how long to wait for another process that holds it: a lost host's lock lives on for a while on
            network file systems.

    Raises:
        ConfigError: if another process holds it.
    """

    def __init__(self, path: Path, patience_s: float = 0.0) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--run must be a directory, but {path} is a file; give another name")
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / ".lock").open("a+", encoding="utf-8")
        try:
            self._lock(path, patience_s)
        except BlockingIOError as error:
            holder = self._holder()
            self._file.close()
            raise ConfigError(
                f"--run must not be in use, but {holder} is training in {path}; wait for it, or stop it (`kill "
                "-USR1` to that process lets all its ranks save and stop)"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s); do not start the same run twice", path, error.strerror)
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}")
        self._file.flush()

    def release(self) -> None:
        """Let others train here."""
        self._file.close()

    def _lock(self, path: Path, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    raise
                logger.info("%s is still locked by %s; waiting, %.0f s at most", path, self._holder(), left)
                time.sleep(min(left, 10.0))

    def _holder(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "another process"


_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_RESTART_COUNT")


def environment() -> dict[str, Any]:
    """What a run ran on: versions, devices, git state, command."""
    packages = ["torch", "deepspeed", "numpy", "sentencepiece", "sacrebleu", "safetensors", "pydantic"]
    packages += ["transformers", "tokenizers"]
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
    """What the log says of an environment at each start."""
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
