"""The checkpoints of a run: written atomically, the newest and the best kept, rolled back to, averaged.

:mod:`deepspeed_nmt.train.checkpoint` describes the files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.directories import remove_directory, restore_directories, staged
from deepspeed_nmt.engine.base import EngineScalars, ParameterState
from deepspeed_nmt.engine.checkpoint_size import SHARD_BYTES
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.errors import option as option_named
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.train.checkpoint import RUN_FILE, Checkpoint, CheckpointManifest, RunRecord, write_state
from deepspeed_nmt.train.progress import Progress

_NAME = re.compile(r"update-(\d{7,})")
_AVERAGE = "average"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: where they are.
        keep_last: number of newest checkpoints to keep.
        keep_best: True to keep the best one besides.
        record: record of the run, for new checkpoints; None where none are written.
    """

    def __init__(
        self, directory: Path, keep_last: int = 5, keep_best: bool = True, record: RunRecord | None = None
    ) -> None:
        self.directory = directory
        self._record = record
        self._keep_last = keep_last
        self._keep_best = keep_best

    def names(self) -> list[str]:
        """Return the names of the run's checkpoints, oldest first; all were written in full, some may be damaged.

        Raises:
            CheckpointError: if their directory is a link to a place that is missing, such as a disk that is not
                mounted: the run would begin again.
        """
        if self.directory.is_symlink() and not self.directory.exists():
            raise CheckpointError(
                f"{self.directory} must lead to the checkpoints of the run, but it is a link to "
                f"{self.directory.readlink()}, which does not exist; bring that back, or remove the link"
            )
        found = (_NAME.fullmatch(path.name) for path in self.directory.glob("update-*") if path.is_dir())
        return [match[0] for match in sorted(filter(None, found), key=lambda match: int(match[1]))]

    def restore(self) -> None:
        """Restore checkpoints that a killed process had moved away to replace them."""
        restore_directories(self.directory, _NAME.pattern, _is_whole, clear=False)

    @staticmethod
    def update_of(name: str) -> int:
        """Return the update of a checkpoint's name."""
        return _update(name)

    def best(self, until: str | None = None) -> str | None:
        """Return the name of the best checkpoint, as the newest checkpoints record it; None if there is none.

        A checkpoint that is the best so far may be missing because it could not be written. Then it is the best one
        that a checkpoint before it records.

        Args:
            until: name of the newest checkpoint that counts; None for any.
        """
        names = [name for name in self.names() if until is None or _update(name) <= _update(until)]
        for progress in filter(None, map(self.progress, reversed(names))):
            if progress.best_score is not None and _name(progress.best_update) in names:
                return _name(progress.best_update)
        return None

    def read(self, name: str, verify: bool = True) -> Checkpoint:
        """Read one of the run's checkpoints.

        Args:
            name: its name, one of :meth:`names`.
            verify: True to verify the hashes of its files.

        Raises:
            CheckpointError: if it is damaged.
        """
        checkpoint = Checkpoint(self.directory / name, verify)
        if _name(checkpoint.progress.update) != name:
            raise CheckpointError(
                f"{checkpoint.path} must be of the update in its name, but is of update "
                f"{checkpoint.progress.update}: it was renamed or copied"
            )
        return checkpoint

    def record(self) -> RunRecord | None:
        """Return the record of the run in the newest checkpoint that has one."""
        for name in reversed(self.names()):
            try:
                if (record := self.read(name, verify=False).run) is not None:
                    return record
            except CheckpointError:
                continue
        return None

    def newest(self, until: int | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint, skipping damaged ones with a warning; None if the run has none.

        Args:
            until: upper bound on its update; None for any.

        Raises:
            CheckpointError: if all checkpoints are damaged.
        """
        broken = []
        for name in reversed(self.names()):
            if until is not None and _update(name) > until:
                continue
            try:
                checkpoint = self.read(name)
            except CheckpointError as error:
                broken.append(name)
                logger.warning("%s; trying the one before it", error)
                continue
            if broken:
                logger.warning("using %s, because %s is damaged", name, " and ".join(broken))
            return checkpoint
        if broken:
            raise CheckpointError(
                f"all checkpoints in {self.directory} are damaged ({', '.join(broken)}); restore one from a copy, or "
                "start a new run in another directory"
            )
        return None

    def open(self, which: str, option: str = "", verify: bool = True) -> Checkpoint:
        """Open the checkpoint called ``best``, ``last``, ``average``, or found at a path.

        Args:
            which: its name or path.
            option: option by which the user named it, for messages; "" for that of most commands and of the API.
            verify: True to verify the hashes of its files; ``last`` is always verified.

        Raises:
            CheckpointError: if there is none, or it is damaged.
        """
        option = option or option_named("checkpoint")
        if which == "last":
            newest = self.newest()
            if newest is None:
                raise self._empty()
            return newest
        if which == "best":
            return self._best(option, verify)
        if which == "average":
            if not (self.directory / "average").is_dir():
                raise CheckpointError(
                    f"{self.directory} has no average; make one with `deepspeed-nmt average --run ... --last N`"
                )
            average = Checkpoint(self.directory / "average", verify)
            if average.resumable:
                raise CheckpointError(f"{average.path} must be an average, but is a checkpoint of training")
            return average
        for path in (self.directory / which, Path(which)):
            if path.is_dir():
                return Checkpoint(path, verify)
        raise CheckpointError(
            f"{option} must be best, last, average or the path of a checkpoint, but there is no directory '{which}', "
            f"neither here nor in {self.directory}"
        )

    def _best(self, option: str, verify: bool) -> Checkpoint:
        if not self.names():
            raise self._empty()
        try:
            self.read(self.names()[-1], verify=False)  # it records which one is the best
            while (best := self.best()) is not None:
                try:
                    return self.read(best, verify)
                except CheckpointError:
                    if (self.directory / best).exists():
                        raise  # otherwise a training of the run has removed it, after it has written a better one
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; use {option} last, the newest that is good, or start `train` again, which resumes from it"
            ) from error
        raise CheckpointError(
            f"{self.directory} has no best checkpoint: the run was not validated yet; use {option} last"
        )

    def _empty(self) -> CheckpointError:
        return CheckpointError(f"{self.directory} must hold a checkpoint, but is empty; train first")

    def save(self, progress: Progress, scalars: EngineScalars, states: Iterable[ParameterState]) -> None:
        """Write a checkpoint, then remove those that are no longer kept.

        Args:
            progress: to record.
            scalars: to record.
            states: of all parameters.

        Raises:
            OSError: if it cannot be written; older checkpoints are unchanged. ``states`` is exhausted even then,
                because other ranks take part in it.
        """
        name = _name(progress.update)
        states = iter(states)
        try:
            if (same := self._same(name, progress, scalars)) is None:
                self._write(name, progress, scalars, states, self._record)
            elif same.progress != progress:
                same.restate(progress)
        finally:
            for _ in states:
                pass
        self._prune(name, progress.awaited)
        self._write_pointers(name)

    def _same(self, name: str, progress: Progress, scalars: EngineScalars) -> Checkpoint | None:
        """Return the good checkpoint that has this state of training, but perhaps another choice of the best one.

        A checkpoint of the same update may be damaged, or stem from before a rollback.
        """
        try:
            found = self.read(name)
        except CheckpointError:
            return None
        same = found.scalars == scalars and found.progress.with_choice_of(progress) == progress
        return found if same else None

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
            if _update(name) > progress.update:
                remove_directory(self.directory / name)
        self._write_pointers(checkpoint.path.name)

    def restate(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Record another choice of the best checkpoint in the newest one.

        Args:
            checkpoint: the newest one.
            progress: to record.

        Raises:
            OSError: if it cannot be written.
        """
        checkpoint.restate(progress)
        self._write_pointers(checkpoint.path.name)

    def save_average(self, checkpoints: Sequence[Checkpoint]) -> Path:
        """Average the weights of checkpoints, and write the result as ``average``."""
        total: dict[str, Tensor] = {}
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.progress.update)
        for checkpoint in checkpoints:
            for name, weight in checkpoint.weights().items():
                total[name] = total[name] + weight.double() if name in total else weight.double()
        states = (ParameterState(name, (weight / len(checkpoints)).float()) for name, weight in total.items())
        self._write(_AVERAGE, newest.progress, EngineScalars(), states, newest.run)
        return self.directory / _AVERAGE

    def _write(
        self,
        name: str,
        progress: Progress,
        scalars: EngineScalars,
        states: Iterator[ParameterState],
        record: RunRecord | None,
    ) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # One process at a time trains here, and one averages: what else is hidden is of killed processes.
        names = name if name == _AVERAGE else _NAME.pattern
        restore_directories(self.directory, names, _is_whole, clear=True)
        try:
            with staged(self.directory / name) as temporary:
                weights, moments = _ShardWriter(temporary, "weights"), _ShardWriter(temporary, "moments")
                for state in states:
                    weights.add(state.name, state.weight)
                    for which, moment in state.moments.items():
                        moments.add(f"{state.name}.{which}", moment)
                weight_files, moment_files = weights.close(), moments.close()
                write_state(temporary / "state.json", progress, scalars)
                if record is not None:
                    atomic_write_text(temporary / RUN_FILE, record.model_dump_json(indent=1))
                CheckpointManifest(
                    format=2,
                    weights=weight_files,
                    moments=moment_files,
                    run=None if record is None else RUN_FILE,
                    files={file.name: FileRecord.of(file) for file in sorted(temporary.iterdir())},
                ).write(temporary)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error

    def _prune(self, saved: str, awaited: Iterable[int]) -> None:
        """Remove old checkpoints.

        Checkpoints later than the one just saved are damaged and do not count. The newest one from before a streak of
        skipped updates is kept, because the run may be rolled back to it.

        Args:
            saved: name of the checkpoint just saved.
            awaited: updates whose checkpoints may turn out to be the best.
        """
        names = [name for name in self.names() if _update(name) <= _update(saved)]
        best = self.best(saved) if self._keep_best else None
        kept = {best or "", next(filter(self._before_skips, reversed(names)), ""), *map(_name, awaited)}
        for name in names[: -self._keep_last]:
            if name not in kept:
                remove_directory(self.directory / name)

    def progress(self, name: str) -> Progress | None:
        """Return the progress that a checkpoint records, without reading its tensors; None if it is damaged."""
        try:
            return self.read(name, verify=False).progress
        except CheckpointError:
            return None

    def _before_skips(self, name: str) -> bool:
        """Return True if a checkpoint is outside a streak of skipped updates."""
        progress = self.progress(name)
        return progress is not None and progress.skipped == 0

    def _write_pointers(self, latest: str) -> None:
        """Write ``latest`` and ``best`` for users and their scripts; this program reads neither of them."""
        for pointer, name in (("latest", latest), ("best", self.best(latest))):
            try:
                if name is None:
                    (self.directory / pointer).unlink(missing_ok=True)
                else:
                    atomic_write_text(self.directory / pointer, name + "\n")
            except OSError as error:
                logger.warning("%s could not be written (%s)", self.directory / pointer, error.strerror or error)


def _name(update: int) -> str:
    return f"update-{update:07d}"


def _update(name: str) -> int:
    return int(name.removeprefix("update-"))


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint(path, verify=False)
    except CheckpointError:
        return False
    return True


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
        if self._bytes >= SHARD_BYTES:
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
