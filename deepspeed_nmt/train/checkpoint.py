"""Checkpoints: independent of the engine, written atomically, and verified against their hashes when read.

docs/directories.md has their files with their contents. A checkpoint is written under a temporary name, synced to
disk, and renamed. A rollback adds a new state to an old checkpoint and replaces the manifest by one that names it.
The newest checkpoints and the best one are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.training import CorpusRecord
from deepspeed_nmt.engine.contract import SHARD_BYTES, EngineScalars, ParameterState
from deepspeed_nmt.errors import CheckpointError, DataError
from deepspeed_nmt.errors import option as option_named
from deepspeed_nmt.files import (
    atomic_write_text,
    exclusive,
    read_regular,
    remove_directory,
    restore_directories,
    staged,
)
from deepspeed_nmt.manifest import (
    MANIFEST_FILE,
    DamagedRecordError,
    FileRecord,
    PlainName,
    read_record,
    write_record,
)
from deepspeed_nmt.registry import Config, problems_of
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm
from deepspeed_nmt.train.progress import Count, LogState, Progress

RUN_FILE = "run.json"
_UNREADABLE = (OSError, SafetensorError, RuntimeError)
"""Errors of files that cannot be read; torch, which maps them for safetensors, raises a RuntimeError."""


class DataDescription(Config):
    """Description of the data of a run, by the run and by its checkpoints.

    Attributes:
        longest_source: tokens of its longest source sentence, without EOS; 0 if it is not known.
        text: form of its text.
        common_text: form of the text of all corpora, without languages in which they differ.
        tags: symbols in front of all its sentences.
        corpora: corpora of a mixture; none if there is one corpus.
    """

    fingerprint: str
    text: TextForm
    common_text: TextForm
    longest_source: int = 0
    tags: Tags = NO_TAGS
    corpora: tuple[CorpusRecord, ...] = ()


class RunRecord(DataDescription):
    """Description of a run in each of its checkpoints, with which the run's own files are compared.

    ``data`` is the path of the data directory.
    """

    config: dict[str, Any]
    data: str
    vocabulary: dict[PlainName, FileRecord]


class CheckpointManifest(Config):
    """The content of ``manifest.json``: names of the tensors in each file, and records of all files.

    ``optimizer`` is empty in an average.
    """

    format: Literal[2] = 2
    weights: dict[PlainName, list[str]]
    optimizer: dict[PlainName, list[str]]
    state: PlainName = "state.json"
    run: PlainName | None = None
    files: dict[PlainName, FileRecord]

    @model_validator(mode="after")
    def _complete(self) -> CheckpointManifest:
        named = {*self.weights, *self.optimizer, self.state, *([self.run] if self.run else [])}
        if missing := sorted(named - self.files.keys()):
            raise ValueError(f"{missing[0]} has no hash")
        return self

    def write(self, directory: Path) -> None:
        """Write it with its hash."""
        write_record(directory / MANIFEST_FILE, self.model_dump_json(indent=1).encode())


class State(Config):
    """The content of ``state.json``: what a run continues from, besides tensors, with the log of each rank."""

    progress: Progress
    engine: EngineScalars
    log: tuple[LogState, ...] = ()

    model_config = ConfigDict(allow_inf_nan=True)

    def write(self, file: Path) -> None:
        """Write a state file; numbers that are not finite are those of Python's JSON."""
        atomic_write_text(file, json.dumps(self.model_dump(), indent=1))


