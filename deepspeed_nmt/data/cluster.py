"""Preparation by SLURM: an array of jobs for each stage, which starts when the stage before is done.

datatrove writes and submits the jobs. The same command submits the tasks that are not done again. Until the end, all
files are in a hidden directory beside the result.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor
from pydantic import ValidationError

from deepspeed_nmt.console import table
from deepspeed_nmt.data.data_directory import META_FILE, Meta
from deepspeed_nmt.data.inputs import STANDARD_INPUT
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.preparation import check_options, join, replacing_data, same_or_refuse, set_up, staged_data
from deepspeed_nmt.data.stages import Work, run_task
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.files import hidden, parse_json, remove, resolved, staged
from deepspeed_nmt.manifest import DamagedRecordError, read_record, write_record

_JOB = "job.json"
_IDS = "ids"
_JOIN = "join"
_LOGS = "logs"
_MEMORY_GIB = {"vocabulary": 4}
"""Memory of a task, 2 GiB by default: SentencePiece holds the sample."""
_PACKAGES = ("deepspeed_nmt", "sentencepiece", "numpy")
_MAX_ARRAY = 1000
"""Jobs of an array, by SLURM's default of ``MaxArraySize``; each runs several tasks if there are more."""


class _Array(SlurmPipelineExecutor):  # type: ignore[misc]
    """The jobs of a stage; ``ranks`` are its tasks that are not done."""

    ranks: tuple[int, ...] = ()

    def get_incomplete_ranks(self, *_: object) -> list[int]:
        return list(self.ranks)

    def is_rank_completed(self, rank: int) -> bool:
        return False  # a task looks for itself

    def launch_merge_stats(self) -> None:
        """Submit no further job."""

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        arguments: dict[str, Any] = super().get_sbatch_args(max_array)
        return {name: value for name, value in arguments.items() if value is not None}


