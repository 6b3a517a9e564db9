"""`prepare --executor slurm` on two nodes: the bytes of one process, also of tasks that are killed; failed tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import pair_words
from tests.slurm.cluster import Cluster
from tests.support import ROOT

pytest.importorskip("datatrove", reason="needs datatrove (requirements/test.txt)")


def _prepare(cluster: Cluster, cwd: Path, *words: str) -> str:
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deepspeed_nmt", "prepare", *words]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _words(data: Path, out: Path, tasks: int) -> list[str]:
    files = pair_words(data.parent / "text", train="train", valid="valid", test="test")
    where = ["--tasks", str(tasks), "--array", "3", "--partition", "low"]
    return [*files, "--vocab-size", "500", "--out", str(out), "--executor", "slurm", *where]


def test_tasks_on_two_nodes_make_the_bytes_of_one_process(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """A task is killed, and the same command goes on."""
    out, directory = tmp_path / "data", tmp_path / ".data.tasks"
    words = _words(data, out, 4)
    _prepare(cluster, tmp_path, *words)
    cluster.until(lambda: len([*directory.glob("clean/0*")]) > 0, 200, "the end of a task")
    status = ""

    def held() -> bool:
        """Stop what runs, so that no task ends before it is seen and killed.

        A script that is stopped before it has begun cannot be killed, and SLURM then drains its node.
        """
        nonlocal status
        running = cluster.run("squeue", "-h", "--array", "-o", "%i %M", "-t", "R").splitlines()
        for job, seconds in map(str.split, running):
            if seconds != "0:00":
                cluster.run("scancel", "--signal", "STOP", "--full", job)
        status = _prepare(cluster, tmp_path, "--status", str(out))
        return " stopped" in status

    cluster.until(held, 200, "a task that is stopped")
    assert "vocabulary  " in status, status
    for job in _jobs(cluster, "-t", "R,ST"):
        cluster.run("scancel", "--signal", "KILL", "--full", job)
    cluster.until(lambda: not _jobs(cluster), 200, "the end of all jobs")
    if not (out / "meta.json").exists():  # the machine may be slow
        assert "queue: empty" in _prepare(cluster, tmp_path, "--status", str(out))
        assert "jobs " in _prepare(cluster, tmp_path, *words)
    cluster.until(lambda: (out / "meta.json").exists() and not _jobs(cluster), 200, "the data")
    for path in data.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert "all tasks are done" in _prepare(cluster, tmp_path, "--status", str(out))
    assert "training pairs kept" in _prepare(cluster, tmp_path, *words), "the report"
    assert {path.name for path in directory.iterdir()} == {"ids", "job.json", "job.json.sha256", "logs"}


def _jobs(cluster: Cluster, *options: str) -> list[str]:
    return cluster.run("squeue", "-h", "--array", "-o", "%i", *options).split()


def test_a_task_that_fails_is_named_with_its_log(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "data", tmp_path / "train.en"
    text.write_bytes((data.parent / "text/train.en").read_bytes()[:-20].rpartition(b"\n")[0])
    words = _words(data, out, 2)
    words[1] = str(text)  # fewer lines than the target
    _prepare(cluster, tmp_path, *words)
    cluster.until(lambda: not _jobs(cluster), 200, "the end of all jobs")
    said = _prepare(cluster, tmp_path, "--status", str(out))
    log = tmp_path / ".data.tasks/logs/index/logs/task_00000.log"
    assert "index, task 0: " in said and "different numbers of lines" in said and f"({log})" in said, said
    assert "queue: empty" in said and not out.exists()
