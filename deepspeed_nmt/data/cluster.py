"""Tasks by SLURM: an array of jobs for each stage, which starts when the stage before is done.

datatrove writes and submits the jobs. The same command submits the tasks that are not done again. Until the end, all
files are in a hidden directory beside the result.
"""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_nmt.console import table
from deepspeed_nmt.data.data_directory import META_FILE
from deepspeed_nmt.data.options import ExecutorOptions
from deepspeed_nmt.data.tasks import GIVEN, IDS, JOB, W, Work, queue, resumed, run_task
from deepspeed_nmt.errors import ConfigError, DataError, check_installed
from deepspeed_nmt.files import hidden, remove, resolved

try:
    from datatrove.executor.slurm import SlurmPipelineExecutor
except ModuleNotFoundError:  # `submit` says so
    SlurmPipelineExecutor = object

_JOIN = "join"
_LOGS = "logs"
_MEMORY_GIB = 2
"""Memory of a task by default."""
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


def submit(kind: type[W], options: ExecutorOptions, make: Callable[[Path], W], adopt: Callable[[W], W]) -> str:
    """Submit the tasks that are not done, and return a message; see :func:`resumed`.

    Raises:
        ConfigError: if SLURM or datatrove is missing.
        DataError: as of :func:`resumed`; if jobs in the queue are in the way, or ``sbatch`` fails.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("--executor slurm needs sbatch, which is not installed here; run it on a login node")
    check_installed("datatrove", "--executor slurm", "`pip install 'datatrove<0.11'`")
    if len(str(resolved(options.out)).split()) > 1:  # datatrove does not quote it
        raise ConfigError(f"--out is {resolved(options.out)}, which SLURM would split; give a path without spaces")
    with resumed(kind, options, make, adopt) as (work, is_new):
        try:
            ids = _launch(work, options)
        except DataError:
            if is_new:
                remove(work.directory)
            raise
        (work.directory / IDS).write_text(",".join(ids))
    return f"jobs {' '.join(ids)}; `deepspeed-nmt {kind.command} --status {options.out}` shows their progress"


def _launch(work: Work[Any], options: ExecutorOptions) -> list[str]:
    arrays: list[_Array] = []
    programs = shlex.quote(str(Path(sys.executable).parent))
    for stage, tasks in {**work.stages, _JOIN: 1}.items():
        undone = work.undone(stage)
        for task in undone:
            _log(work, stage, task).unlink(missing_ok=True)
        array = _Array(
            [partial(run, type(work), work.directory, stage)],
            tasks,
            time=None,
            partition=options.partition,
            mem_per_cpu_gb=work.memory_gib.get(stage, _MEMORY_GIB),
            gpus_per_task=work.gpus(stage),
            workers=options.array or -1,
            job_name=f"{work.command}-{stage}",
            qos=None,
            env_command=f"export PATH={programs}:$PATH OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}",
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


def run(kind: type[Work[Any]], directory: Path, stage: str, data: Any, rank: int, world_size: int) -> None:
    """Run a task of a stage, as a step of datatrove."""
    work = kind.open(directory)
    if (own := work.own_versions()) != work.versions:
        raise DataError(
            f"{platform.node()} has other packages ({own}) than the host that submitted the job ({work.versions}); "
            "install the same"
        )
    if stage != _JOIN:
        run_task(work, stage, rank)
        return
    if not kind.is_done(directory):
        work.join()
    for name in (*GIVEN, *work.stages):
        remove(directory / name)


def status(kind: type[Work[Any]], out: Path) -> str:
    """Return a table of the stages, the pace, what SLURM has of them in its queue, and the failed tasks with logs."""
    directory = hidden(resolved(out), "tasks")
    if not (directory / JOB).is_file():
        if whole := [place for place in (out, out / "data") if (place / META_FILE).is_file()]:
            return f"no task is left: {whole[0]} is a data directory"
        raise DataError(f"no tasks of {out}; submit them by `{kind.command} --executor slurm --out {out}`")
    work = kind.open(directory)
    if kind.is_done(directory):
        return f"all tasks are done: data directory  {work.options.out}"
    waiting = queue(directory)
    rows, notes, failures = [["stage", "tasks", "done", "failed"]], [], []
    began = (directory / JOB).stat().st_mtime  # a stage begins when the one before has ended
    for stage, tasks in {**work.stages, _JOIN: 1}.items():
        undone, failed = work.undone(stage), []
        for task in undone:
            log = _log(work, stage, task)
            text = log.read_text(errors="replace") if log.is_file() else ""
            if "| ERROR" in text:
                failed.append(f"{stage}, task {task}: {text.strip().splitlines()[-1]} ({log})")
            elif text and not waiting:
                failed.append(f"{stage}, task {task}: was killed ({log.parents[1] / 'slurm_logs'})")
        rows.append([stage, str(tasks), str(tasks - len(undone)), str(len(failed))])
        failures += failed
        if done := [task for task in range(tasks) if task not in undone]:
            ended = max(work.place(stage, task).stat().st_mtime for task in done)
            if undone:
                items, seconds = sum(work.record(stage, task).read for task in done), round(ended - began)
                left = timedelta(seconds=seconds * len(undone) // len(done))
                so_far = timedelta(seconds=seconds)
                notes.append(f"{stage}: {items:,} pairs in {so_far}; about {left} left at this pace")
            began = ended
    states = ", ".join(f"{waiting.count(state)} {state.lower()}" for state in sorted({*waiting}))
    notes.append(f"queue: {states or 'empty; to go on, give the same command again'}")
    return "\n".join([table(rows), *notes, *failures])


def _log(work: Work[Any], stage: str, task: int) -> Path:
    return work.directory / _LOGS / stage / "logs" / f"task_{task:05d}.log"
