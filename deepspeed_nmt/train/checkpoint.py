"""Checkpoints: independent of the engine, written atomically, and verified against their hashes when read.

    checkpoints/update-0000100/weights-00001.safetensors   fp32 weights by parameter name
                               moments-00001.safetensors   Adam's moments, "<parameter>.exp_avg" and ".exp_avg_sq"
                               state.json                  progress of training; state-N.json after a rollback
                               manifest.json               size and SHA-256 of each file above
    checkpoints/latest, best                               names of such directories

A checkpoint is written under a temporary name, synced to disk, renamed, and only then named by ``latest``. A rollback
adds a new state to an old checkpoint and replaces the manifest by one that names it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from deepspeed_nmt.engine.base import EngineScalars
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.files import atomic_write_text, sha256_of
from deepspeed_nmt.train.progress import Progress


class Checkpoint:
    """A checkpoint on disk, verified against its manifest.

    Args:
        path: its directory.
        verify: True to verify the hashes of its files, False to compare their sizes only.

    Raises:
        CheckpointError: if it is missing, incomplete, or its content is not what was written.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self._manifest = self._json("manifest.json")
        try:
            self._read(self._manifest, verify)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} must be a checkpoint of this program, but its JSON is not ({error!r})"
            ) from error

    def _read(self, manifest: dict[str, Any], verify: bool) -> None:
        for name, record in manifest["files"].items():
            file = self.path / name
            if not file.is_file():
                raise CheckpointError(f"{file} must exist, but does not: the checkpoint is incomplete")
            if file.stat().st_size != record["bytes"] or (verify and sha256_of(file) != record["sha256"]):
                raise CheckpointError(f"{file} is not what was written there: the checkpoint is damaged")
        state = self._json(manifest.get("state", "state.json"))
        self.progress = Progress(**state["progress"])
        self.scalars = EngineScalars(**state["engine"])
        self._where = {
            kind: {tensor: name for name, tensors in manifest[kind].items() for tensor in tensors}
            for kind in ("weights", "moments")
        }

    def restate(self, progress: Progress) -> None:
        """Replace the recorded progress atomically; weights and moments stay.

        Args:
            progress: to record.

        Raises:
            OSError: if it cannot be written; the checkpoint is then unchanged.
        """
        files = self._manifest["files"]
        name = f"state-{len(files)}.json"
        record = write_state(self.path / name, progress, self.scalars)
        self._manifest = {**self._manifest, "state": name, "files": {**files, name: record}}
        atomic_write_text(self.path / "manifest.json", json.dumps(self._manifest, indent=1))
        self.progress = progress

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
        weights = self.weights()
        own = dict(model.named_parameters())
        differences = [
            *(f"{name} is missing" for name in sorted(own.keys() - weights.keys())),
            *(f"{name} is unexpected" for name in sorted(weights.keys() - own.keys())),
            *(
                f"{name} is {tuple(weights[name].shape)} instead of {tuple(own[name].shape)}"
                for name in own
                if name in weights and weights[name].shape != own[name].shape
            ),
        ]
        if differences:
            raise CheckpointError(
                f"{self.path} must hold the weights of this model, but {differences[0]} "
                f"({len(differences)} differences); open it with its own run's config.yaml"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def _tensor(self, kind: str, name: str) -> Tensor:
        if name not in self._where[kind]:
            raise CheckpointError(f"{self.path} must hold {name}, but does not: it belongs to another model")
        with safe_open(self.path / self._where[kind][name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} must be readable, but is not ({error})") from error
        return content


def write_state(file: Path, progress: Progress, scalars: EngineScalars) -> dict[str, Any]:
    """Write a state file, and return its entry in the manifest."""
    content = {"progress": asdict(progress), "engine": asdict(scalars)}
    atomic_write_text(file, json.dumps(content, indent=1))
    return file_record(file)


def file_record(file: Path) -> dict[str, Any]:
    """Return a file's entry in the manifest: its size and hash."""
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
