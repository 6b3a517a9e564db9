"""Checkpoints: independent of the engine, written atomically, and verified against their hashes when read.

    checkpoints/update-0000100/weights-00001.safetensors   fp32 weights by parameter name
                               moments-00001.safetensors   Adam's moments, "<parameter>.exp_avg" and ".exp_avg_sq"
                               state.json                  progress of training; state-N.json after a rollback
                               run.json                    settings and vocabulary of the run, and its data
                               manifest.json               size and SHA-256 of each file above
                               manifest.json.sha256        SHA-256 of the manifest
    checkpoints/latest, best                               names of such directories, for users; never read

A checkpoint is written under a temporary name, synced to disk, and renamed. A rollback adds a new state to an old
checkpoint and replaces the manifest by one that names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.training import CorpusRecord
from deepspeed_nmt.engine.base import EngineScalars
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.manifest import (
    MANIFEST_FILE,
    DamagedRecordError,
    FileRecord,
    PlainName,
    adopt_record,
    read_record,
    write_record,
)
from deepspeed_nmt.registry import Config, problem_of
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.progress import Progress

RUN_FILE = "run.json"
_UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""Errors of files that cannot be read; torch, which maps them for safetensors, raises a RuntimeError."""


class RunRecord(Config):
    """Description of a run in each of its checkpoints: the run's own files are compared with it, or restored from it.

    Attributes:
        config: all settings, by section.
        data: path of the data directory.
        fingerprint: fingerprint of the data.
        longest_source: tokens of the longest source sentence of the data; 0 in older checkpoints.
        text: form of the data's text; None in older checkpoints.
        corpora: corpora of a mixture; none if there is one corpus.
        vocabulary: files of the vocabulary.
    """

    config: dict[str, Any]
    data: str
    fingerprint: str
    longest_source: int = 0
    text: TextForm | None = None
    corpora: tuple[CorpusRecord, ...] = ()
    vocabulary: dict[PlainName, FileRecord]


class CheckpointManifest(Config):
    """The content of ``manifest.json``.

    Attributes:
        format: version of the format; before 2, the manifest has no hash and the run no record.
        weights: names of the weights in each file.
        moments: names of the moments in each file; empty in an average.
        state: file of the progress.
        run: file of the run's record; None if there is none.
        files: every file of the checkpoint.
    """

    format: Literal[1, 2]
    weights: dict[PlainName, list[str]]
    moments: dict[PlainName, list[str]]
    state: PlainName = "state.json"
    run: PlainName | None = None
    files: dict[PlainName, FileRecord]

    @model_validator(mode="after")
    def _complete(self) -> CheckpointManifest:
        named = {*self.weights, *self.moments, self.state, *([self.run] if self.run else [])}
        if missing := sorted(named - self.files.keys()):
            raise ValueError(f"{missing[0]} has no hash")
        return self

    def write(self, directory: Path) -> None:
        """Write ``manifest.json`` and its hash."""
        write_record(directory / MANIFEST_FILE, self.model_dump_json(indent=1).encode())


class State(Config):
    """The content of ``state.json``: progress, and the part of the engine's state that is not tensors."""

    progress: Progress
    engine: EngineScalars

    model_config = ConfigDict(allow_inf_nan=True)


