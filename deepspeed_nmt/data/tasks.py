"""Tasks of a long work, in stages, which any processes of any hosts may run.

A task is a function of the options and of the files that earlier stages have written. It writes a directory under a
hidden name, records the hashes of its files, and renames the directory. So a task that is killed, or runs twice,
changes nothing, and a stage is resumed by its tasks that are not done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar, Generic, TypeVar, cast

from pydantic import Field, ValidationError
from typing_extensions import Self

from deepspeed_nmt.console import counting
from deepspeed_nmt.data.options import ExecutorOptions
from deepspeed_nmt.data.tokenizer import Count
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import hidden, parse_json, remove, replacing, resolved, staged
from deepspeed_nmt.manifest import DamagedRecordError, FileRecord, PlainName, read_record, write_record
from deepspeed_nmt.registry import Config

JOB = "job.json"
GIVEN = ("held_out", "given")
"""Directories of what a work was set up with. The first is there until the result is."""
IDS = "ids"
"""File with the numbers of the jobs that were submitted last."""
_RECORD = "task.json"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class TaskRecord(Config):
    """The record of a task that is done, which has worked on ``read`` items. A work has further fields."""

    files: dict[PlainName, FileRecord] = Field(default_factory=dict)
    read: Count = 0


R = TypeVar("R", bound=TaskRecord)


class Work(Config, ABC, Generic[R]):
    """Stages of tasks: ``tasks`` is the number of those that share a text; ``directory`` receives their directories.

    ``versions`` are those of ``packages``, which all hosts must have. ``shown`` are the stages whose progress is
    shown, each with its verb, ``memory_gib`` the stages that need more than 2 GiB.
    """

    command: ClassVar[str]
    record_type: ClassVar[type[TaskRecord]]
    packages: ClassVar[tuple[str, ...]]
    shown: ClassVar[dict[str, str]]
    memory_gib: ClassVar[dict[str, int]]

    directory: Path
    options: ExecutorOptions
    versions: dict[str, str] = Field(default_factory=dict)
    tasks: int = 1

    @property
    @abstractmethod
    def stages(self) -> dict[str, int]:
        """Names of the stages, in order, with their numbers of tasks."""

    @abstractmethod
    def run(self, stage: str, task: int, new: Path) -> R:
        """Write the files of a task to the directory ``new``, and return its record."""

    @abstractmethod
    def join(self) -> Any:
        """Make the result of what the tasks have written. A second time changes nothing."""

    @abstractmethod
    def division(self) -> int:
        """Return the number of tasks that the text needs on one host, once the first stage is done."""

    def gpus(self, stage: str) -> int:
        """Return the number of GPUs that a task of a stage asks SLURM for."""
        return 0

    def place(self, stage: str, task: int) -> Path:
        """Return the directory of a task."""
        return self.directory / stage / f"{task:05d}"

    def undone(self, stage: str) -> list[int]:
        """Return the numbers of the tasks that are not done."""
        return [task for task in range(self.stages.get(stage, 1)) if not self.place(stage, task).is_dir()]

    def record(self, stage: str, task: int, verify: Iterable[str] = ()) -> R:
        """Return the record of a task that is done; the files named ``verify`` are compared with their hashes."""
        place = self.place(stage, task)
        try:
            record = self.record_type.model_validate_json(read_record(place / _RECORD))
            problems = (
                f"{name} {problem}"
                for name, file in record.files.items()
                if (problem := file.problem(place / name, name in verify))
            )
            if problem := next(problems, None):
                raise DamagedRecordError(problem)
        except (DamagedRecordError, ValidationError) as error:
            raise DataError(f"{place} is damaged ({error}); remove it, and run `{self.command}` again") from error
        return cast(R, record)

    def records(self, stage: str) -> list[R]:
        """Return the records of all tasks of a stage."""
        return [self.record(stage, task) for task in range(self.stages[stage])]

    def save(self) -> None:
        """Record the work in its directory, with the versions of packages on this host."""
        work = self.model_copy(update={"versions": self.own_versions()})
        write_record(self.directory / JOB, work.model_dump_json(exclude={"directory"}).encode())

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open the directory of a work that was recorded."""
        try:
            content = {**parse_json(read_record(directory / JOB)), "directory": str(directory)}
            return cls.model_validate_json(json.dumps(content))
        except (DamagedRecordError, ValidationError, ValueError) as error:
            raise DataError(f"{directory} is damaged ({error}); remove it, and run `{cls.command}` again") from error

    @classmethod
    def is_done(cls, directory: Path) -> bool:
        """True if the result of the tasks is joined, and their files are removed, or will be."""
        return (directory / JOB).is_file() and not (directory / GIVEN[0]).exists()

    @classmethod
    def own_versions(cls) -> dict[str, str]:
        """Return the versions of packages on this host."""
        return {name: version(name) for name in cls.packages}


