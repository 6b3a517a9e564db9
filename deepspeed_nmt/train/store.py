"""The checkpoints of a run: written atomically, the newest and the best kept, rolled back to, averaged.

:mod:`deepspeed_nmt.train.checkpoint` describes the files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.engine.base import EngineScalars, ParameterState
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.files import atomic_write_text, sync_directory
from deepspeed_nmt.train.checkpoint import Checkpoint, file_record, write_state
from deepspeed_nmt.train.progress import Progress

_SHARD_BYTES = 2 * 1024**3
_FORMAT = 1
_PREFIX = "update-"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: where they are.
        keep_last: number of newest checkpoints to keep.
        keep_best: True to keep the best one besides.
    """

    def __init__(self, directory: Path, keep_last: int = 5, keep_best: bool = True) -> None:
        self.directory = directory
        self._keep_last = keep_last
        self._keep_best = keep_best

    def names(self) -> list[str]:
        """Return the names of the run's checkpoints, oldest first; all were written in full, some may be damaged."""
        return sorted(p.name for p in self.directory.glob(f"{_PREFIX}*") if p.is_dir())

    def pointer(self, name: str) -> Path | None:
        """Return the checkpoint that ``latest`` or ``best`` names; None if there is none."""
        file = self.directory / name
        if not file.is_file():
            return None
        name = Path(file.read_text(encoding="utf-8").strip()).name
        return self.directory / name if name and (self.directory / name).is_dir() else None

    def newest(self, until: int | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint, skipping damaged ones with a warning; None if the run has none.

        Args:
            until: upper bound on its update; None for any.

        Raises:
            CheckpointError: if all checkpoints are damaged.
        """
        broken = []
        for name in reversed(self.names()):
            if until is not None and name > _name(until):
                continue
            try:
                checkpoint = Checkpoint(self.directory / name)
            except CheckpointError as error:
                broken.append(name)
                logger.warning("%s; trying the one before it", error)
                continue
            if broken:
                logger.warning("resuming from %s, because %s is damaged", name, " and ".join(broken))
            return checkpoint
        if broken:
            raise CheckpointError(
                f"all checkpoints in {self.directory} are damaged ({', '.join(broken)}); restore one from a copy, or "
                "start a new run in another directory"
            )
        return None

    def open(self, which: str, option: str = "--checkpoint") -> Checkpoint:
        """Open the checkpoint called ``best``, ``last``, ``average``, or found at a path.

        Args:
            which: its name or path.
            option: option by which the user named it, for messages.

        Raises:
            CheckpointError: if there is none, or it is damaged.
        """
        if which == "last":
            newest = self.newest()
            if newest is None:
                raise self._empty()
            return newest
        if which == "best":
            return self._best(option)
        if which == "average":
            if not (self.directory / "average").is_dir():
                raise CheckpointError(
                    f"{self.directory} has no average; make one with `deepspeed-nmt average --run ... --last N`"
                )
            return Checkpoint(self.directory / "average")
        for path in (self.directory / which, Path(which)):
            if path.is_dir():
                return Checkpoint(path)
        raise CheckpointError(
            f"{option} must be best, last, average or the path of a checkpoint, but there is no directory '{which}', "
            f"neither here nor in {self.directory}"
        )

    def _best(self, option: str) -> Checkpoint:
        if not self.names():
            raise self._empty()
        best = self.pointer("best")
        if best is None:
            raise CheckpointError(
                f"{self.directory} has no best checkpoint: the run was not validated yet; use {option} last"
            )
        try:
            return Checkpoint(best)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; use {option} last, the newest that is good, or start `train` again, which resumes from it"
            ) from error

    def _empty(self) -> CheckpointError:
        return CheckpointError(f"{self.directory} must hold a checkpoint, but is empty; train first")

    def save(self, progress: Progress, scalars: EngineScalars, states: Iterable[ParameterState], best: bool) -> None:
        """Write a checkpoint, make it the latest (and the best), then remove those that are no longer kept.

        Args:
            progress: to record.
            scalars: to record.
            states: of all parameters.
            best: True if it is the best so far.

        Raises:
            OSError: if it cannot be written; older checkpoints are unchanged. ``states`` is exhausted even then,
                because other ranks take part in it.
        """
        name = _name(progress.update)
        states = iter(states)
        try:
            if not self._holds(name, progress, scalars):
                self._write(name, progress, scalars, states)
            atomic_write_text(self.directory / "latest", name + "\n")
            if best:
                atomic_write_text(self.directory / "best", name + "\n")
        finally:
            for _ in states:
                pass
        self._prune(name)

    def _holds(self, name: str, progress: Progress, scalars: EngineScalars) -> bool:
        """Return True if this very checkpoint exists and is good.

        A checkpoint of the same update may be damaged, or stem from before a rollback.
        """
        if not (self.directory / name).is_dir():
            return False
        try:
            found = Checkpoint(self.directory / name)
        except CheckpointError:
            return False
        return found.progress == progress and found.scalars == scalars

    def rewind(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Make an older checkpoint the newest one, with other progress; later checkpoints are removed.

        Args:
            checkpoint: to continue from.
            progress: to record in it.

        Raises:
            OSError: if it cannot be written.
        """
        checkpoint.restate(progress)
        for name in self.names():
            if name > checkpoint.path.name:
                shutil.rmtree(self.directory / name, ignore_errors=True)
        atomic_write_text(self.directory / "latest", checkpoint.path.name + "\n")
        if self.pointer("best") is None:
            best = _name(progress.best_update)
            if (self.directory / best).is_dir():
                atomic_write_text(self.directory / "best", best + "\n")
            else:
                (self.directory / "best").unlink(missing_ok=True)

    def save_average(self, paths: list[Path]) -> Path:
        """Average the weights of checkpoints, and write the result as ``average``."""
        total: dict[str, Tensor] = {}
        newest = Progress()
        for path in paths:
            checkpoint = Checkpoint(path)
            newest = max(newest, checkpoint.progress, key=lambda progress: progress.update)
            for name, weight in checkpoint.weights().items():
                total[name] = total[name] + weight.double() if name in total else weight.double()
        states = (ParameterState(name, (weight / len(paths)).float()) for name, weight in total.items())
        self._write("average", newest, EngineScalars(), states)
        return self.directory / "average"

    def _write(self, name: str, progress: Progress, scalars: EngineScalars, states: Iterator[ParameterState]) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = self.directory / f".{name}.tmp"
        # One process at a time trains here, and one averages: what another left under such a name, it was killed.
        for dead in self.directory.glob(f".{_PREFIX}*.tmp" if name.startswith(_PREFIX) else temporary.name):
            shutil.rmtree(dead, ignore_errors=True)
        temporary.mkdir()
        try:
            weights, moments = _ShardWriter(temporary, "weights"), _ShardWriter(temporary, "moments")
            for state in states:
                weights.add(state.name, state.weight)
                for which, moment in state.moments.items():
                    moments.add(f"{state.name}.{which}", moment)
            manifest: dict[str, Any] = {"format": _FORMAT, "weights": weights.close(), "moments": moments.close()}
            write_state(temporary / "state.json", progress, scalars)
            manifest["files"] = {file.name: file_record(file) for file in sorted(temporary.iterdir())}
            atomic_write_text(temporary / "manifest.json", json.dumps(manifest, indent=1))
            final = self.directory / name
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            sync_directory(self.directory)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prune(self, saved: str) -> None:
        """Remove old checkpoints.

        Checkpoints later than the one just saved are damaged and do not count. The newest one from before a streak of
        skipped updates is kept, because the run may be rolled back to it.

        Args:
            saved: name of the checkpoint just saved.
        """
        names = [name for name in self.names() if name <= saved]
        best = self.pointer("best") if self._keep_best else None
        kept = {best.name if best is not None else "", next(filter(self._before_skips, reversed(names)), "")}
        for name in names[: -self._keep_last]:
            if name not in kept:
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def _before_skips(self, name: str) -> bool:
        """Return True if a checkpoint is outside a streak of skipped updates; its tensors are not read."""
        try:
            return Checkpoint(self.directory / name, verify=False).progress.skipped == 0
        except CheckpointError:
            return False


def _name(update: int) -> str:
    return f"{_PREFIX}{update:07d}"


class _ShardWriter:
    """Writer of tensors into files of bounded size."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory = directory
        self._kind = kind
        self._files: dict[str, list[str]] = {}
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes >= _SHARD_BYTES:
            self._flush()

    def close(self) -> dict[str, list[str]]:
        """Write what is pending, and return the names of the tensors in each file."""
        self._flush()
        return self._files

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"{self._kind}-{len(self._files) + 1:05d}.safetensors"
        save_file(self._pending, self._directory / name)
        with (self._directory / name).open("rb+") as file:
            os.fsync(file.fileno())
        self._files[name] = list(self._pending)
        self._pending, self._bytes = {}, 0