class Checkpoint:
    """A checkpoint on disk, verified against its manifest.

    Args:
        path: its directory.
        verify: True to verify the hashes of all its files, False to compare only sizes of files with tensors.

    Raises:
        CheckpointError: if it is missing, incomplete, or its content is not what was written.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        try:
            self._manifest, hashed = self._read_manifest()
            for name, record in self._manifest.files.items():
                if problem := record.problem(path / name, verify or name.endswith(".json")):
                    raise CheckpointError(f"{path / name} {problem}: the checkpoint is damaged")
            state = State.model_validate_json((path / self._manifest.state).read_bytes())
            self.progress, self.scalars = state.progress, state.engine
            self._where = {
                "weights": self._locate(self._manifest.weights),
                "moments": self._locate(self._manifest.moments),
            }
        except (ValidationError, DamagedRecordError, *_UNREADABLE) as error:
            raise CheckpointError(f"{path} must be a checkpoint of this program, but {_reason(error)}") from error
        if verify and not hashed:
            self._adopt()

    def _read_manifest(self) -> tuple[CheckpointManifest, bool]:
        content, hashed = read_record(self.path / MANIFEST_FILE)
        manifest = CheckpointManifest.model_validate_json(content)
        if manifest.format > 1 and not hashed:
            raise DamagedRecordError(f"the hash of {MANIFEST_FILE} is missing")
        return manifest, hashed

    def _locate(self, files: Mapping[str, list[str]]) -> dict[str, Path]:
        """Return the file of each tensor, after comparing the names in the manifest with those in the files."""
        for name, tensors in files.items():
            with safe_open(self.path / name, framework="pt") as file:
                if set(file.keys()) != set(tensors):
                    raise DamagedRecordError(f"{MANIFEST_FILE} names other tensors than {name} contains")
        return {tensor: self.path / name for name, tensors in files.items() for tensor in tensors}

    def _adopt(self) -> None:
        """Add the hash of a manifest of an older version, all of whose files are as it records."""
        try:
            adopt_record(self.path / MANIFEST_FILE)
            done = "from now on it is checked"
        except OSError as error:
            done = f"its hash could not be written ({error.strerror or error})"
        logger.warning("%s has no hash of its manifest, because an older version wrote it; %s", self.path, done)

    @property
    def run(self) -> RunRecord | None:
        """Record of the run; None in a checkpoint of an older version.

        Raises:
            CheckpointError: if it cannot be read.
        """
        if self._manifest.run is None:
            return None
        try:
            return RunRecord.model_validate_json((self.path / self._manifest.run).read_bytes())
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{self.path} must record its run, but {_reason(error)}") from error

    def restate(self, progress: Progress) -> None:
        """Replace the recorded progress atomically; weights and moments stay.

        Args:
            progress: to record.

        Raises:
            OSError: if it cannot be written; the checkpoint is then unchanged.
        """
        files = self._manifest.files
        name = f"state-{len(files)}.json"
        record = write_state(self.path / name, progress, self.scalars)
        manifest = self._manifest.model_copy(update={"state": name, "files": {**files, name: record}})
        manifest.write(self.path)
        self._manifest, self.progress = manifest, progress

    @property
    def weights_digest(self) -> str:
        """SHA-256 (hexadecimal) of the records of its weights: equal digests have equal weights."""
        records = [f"{name} {self._manifest.files[name].sha256}\n" for name in sorted(self._manifest.weights)]
        return hashlib.sha256("".join(records).encode()).hexdigest()

    @property
    def resumable(self) -> bool:
        """True if training can be resumed from it; False for an average, which has no moments."""
        return bool(self._where["moments"])

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by parameter name, fp32 on the CPU."""
        return {name: self._tensor("weights", name) for name in self._where["weights"]}

    def weight(self, name: str) -> Tensor:
        """Return the weight of a parameter, fp32 on the CPU."""
        return self._tensor("weights", name)

    def moment(self, name: str, which: str) -> Tensor:
        """Return one of Adam's moments of a parameter, fp32 on the CPU; zero before Adam's first step."""
        if self.scalars.optimizer_step == 0 and not self.resumable:
            return torch.zeros_like(self.weight(name))
        return self._tensor("moments", f"{name}.{which}")

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model.

        Raises:
            CheckpointError: if names or shapes differ, naming the first difference.
        """
        shapes = self._shapes()
        own = dict(model.named_parameters())
        differences = [
            *(f"{name} is missing" for name in sorted(own.keys() - shapes.keys())),
            *(f"{name} is unexpected" for name in sorted(shapes.keys() - own.keys())),
            *(
                f"{name} is {shapes[name]} instead of {tuple(own[name].shape)}"
                for name in own
                if name in shapes and shapes[name] != tuple(own[name].shape)
            ),
        ]
        if differences:
            raise CheckpointError(
                f"{self.path} must hold the weights of this model, but {differences[0]} "
                f"({len(differences)} differences); open it with its own run's config.yaml"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.weight(name))  # one at a time: all at once would double the host memory

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights by parameter name."""
        return {
            name: tuple(self._read("weights", name, lambda file, name: file.get_slice(name).get_shape()))
            for name in self._where["weights"]
        }

    def _tensor(self, kind: str, name: str) -> Tensor:
        tensor: Tensor = self._read(kind, name, lambda file, name: file.get_tensor(name))
        return tensor

    def _read(self, kind: str, name: str, of: Callable[[Any, str], Any]) -> Any:
        """Return what ``of`` reads of a tensor from an open file."""
        if name not in self._where[kind]:
            raise CheckpointError(f"{self.path} must hold {name}, but does not: it belongs to another model")
        try:
            with safe_open(self._where[kind][name], framework="pt") as file:
                return of(file, name)
        except _UNREADABLE as error:
            if not self.path.exists():
                raise CheckpointError(
                    f"{self.path} must stay while it is read, but was removed, as `train` does with old ones; start "
                    "again"
                ) from error
            raise CheckpointError(f"{self.path} must be readable, but is not ({error}); start again") from error


def write_state(file: Path, progress: Progress, scalars: EngineScalars) -> FileRecord:
    """Write a state file, and return its entry in the manifest."""
    content = {"progress": asdict(progress), "engine": asdict(scalars)}
    atomic_write_text(file, json.dumps(content, indent=1))
    return FileRecord.of(file)


def _reason(error: Exception) -> str:
    """Return a clause about an error."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"its content is wrong: {problem_of(first, '.'.join(map(str, first['loc']))).strip()}"
    return str(error) if isinstance(error, DamagedRecordError) else f"it cannot be read ({error})"