class Checkpoint:
    """A checkpoint in a directory, verified against its manifest.

    With ``verify`` the hashes of all its files are verified, without it only the sizes of files with tensors.

    Raises:
        CheckpointError: if it is missing, incomplete, or its content is not what was written.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        self._open: dict[str, tuple[Path, Any]] | None = None
        try:
            self._manifest = CheckpointManifest.model_validate_json(read_record(path / MANIFEST_FILE))
            for name, record in self._manifest.files.items():
                if problem := record.problem(path / name, verify or name.endswith(".json")):
                    raise CheckpointError(f"{path / name} {problem}: the checkpoint is damaged")
            state = State.model_validate_json(read_regular(path / self._manifest.state))
            self.progress, self.scalars, self.log = state.progress, state.engine, state.log
            self._where = {kind: self._locate(getattr(self._manifest, kind)) for kind in ("weights", "optimizer")}
        except (ValidationError, DamagedRecordError, *_UNREADABLE) as error:
            raise CheckpointError(f"{path} is no checkpoint of this program: {_reason(error)}") from error

    def _locate(self, files: Mapping[str, list[str]]) -> dict[str, Path]:
        """Return the file of each tensor, after comparing the names in the manifest with those in the files."""
        where: dict[str, Path] = {}
        for name, tensors in files.items():
            path = self.path / name
            with safe_open(path, framework="pt") as file:
                if set(file.keys()) != set(tensors):
                    raise DamagedRecordError(f"{MANIFEST_FILE} names other tensors than {name} contains")
            where |= dict.fromkeys(tensors, path)
        return where

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Keep the file that was read last of each kind open: opening one reads the places of all its tensors."""
        self._open = {}
        try:
            yield
        finally:
            self._open = None

    @property
    def run(self) -> RunRecord | None:
        """Record of the run; None if there is none."""
        if self._manifest.run is None:
            return None
        try:
            return RunRecord.model_validate_json(read_regular(self.path / self._manifest.run))
        except (OSError, ValidationError) as error:
            raise CheckpointError(f"{self.path} does not record its run: {_reason(error)}") from error

    def restate(self, progress: Progress) -> None:
        """Replace the recorded progress atomically; weights and optimizer states stay, as all does on an OSError."""
        files = self._manifest.files
        name = f"state-{len(files)}.json"
        State(progress=progress, engine=self.scalars, log=self.log).write(self.path / name)
        record = FileRecord.of(self.path / name)
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
        """True if training can be resumed from it; False for an average, which has no optimizer states."""
        return bool(self._where["optimizer"])

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters."""
        return self._where["weights"].keys()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by parameter name."""
        with self.held_open():
            return {name: self.weight(name) for name in self._where["weights"]}

    def weight(self, name: str) -> Tensor:
        """Return the weight of a parameter, fp32 on the CPU."""
        return self._tensor("weights", name)

    def optimizer_state(self, name: str, which: str) -> Tensor:
        """Return one of the optimizer's states of a parameter, fp32 on the CPU; zero before its first step."""
        if self.scalars.optimizer_step == 0 and not self.resumable:
            return torch.zeros_like(self.weight(name))
        return self._tensor("optimizer", f"{name}.{which}")

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model; raise a CheckpointError if names or shapes differ."""
        own = dict(model.named_parameters())
        with self.held_open():
            shapes = {name: self._shape(name) for name in self.names}
        expected = {name: tuple(parameter.shape) for name, parameter in own.items()}
        differences = [f"{name} is missing" for name in sorted(own.keys() - shapes.keys())]
        differences += [f"{name} is unexpected" for name in sorted(shapes.keys() - own.keys())]
        common = [name for name in own if name in shapes and shapes[name] != expected[name]]
        differences += [f"{name} is {shapes[name]} instead of {expected[name]}" for name in common]
        if differences:
            raise CheckpointError(
                f"{self.path} holds the weights of another model: {differences[0]} ({len(differences)} differences); "
                "open it with its own run's config.yaml"
            )
        with self.held_open(), torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.weight(name))  # one at a time: all at once would double the host memory

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._read("weights", name, lambda file: file.get_slice(name).get_shape()))

    def _tensor(self, kind: str, name: str) -> Tensor:
        tensor: Tensor = self._read(kind, name, lambda file: file.get_tensor(name))
        return tensor

    def _read(self, kind: str, name: str, of: Callable[[Any], Any]) -> Any:
        """Return what ``of`` reads of a tensor from its open file."""
        if (path := self._where[kind].get(name)) is None:
            raise CheckpointError(f"{self.path} has no {name}: it belongs to another model")
        try:
            opened, file = (self._open or {}).get(kind, (None, None))
            if opened != path:
                file = safe_open(path, framework="pt")
            if self._open is not None:
                self._open[kind] = path, file
            return of(file)
        except _UNREADABLE as error:
            if not self.path.exists():
                raise CheckpointError(
                    f"{self.path} was removed while it was read, as `train` does with old ones; start again"
                ) from error
            raise CheckpointError(f"{self.path} cannot be read ({error}); start again") from error


def _reason(error: Exception) -> str:
    """Return a clause about an error."""
    if isinstance(error, ValidationError):
        return f"its content is wrong: {problems_of(error)[0].strip()}"
    return str(error) if isinstance(error, DamagedRecordError) else f"it cannot be read ({error})"


_NAME = re.compile(r"update-(\d{7,})")
_AVERAGE = "average"
_CHOSEN = "chosen.json"
_LOCK_S = 60.0
"""Time limit in seconds for `choose-best`, or a training, to choose and remove checkpoints."""


class Chosen(Config):
    """The content of ``chosen.json``: the best checkpoint by late scores.

    ``by`` describes the measure of ``score``, of which greater is better.
    """

    update: Count
    by: str
    score: float
    loss: float

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="constants")


class CheckpointStore:
    """The checkpoints of one run, of which ``keep_last`` newest ones are kept.

    Args:
        record: record of the run, for new checkpoints; None where none are written.
        awaiting: returns updates whose checkpoints are kept, because a late score may choose them.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 5,
        keep_best: bool = True,
        record: RunRecord | None = None,
        awaiting: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.directory, self._awaiting, self._record = directory, awaiting, record
        self._keep_last, self._keep_best = keep_last, keep_best

    def names(self) -> list[str]:
        """Return the names of the run's checkpoints, oldest first; all were written in full, some may be damaged."""
        if self.directory.is_symlink() and not self.directory.exists():  # otherwise the run would begin again
            raise CheckpointError(
                f"{self.directory} is a link to {self.directory.readlink()}, which does not exist; bring that back, "
                "or remove the link"
            )
        names = (path.name for path in self.directory.glob("update-*") if path.is_dir())
        return sorted(filter(_NAME.fullmatch, names), key=self.update_of)

    def restore(self, *, clear: bool = False) -> None:
        """Restore checkpoints that a killed process had moved away to replace them; ``clear`` what it left of others.

        Only the process that trains here may clear.
        """
        restore_directories(self.directory, _NAME.pattern, _is_whole, clear=clear)

    @staticmethod
    def update_of(name: str) -> int:
        """Return the update of a checkpoint's name."""
        return int(name.removeprefix("update-"))

    def best(self, until: str | None = None) -> str | None:
        """Return the name of the best checkpoint; None if there is none.

        It is the one that `choose-best` has chosen, as long as the same measure chooses, or the one that the newest
        checkpoint records. That may be missing because it could not be written. Then it is the best one that a
        checkpoint before it records. Checkpoints after ``until`` do not count.
        """
        names = self._names_until(until)
        chosen = self.chosen()
        for progress in filter(None, map(self.progress, reversed(names))):
            if chosen is not None and chosen.by == progress.best_by and _name(chosen.update) in names:
                return _name(chosen.update)
            chosen = None
            if progress.best_score is not None and _name(progress.best_update) in names:
                return _name(progress.best_update)
        return None

    def _names_until(self, newest: str | None) -> list[str]:
        return [n for n in self.names() if newest is None or self.update_of(n) <= self.update_of(newest)]

    def chosen(self) -> Chosen | None:
        """Return the best checkpoint by late scores; None if `choose-best` has chosen none."""
        file = self.directory / _CHOSEN
        try:
            return Chosen.model_validate_json(read_regular(file))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            logger.warning("%s is damaged and does not count; run `choose-best` again", file)
            return None

    def choose(self, chosen: Chosen) -> None:
        """Record the best checkpoint by late scores; within :meth:`choosing`."""
        atomic_write_text(self.directory / _CHOSEN, chosen.model_dump_json())
        self._write_pointers(self.names()[-1])

    def forget_choice_after(self, update: int) -> None:
        """Remove a choice among checkpoints that come after ``update`` and that the run will make again."""
        if (chosen := self.chosen()) is not None and chosen.update > update:
            (self.directory / _CHOSEN).unlink(missing_ok=True)

    def choosing(self) -> AbstractContextManager[bool]:
        """Lock the checkpoints while the best one is chosen, or old ones are removed."""
        refusal = f"{self.directory} is locked by {{holder}}, which chooses the best checkpoint; wait for it"
        return exclusive(self.directory / ".choosing.lock", refusal, _LOCK_S)

    def read(self, name: str, verify: bool = True) -> Checkpoint:
        """Read one of the run's checkpoints; raise a CheckpointError if it is damaged."""
        checkpoint = Checkpoint(self.directory / name, verify)
        if _name(checkpoint.progress.update) != name:
            raise CheckpointError(
                f"{checkpoint.path} is of update {checkpoint.progress.update}: it was renamed or copied"
            )
        return checkpoint

    def newest(self, until: int | None = None) -> Checkpoint | None:
        """Return the newest good checkpoint of an update up to ``until``; None if the run has none.

        Damaged ones are skipped with a warning; if all are damaged, a CheckpointError is raised.
        """
        broken = []
        for name in reversed(self._names_until(None if until is None else _name(until))):
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
        """Open the checkpoint called ``best``, ``last`` (always verified), ``average``, or found at a path.

        Args:
            option: option by which the user named it, for messages; "" for that of most commands and of the API.

        Raises:
            CheckpointError: if there is none, or it is damaged.
        """
        option = option or option_named("checkpoint")
        if which in ("last", "best") and not self.names():
            raise CheckpointError(f"no checkpoint in {self.directory}; train first")
        if which == "last" and (newest := self.newest()) is not None:
            return newest
        if which == "best":
            return self._best(option, verify)
        if which == "average":
            if not (self.directory / _AVERAGE).is_dir():
                raise CheckpointError(
                    f"{self.directory} has no average; make one with `deepspeed-nmt average --run ... --last N`"
                )
            average = Checkpoint(self.directory / _AVERAGE, verify)
            if average.resumable:
                raise CheckpointError(f"{average.path} is a checkpoint of training, and no average")
            return average
        for path in (self.directory / which, Path(which)):
            if path.is_dir():
                return Checkpoint(path, verify)
        raise CheckpointError(
            f"{option} is {which}, and there is no such directory here or in {self.directory}; give best, last, "
            "average or the path of a checkpoint"
        )

    def _best(self, option: str, verify: bool) -> Checkpoint:
        try:
            progress = self.read(self.names()[-1], verify=False).progress  # it records which one is the best
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
            if progress.best_score is None
            else f"{self.directory} has no best checkpoint: that of update {progress.best_update} was not kept "
            f"(training.keep_best); use {option} last"
        )

    def save(
        self,
        progress: Progress,
        scalars: EngineScalars,
        states: Iterable[ParameterState],
        log: Sequence[LogState] = (),
    ) -> None:
        """Write a checkpoint with the states of all parameters, then remove those that are no longer kept.

        Raises:
            OSError: if it cannot be written; older checkpoints are unchanged. ``states`` is exhausted even then,
                because other ranks take part in it.
        """
        name = _name(progress.update)
        states = iter(states)
        try:
            self._write(name, State(progress=progress, engine=scalars, log=tuple(log)), states, self._record)
        finally:
            for _ in states:
                pass
        try:
            with self.choosing():
                self._prune(name)
                self._write_pointers(name)
        except DataError as error:
            logger.warning("%s; old checkpoints stay until the next one is written", error)

    def rewind(self, checkpoint: Checkpoint, progress: Progress) -> None:
        """Make an older checkpoint the newest one, with other progress; later checkpoints are removed."""
        checkpoint.restate(progress)
        for name in self.names():
            if self.update_of(name) > progress.update:
                remove_directory(self.directory / name)
        self._write_pointers(checkpoint.path.name)

    def save_average(self, checkpoints: Sequence[Checkpoint]) -> Path:
        """Average the weights of checkpoints, and write the result as ``average``."""
        total: dict[str, Tensor] = {}
        newest = max(checkpoints, key=lambda checkpoint: checkpoint.progress.update)
        for checkpoint in checkpoints:
            if checkpoint.names != newest.names:
                raise CheckpointError(
                    f"{checkpoint.path.name} has fewer layers than {newest.path.name}, as the model grew between "
                    "them; average fewer checkpoints"
                )
            for name, weight in checkpoint.weights().items():
                total[name] = total[name] + weight.double() if name in total else weight.double()
        states = (ParameterState(name, (weight / len(checkpoints)).float()) for name, weight in total.items())
        self._write(_AVERAGE, State(progress=newest.progress, engine=EngineScalars()), states, newest.run)
        return self.directory / _AVERAGE

    def _write(self, name: str, state: State, states: Iterator[ParameterState], record: RunRecord | None) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        # One process at a time trains here, and one averages: what else is hidden is of killed processes.
        names = name if name == _AVERAGE else _NAME.pattern
        restore_directories(self.directory, names, _is_whole, clear=True)
        try:
            with staged(self.directory / name) as temporary:
                weights, optimizer = _ShardWriter(temporary, "weights"), _ShardWriter(temporary, "optimizer")
                for parameter in states:
                    weights.add(parameter.name, parameter.weight)
                    for which, tensor in parameter.states.items():
                        optimizer.add(f"{parameter.name}.{which}", tensor)
                weight_files, optimizer_files = weights.close(), optimizer.close()
                state.write(temporary / "state.json")
                if record is not None:
                    atomic_write_text(temporary / RUN_FILE, record.model_dump_json(indent=1))
                CheckpointManifest(
                    weights=weight_files,
                    optimizer=optimizer_files,
                    run=None if record is None else RUN_FILE,
                    files={file.name: FileRecord.of(file) for file in sorted(temporary.iterdir())},
                ).write(temporary)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error

    def _prune(self, saved: str) -> None:
        """Remove old checkpoints after ``saved`` was written.

        Checkpoints later than that are damaged and do not count. The newest one from before a streak of skipped
        updates is kept, because the run may be rolled back to it.
        """
        names = self._names_until(saved)
        best = self.best(saved) if self._keep_best else None
        progress = {name: self.progress(name) for name in names}
        sound = [name for name in names if (of := progress[name]) is not None and of.skipped == 0]
        for name in names[: -self._keep_last]:
            if name not in {best, *sound[-1:], *map(_name, self._awaiting())}:
                remove_directory(self.directory / name)

    def progress(self, name: str) -> Progress | None:
        """Return the progress that a checkpoint records, without reading its tensors; None if it is damaged."""
        try:
            return self.read(name, verify=False).progress
        except CheckpointError:
            return None

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


def _is_whole(path: Path) -> bool:
    try:
        Checkpoint(path, verify=False)
    except CheckpointError:
        return False
    return True


class _ShardWriter:
    """Writer of tensors into files of bounded size."""

    def __init__(self, directory: Path, kind: str) -> None:
        self._directory, self._kind = directory, kind
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
