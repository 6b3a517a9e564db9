"""`backtranslate --executor slurm` on two nodes: the files of one process, also of tasks that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from tests.slurm.cluster import Cluster
from tests.support import ROOT

pytest.importorskip("datatrove", reason="needs datatrove (requirements/test.txt)")


def _backtranslate(cluster: Cluster, cwd: Path, *words: str) -> str:
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deepspeed_nmt", "backtranslate", *words]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tasks_on_two_nodes_make_the_files_of_one_process(
    cluster: Cluster, trained: Path, data: Path, tmp_path: Path
) -> None:
    """Tasks are killed, and the same command goes on."""
    out, directory, text = tmp_path / "out", tmp_path / ".out.tasks", data.parent / "text/train.de"
    words = ["--run", str(trained), "--text", str(text), "--data", str(data), "--tag", "none"]
    search = ["--", "--search", "sampling", "--max-tokens", "256"]  # pieces of 32 lines
    slurm = [*words, "--out", str(out), "--executor", "slurm", "--tasks", "2", "--partition", "low", *search]
    assert "jobs " in _backtranslate(cluster, tmp_path, *slurm)
    script = (directory / "logs/translate/launch_script.slurm").read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --mem-per-cpu=6G\n" in script and "gpus" not in script
    jobs = lambda *options: cluster.run("squeue", "-h", "--array", "-o", "%i", *options).split()  # noqa: E731
    cluster.until(
        lambda: (directory / "text/00000").is_dir() and bool(jobs("-t", "R")), 200, "a task that translates"
    )
    for job in jobs("-t", "R"):
        cluster.run("scancel", "--signal", "KILL", "--full", job)
    cluster.until(lambda: not jobs(), 200, "the end of all jobs")
    if not (out / "data/meta.json").exists():  # the machine may be slow
        status = _backtranslate(cluster, tmp_path, "--status", str(out))
        assert "queue: empty" in status and ("was killed" in status or "translate  " in status), status
        assert "jobs " in _backtranslate(cluster, tmp_path, *slurm)
    cluster.until(lambda: (out / "data/meta.json").exists() and not jobs(), 300, "the data")
    assert "all tasks are done: data directory  " in _backtranslate(cluster, tmp_path, "--status", str(out))
    assert "to train:\n" in _backtranslate(cluster, tmp_path, *slurm)

    local = tmp_path / "local"
    assert main(["backtranslate", *words, "--out", str(local), "--workers", "1", *search]) == 0
    files = [path.relative_to(local) for path in local.rglob("*") if path.is_file() and path.suffix != ".sha256"]
    other = {"data/meta.json", "corpus.json"}  # they record paths
    assert len(files) > 11
    for name in files:
        assert str(name) in other or (out / name).read_bytes() == (local / name).read_bytes(), name
