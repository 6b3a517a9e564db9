"""launch/backtranslate.sbatch under a real SLURM: all tasks translate and score, and a stopped job resumes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deepspeed_nmt.data.data_directory import DataDirectory
from tests.slurm.cluster import Cluster
from tests.support import ROOT


def test_a_job_on_two_nodes_is_stopped_and_resumes(
    cluster: Cluster, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PART_LINES": "50"}.items():
        monkeypatch.setitem(cluster.environment, name, value)
    log, out, text = tmp_path / "job.log", tmp_path / "out", data.parent / "text/train.de"
    words = ["--run", str(trained), "--text", str(text), "--data", str(data), "--out", str(out)]
    words += ["--tag", "none", "--score-run", str(trained), "--min-score", "-99", "--", "--max-tokens", "256"]
    nodes = ["--nodes", "2", "--ntasks-per-node", "1", "--output", "job.log"]
    job = cluster.submit(*nodes, str(ROOT / "launch/backtranslate.sbatch"), *words, cwd=tmp_path)

    def said() -> str:
        return log.read_text() if log.exists() else ""

    cluster.until(lambda: len(list(out.glob("translations.pieces/piece-*"))) >= 2, 200, f"pieces; log: {said()}")
    cluster.run("scancel", "--batch", "--signal", "USR1", str(job))
    cluster.until(lambda: cluster.job(job, "Restarts") == "1", 200, "a job that is queued again")
    assert cluster.ended(job, 300) == "COMPLETED", said()[-5000:]
    assert "stopped by SIGUSR1; " in said() and "resumes: " in said() and said().count(" (2 tasks), ") == 2, said()
    assert len((out / "scores").read_text().splitlines()) == 400
    assert DataDirectory.open(out / "data").meta.pairs_read == 400
