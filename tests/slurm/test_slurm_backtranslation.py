"""`backtranslate --executor slurm` on two nodes; test_slurm_prepare has stages of preparation, and killed tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import translate
from tests.slurm.cluster import Cluster
from tests.support import ROOT

pytest.importorskip("datatrove", reason="needs datatrove (requirements/test.txt)")


def test_tasks_on_two_nodes_write_the_translations_of_one_process(
    cluster: Cluster, trained: Path, data: Path, tmp_path: Path
) -> None:
    out, directory, text = tmp_path / "out", tmp_path / ".out.tasks", data.parent / "text/train.de"
    sampling = ["--search", "sampling", "--max-tokens", "256"]  # pieces of 32 lines
    words = ["--run", trained, "--text", text, "--data", data, "--tag", "none", "--out", out, "--executor", "slurm"]
    words = [*map(str, words), "--tasks", "2", "--partition", "low", "--", *sampling]
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def backtranslate(*words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "deepspeed_nmt", "backtranslate", *words]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    jobs = backtranslate(*words).partition(";")[0].split()[1:]
    assert len(jobs) == 9
    assert "are in SLURM's queue" in backtranslate(*words, status=2)
    cluster.until((out / "translations").exists, 200, f"translations; {directory}")
    cluster.until((directory / "collect/00000").exists, 20, "the end of the task")
    cluster.run("scancel", *jobs)
    assert {path.name for path in directory.glob("translate/*")} == {"00000", "00001"}
    assert (out / "text").read_bytes() == text.read_bytes()
    translations = (out / "translations").read_text(encoding="utf-8").splitlines()
    assert translations == translate(trained, text, tmp_path / "hyp", *sampling)
    assert ["collect", "1", "1", "0"] in [line.split() for line in backtranslate("--status", str(out)).splitlines()]