def submit(options: PrepareOptions) -> Meta | str:
    """Submit the tasks that are not done, and return a message, or the record of a data directory that is whole.

    Raises:
        ConfigError: if SLURM is missing.
        DataError: as of :func:`prepare`; if text can be read only once, or has changed since other tasks read it, or
            tasks of other options, or jobs in the queue, are in the way.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("--executor slurm needs sbatch, which is not installed here; run it on a login node")
    for path in (path for paths in options.inputs.values() for path in paths):
        if isinstance(path, Path) and (path == STANDARD_INPUT or path.is_fifo()):
            raise DataError(f"--executor slurm reads files on other hosts, and {path} is a pipe; write it to a file")
    out, vocabulary, sampling = check_options(options)
    directory = hidden(out, "tasks")
    with replacing_data(out), replacing_data(directory):
        if (out / META_FILE).exists() and not options.overwrite:
            return same_or_refuse(out, options, vocabulary, sampling)
        if is_new := not directory.exists() or _is_done(directory):
            with staged(directory) as new:
                work = set_up(new, options, vocabulary, sampling, options.tasks or 1)
                work = work.model_copy(update={"versions": _versions()})
                write_record(new / _JOB, work.model_dump_json(exclude={"directory"}).encode())
        work = _open(directory)
        _check_same(work, options)
        if _queue(directory):
            raise DataError(
                f"jobs of {directory} are in SLURM's queue, or it does not say; wait until `prepare --status "
                f"{options.out}` shows none, or end them by `scancel`"
            )
        try:
            ids = _launch(work, options)
        except DataError:
            if is_new:
                remove(directory)
            raise
        (directory / _IDS).write_text(",".join(ids))
    return f"jobs {' '.join(ids)}; `deepspeed-nmt prepare --status {options.out}` shows their progress"


def _check_same(work: Work, options: PrepareOptions) -> None:
    """Raise a DataError unless the tasks that are done are of these options, and of the text as it is now."""
    own = {"overwrite", "workers", "array", "partition"}  # which change nothing of the tasks
    old, new = (each.model_dump(exclude=own) for each in (work.options, options))
    if differing := [f"--{name.replace('_', '-')}" for name in old if old[name] != new[name]]:
        raise DataError(
            f"{work.directory} holds tasks of another {', '.join(differing)}; remove it, or choose another --out"
        )
    for task in range(work.stages["index"]):
        for text in work.record("index", task).texts.values() if work.place("index", task).is_dir() else ():
            if text.is_changed():
                raise DataError(
                    f"{text.record.path} has changed since its pieces were found; remove {work.directory}, and "
                    "start again"
                )


def _launch(work: Work, options: PrepareOptions) -> list[str]:
    arrays: list[_Array] = []
    for stage, tasks in {**work.stages, _JOIN: 1}.items():
        undone = _undone(work, stage)
        for task in undone:
            _log(work, stage, task).unlink(missing_ok=True)
        array = _Array(
            [partial(run, work.directory, stage)],
            tasks,
            time=None,
            partition=options.partition,
            mem_per_cpu_gb=_MEMORY_GIB.get(stage, 2),
            workers=options.array or -1,
            job_name=f"prepare-{stage}",
            qos=None,
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH",
            sbatch_args={"kill-on-invalid-dep": "yes"},
            logging_dir=str(work.directory / _LOGS / stage),
            depends=arrays[-1] if arrays else None,
            with_srun=False,
            tasks_per_job=max(1, -(-len(undone) // _MAX_ARRAY)),
        )
        array.ranks = tuple(undone)
        arrays.append(array)
    try:
        arrays[-1].run()  # submits those that it depends on first
    except subprocess.CalledProcessError as error:
        raise DataError(
            f"sbatch ended with status {error.returncode}, and says why above; mend it, and start again"
        ) from error
    return [str(array.job_id) for array in arrays if array.job_id not in (None, -1)]


def run(directory: Path, stage: str, data: Any, rank: int, world_size: int) -> None:
    """Run a task of a stage, as a step of datatrove."""
    work = _open(directory)
    if (own := _versions()) != work.versions:
        raise DataError(
            f"{platform.node()} has other packages ({own}) than the host that submitted the job ({work.versions}); "
            "install the same"
        )
    if stage != _JOIN:
        run_task(work, stage, rank)
        return
    if not _is_done(directory):
        with replacing_data(out := resolved(work.options.out)), staged_data(out) as staging:
            join(work, staging)
    for name in ("held_out", "given", *work.stages):
        remove(directory / name)


def status(out: Path) -> str:
    """Return a table of the stages, the pace, what SLURM has of them in its queue, and the failed tasks with logs."""
    directory = hidden(resolved(out), "tasks")
    if not (directory / _JOB).is_file():
        raise DataError(f"no tasks of {out}; submit them by `prepare --executor slurm --out {out}`")
    work = _open(directory)
    if _is_done(directory):
        return f"all tasks are done: data directory  {out}"
    queue = _queue(directory)
    rows, notes, failures = [["stage", "tasks", "done", "failed"]], [], []
    began = (directory / _JOB).stat().st_mtime  # a stage begins when the one before has ended
    for stage, tasks in {**work.stages, _JOIN: 1}.items():
        undone, failed = _undone(work, stage), []
        for task in undone:
            log = _log(work, stage, task)
            text = log.read_text(errors="replace") if log.is_file() else ""
            if "| ERROR" in text:
                failed.append(f"{stage}, task {task}: {text.strip().splitlines()[-1]} ({log})")
            elif text and not queue:
                failed.append(f"{stage}, task {task}: was killed ({log.parents[1] / 'slurm_logs'})")
        rows.append([stage, str(tasks), str(tasks - len(undone)), str(len(failed))])
        failures += failed
        if done := [task for task in range(tasks) if task not in undone]:
            ended = max(work.place(stage, task).stat().st_mtime for task in done)
            if undone:
                pairs, seconds = sum(work.record(stage, task).read for task in done), round(ended - began)
                left = timedelta(seconds=seconds * len(undone) // len(done))
                so_far = timedelta(seconds=seconds)
                notes.append(f"{stage}: {pairs:,} pairs in {so_far}; about {left} left at this pace")
            began = ended
    states = ", ".join(f"{queue.count(state)} {state.lower()}" for state in sorted({*queue}))
    notes.append(f"queue: {states or 'empty; to go on, give the same command again'}")
    return "\n".join([table(rows), *notes, *failures])


def _undone(work: Work, stage: str) -> list[int]:
    return [task for task in range(work.stages.get(stage, 1)) if not work.place(stage, task).is_dir()]


def _log(work: Work, stage: str, task: int) -> Path:
    return work.directory / _LOGS / stage / "logs" / f"task_{task:05d}.log"


def _queue(directory: Path) -> list[str]:
    """Return the states of the jobs that SLURM still has of those submitted last; UNKNOWN if it does not say."""
    if not (directory / _IDS).is_file():
        return []
    command = ["squeue", "--noheader", "--array", "--format=%T", f"--jobs={(directory / _IDS).read_text()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ["UNKNOWN"]
    is_known = done.returncode == 0 or "Invalid job id" in done.stderr  # it forgets them after some minutes
    return done.stdout.split() if is_known else ["UNKNOWN"]


def _is_done(directory: Path) -> bool:
    """True if the parts are joined, and removed, or will be."""
    return (directory / _JOB).is_file() and not (directory / "held_out").exists()


def _open(directory: Path) -> Work:
    """Open the directory of tasks that were submitted."""
    try:
        content = {**parse_json(read_record(directory / _JOB)), "directory": directory}
        return Work.model_validate(content)
    except (DamagedRecordError, ValidationError, ValueError) as error:
        raise DataError(f"{directory} is damaged ({error}); remove it, and run `prepare` again") from error


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _PACKAGES}
