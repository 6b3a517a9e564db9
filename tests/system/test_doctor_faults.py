"""`doctor` on one host and on several ranks of it: planted faults are found, each by its sentence."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.planting import HOST_FAULTS, HOST_WARNINGS, plant
from tests.support import ROOT, free_port, rank_environment, run_ranks

SCONTROL = """#!/bin/sh
[ "$1" = show ] || { printf '#!/bin/sh\\n#SBATCH --signal=USR2@10\\n'; exit; }
echo "JobId=7 Requeue=0 BatchFlag=1 TimeLimit=00:05:00 EndTime=$(date -d '+4 minutes' +%Y-%m-%dT%H:%M:%S)"
"""


def texts(result: dict[str, Any], level: str) -> list[str]:
    """Return the sentences of a level."""
    return [finding["text"] for finding in result["findings"] if finding["level"] == level]


def assert_found(expected: tuple[str, ...], sentences: list[str]) -> None:
    """Assert that each expected beginning is that of exactly one sentence."""
    for beginning in expected:
        assert sum(text.startswith(beginning) for text in sentences) == 1, (beginning, sentences)


def test_faults_of_a_host_are_found_alone(tmp_path: Path) -> None:
    place = plant(tmp_path / "planted")
    (place / "bin/scontrol").unlink(missing_ok=True)
    (place / "bin/scontrol").write_text(SCONTROL)
    (place / "bin/scontrol").chmod(0o755)
    (place / "bin/date").symlink_to("/bin/date")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        "PATH": str(place / "bin"),
        "PYTHONPATH": f"{place / 'packages'}:{ROOT}",
        "SLURM_JOB_ID": "7",
        "GLOO_SOCKET_IFNAME": "eth99",
        "OMP_NUM_THREADS": "4096",
        "MASTER_ADDR": "node99.invalid",
    }
    command = [sys.executable, "-m", "deepspeed_nmt", "doctor", "--run", "/proc/run", "--json", "--timeout", "60"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 300; exec "$@"', "sh", *command], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    faults = (
        *HOST_FAULTS,
        f"{platform.node()} cannot resolve MASTER_ADDR 'node99.invalid'",
        "the run directory /proc is not writable (",
        "job 7 has 3 minutes left",
        "rank ",
    )
    assert_found(faults, texts(result, "fault"))
    assert len(faults) == len(texts(result, "fault")) == result["faults"]
    warnings = (
        *HOST_WARNINGS,
        "job 7 is not queued again after preemption or the loss of a node (--no-requeue)",
        "--signal in the script of job 7 is USR2@10",
    )
    assert_found(warnings, texts(result, "warning"))


def test_two_ranks_of_a_host_agree(tmp_path: Path) -> None:
    command = ["-m", "deepspeed_nmt", "doctor", "--run", str(tmp_path), "--json"]
    first, second = run_ranks(command, 2, tmp_path, LOCAL_WORLD_SIZE="2", PATH=os.environ["PATH"])
    result = json.loads(next(line for line in first.splitlines() if line.startswith("{")))
    assert (result["ranks"], result["hosts"], texts(result, "fault")) == (2, [platform.node()], [])
    together = [finding["text"] for finding in result["findings"] if not finding["hosts"]]
    assert_found(("equal on all hosts: ", "2 ranks on 1 host add numbers by gloo: "), together)
    assert "{" not in second, "rank 0 reports"


def test_ranks_that_are_missing_are_named(tmp_path: Path) -> None:
    place = plant(tmp_path / "planted")
    environment = {**rank_environment(0, 3, free_port(), tmp_path), "LOCAL_WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = f"{place / 'packages'}:{ROOT}"
    command = [sys.executable, "-m", "deepspeed_nmt", "doctor", "--run", str(tmp_path), "--timeout", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    hosts = f"({platform.node()}, host 1 of the launcher, counted from 0)"
    assert f"ranks 1, 2 of 3 did not connect within 4 s {hosts}" in done.stdout
    lines = [line.split(maxsplit=2)[:2] for line in done.stdout.splitlines()]
    assert ["ok", "torch"] in lines and ["fault", "deepspeed"] in lines, "the rest is reported all the same"
    assert not list(tmp_path.glob(".doctor-*"))