W = TypeVar("W", bound=Work[Any])


def run_task(work: Work[R], stage: str, task: int) -> int:
    """Run a task, unless it is done, and return the number of items that it has worked on."""
    place = work.place(stage, task)
    if not place.is_dir():
        new = hidden(place, f"partial-{token_hex(4)}")
        new.mkdir(parents=True)
        try:
            record = work.run(stage, task, new)
            files = {path.name: FileRecord.of(path) for path in sorted(new.iterdir())}
            write_record(new / _RECORD, record.model_copy(update={"files": files}).model_dump_json().encode())
            try:
                new.replace(place)
            except OSError:
                if not place.is_dir():  # another process has done the same
                    raise
        finally:
            remove(new)
    return work.record(stage, task).read


@contextmanager
def resumed(
    kind: type[W], options: ExecutorOptions, make: Callable[[Path], W], adopt: Callable[[W], W]
) -> Iterator[tuple[W, bool]]:
    """Hold the directory of a work, and yield the work; True if it is new.

    ``make`` sets a new one up in a directory. ``adopt`` refuses one that is there by a DataError, or returns it with
    options that may differ.
    """
    directory = hidden(resolved(options.out), "tasks")
    with replacing(directory, lambda _: False):
        if is_new := not directory.exists() or kind.is_done(directory):
            with staged(directory) as new:
                make(new).save()
        if queue(directory):
            raise DataError(
                f"jobs of {directory} are in SLURM's queue, or it does not say; wait until `deepspeed-nmt "
                f"{kind.command} --status {options.out}` shows none, or end them by `scancel`"
            )
        yield (kind.open(directory) if is_new else adopt(kind.open(directory))), is_new


def queue(directory: Path) -> list[str]:
    """Return the states of the jobs that SLURM still has of those submitted last; UNKNOWN if it does not say."""
    if not (directory / IDS).is_file():
        return []
    command = ["squeue", "--noheader", "--array", "--format=%T", f"--jobs={(directory / IDS).read_text()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ["UNKNOWN"]
    is_known = done.returncode == 0 or "Invalid job id" in done.stderr  # it forgets them after some minutes
    return done.stdout.split() if is_known else ["UNKNOWN"]


def run_stages(work: W, workers: int, environments: Sequence[Mapping[str, str]] = ()) -> W:
    """Run all tasks, in this process or several, see :func:`worker_pool`, and return the work with their number.

    The first stage is divided as it is, the others by what it finds.
    """
    first, *others = work.stages
    total = run_stage(work, first, map)
    work = work.model_copy(update={"tasks": work.division()})
    with worker_pool(min(workers, work.tasks), environments) as run:
        for stage in others:
            total = run_stage(work, stage, run, total)
    return work


def run_stage(work: Work[R], stage: str, run: Callable[..., Iterable[int]], total: int = 0) -> int:
    """Run the tasks of a stage by a function like ``map``, and return the number of items."""
    done = 0
    shown = counting(work.shown[stage], "pairs", total) if stage in work.shown else nullcontext(lambda _: None)
    with shown as advance:
        for items in run(partial(run_task, work, stage), range(work.stages[stage])):
            advance(items)
            done += items
    return done


@contextmanager
def worker_pool(
    workers: int, environments: Sequence[Mapping[str, str]] = ()
) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide a function like ``map``, which works in several processes if there are several items.

    The processes end with the block; after an error, at once. ``environments`` are variables that each of them sets
    before it imports anything. A worker that ends before its work is a DataError.
    """
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # a forked one could not use its parent's threads
    with _signals_blocked():  # the process that cleans up after semaphores starts here, and must outlive SIGHUP
        own = context.SimpleQueue()
        pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(own,))
    for number in range(workers):
        own.put(environments[number % len(environments)] if environments else {})

    def run(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        if len(items) == 1:
            return map(work, items)
        with _signals_blocked():  # of the workers
            results = [pool.submit(work, item) for item in items]
        results.reverse()
        # pool.map would cancel those that are left after an error, which the pool's thread may then trip over
        return (results.pop().result() for _ in items)

    try:
        yield run
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "a worker was killed, probably out of memory; start again, with fewer --workers if so"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals during the block, and for good in processes that start in it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(own: SimpleQueue[Mapping[str, str]]) -> None:
    """Prepare a new worker, which ends when its parent has ended, however it has."""
    os.environ.update(own.get())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library of BERTs' tokenizers would start threads
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
