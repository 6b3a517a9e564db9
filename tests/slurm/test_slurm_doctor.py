"""`doctor` under a real SLURM of two nodes, the second of which has planted faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.planting import HOST_FAULTS, HOST_WARNINGS, plant
from tests.slurm.cluster import Cluster
from tests.support import ROOT

TASK = """#!/bin/bash
if [ "$SLURMD_NODENAME" = node2 ]; then
    exec unshare -m bash -c '
        mount -t tmpfs tmpfs {run}
        mount -t tmpfs -o size=16m tmpfs /dev/shm
        ulimit -n 300
        export PATH={planted}/bin PYTHONPATH={planted}/packages:{root} GLOO_SOCKET_IFNAME=eth99 OMP_NUM_THREADS=4096
        exec {python} "$@"' bash "$@"
fi
exec {python} "$@"
"""
"""The Python of each task."""


def test_planted_faults_of_a_node_are_found(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, run = plant(tmp_path / "planted", clock=True), tmp_path / "run"
    run.mkdir()
    (tmp_path / "task.sh").write_text(TASK.format(run=run, planted=planted, root=ROOT, python=sys.executable))
    (tmp_path / "task.sh").chmod(0o755)
    for name, value in {"PYTHON": tmp_path / "task.sh", "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setitem(cluster.environment, name, str(value))
    words = ["--nodes", "2", "--ntasks-per-node", "1", "--time", "5", "--output", "job.log"]
    script = [str(ROOT / "launch/doctor.sbatch"), "--run", str(run), "--json", "--timeout", "25"]
    number = cluster.submit(*words, *script, cwd=tmp_path)
    assert cluster.ended(number, 300) == "FAILED" and cluster.job(number, "Restarts") == "0"
    log = (tmp_path / "job.log").read_text()
    found = json.loads(next(line for line in log.splitlines() if line.startswith("{")))
    assert found["hosts"] == ["node1", "node2"] and found["ranks"] == 2
    of_node2 = (*HOST_FAULTS, "/dev/shm has 16 MiB free for 1 rank")
    together = (
        "deepspeed differs among hosts: 0.19.8 on node1; 0.19.1 on node2",
        "the clock of node2 is 90.0 s ahead of that of node1",
        f"node2 does not see in {run} what node1 writes",
        "rank 1 on node2 cannot add numbers by gloo (",
    )
    for hosts, level, beginnings in (
        (["node2"], "fault", of_node2),
        (["node2"], "warning", HOST_WARNINGS),
        ([], "fault", together),
        (["node1"], "fault", (f"job {number} has ",)),
        (["node1"], "ok", (f"job {number} is queued again", "the batch shell is signalled before the time limit")),
    ):
        texts = [each["text"] for each in found["findings"] if (each["hosts"], each["level"]) == (hosts, level)]
        for beginning in beginnings:
            assert sum(text.startswith(beginning) for text in texts) == 1, (beginning, texts, log)
    assert not list(run.iterdir())
