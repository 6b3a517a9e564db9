"""launch/translate.sbatch under a real SLURM: all tasks translate, and an interrupted job resumes at its pieces."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.support import ROOT


def test_a_translation_on_two_nodes_is_stopped_and_preempted_and_ends_as_alone(
    cluster: Cluster, trained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_nmt.cli import main

    for name, value in {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setitem(cluster.environment, name, value)
    source, target, log = tmp_path / "text", tmp_path / "text.hyp", tmp_path / "job.log"
    source.write_text(3 * (data.parent / "text/train.en").read_text(encoding="utf-8"), encoding="utf-8")
    words = ["--run", str(trained), "--input", str(source), "--max-tokens", "256", "--beam", "1"]
    nodes = ["--nodes", "2", "--ntasks-per-node", "1", "--output", "job.log"]
    script = [str(ROOT / "launch/translate.sbatch"), *words, "--output", str(target)]
    job = cluster.submit("--hold", *nodes, *script, cwd=tmp_path)
    # The job finds its port taken, and meets at the next one.
    other = socket.create_server(("", 20000 + job * 7 % 10000))
    cluster.run("scontrol", "release", str(job))

    def has_translated(pieces: int) -> None:
        cluster.until(
            lambda: len(list(tmp_path.glob("text.hyp.pieces/piece-*"))) >= pieces,
            200,
            f"{pieces} pieces; log of the job: {log.read_text()[-3000:] if log.exists() else ''}",
        )

    has_translated(4)
    # SLURM sends this to the batch shell before the time limit.
    cluster.run("scancel", "--batch", "--signal", "USR1", str(job))
    other.close()
    cluster.until(lambda: cluster.job(job, "Restarts") == "1", 200, "a job that is queued again")
    has_translated(12)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/sh\nsleep 1\n")
    first = cluster.submit("--partition", "high", "--nodes", "2", "--exclusive", str(urgent), cwd=tmp_path)
    assert cluster.ended(first, 200) == "COMPLETED"
    assert cluster.ended(job, 300) == "COMPLETED", log.read_text()[-5000:]
    said = log.read_text()
    assert cluster.job(job, "Restarts") == "2", said
    assert "stopped by SIGUSR1; " in said and "stopped by SIGTERM; " in said, said
    assert said.count("resumes: ") == 2 and said.count(" (2 tasks), ") == 3
    assert main(["translate", *words, "--output", str(tmp_path / "alone.hyp")]) == 0
    assert target.read_bytes() == (tmp_path / "alone.hyp").read_bytes()
    assert not list(tmp_path.glob("*.pieces")) and not list(tmp_path.glob(".*"))
