"""The batch scripts under a real SLURM: jobs are interrupted as on clusters, and resume to the bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands import logged
from tests.slurm.cluster import Cluster
from tests.support import ROOT, ZERO2, assert_same
from tests.system.conftest import SMALL

UPDATES, POINT_UPDATES = 160, 100
RUN = [
    *("--recipe", "transformer_base", *SMALL),
    *("engine.name=deepspeed", ZERO2, "engine.silent_s=6", "collapse.every=0"),
    *(f"training.max_updates={UPDATES}", "training.validate_every=100000", "training.save_every=10"),
    # Deterministic, because new memory is then filled with NaN, which a result must not depend on.
    *("training.log_every=10", "validation.metrics=[]", "engine.deterministic=true"),
]
NODES = ["--nodes", "2", "--ntasks-per-node", "1"]


class Job:
    """A job of launch/train.sbatch."""

    def __init__(self, cluster: Cluster, data: Path, directory: Path, *settings: str) -> None:
        self.cluster, self.run = cluster, directory / "run"
        cluster.environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        script = [str(ROOT / "launch/train.sbatch"), "--data", str(data), "--run", str(self.run)]
        self.number = cluster.submit(*NODES, "--output", "job.log", *script, *RUN, *settings, cwd=directory)
        self.log = directory / "job.log"

    def updates(self) -> list[int]:
        """Return the updates of the checkpoints."""
        return [int(path.name.split("-")[1]) for path in self.run.glob("checkpoints/update-*[0-9]")]

    def gets_further(self, restarts: int = 0, within: float = 200) -> None:
        """Wait until the job has been started again so often, and has saved a later checkpoint."""
        started = lambda: self.cluster.job(self.number, "Restarts") == str(restarts)  # noqa: E731
        self.cluster.until(started, within, f"restart {restarts} of {self.said()[-3000:]}")
        before = max(self.updates(), default=0)
        later = lambda: max(self.updates(), default=0) > before  # noqa: E731
        self.cluster.until(later, within, f"a checkpoint after update {before} of {self.said()[-3000:]}")

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture(scope="module")
def whole(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without interruption."""
    job = Job(cluster, data, tmp_path_factory.mktemp("whole"))
    assert cluster.ended(job.number, 300) == "COMPLETED", job.said()
    assert f"done: {UPDATES} updates" in job.said() and "2 x cpu; DeepSpeedEngine" in job.said()
    return job.run


def test_a_job_resumes_to_the_bit_however_it_is_interrupted(
    cluster: Cluster, whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SLURM_WAIT", "3"), ("CRASHES", "9")):
        monkeypatch.setitem(cluster.environment, name, value)
    job = Job(cluster, data, tmp_path)
    job.gets_further()
    # SLURM sends this to the batch shell some minutes before the time limit.
    cluster.run("scancel", "--batch", "--signal", "USR1", str(job.number))
    job.gets_further(restarts=1)
    # A task is stopped. The other one notices and ends; SLURM kills the stopped one, which cannot end by itself.
    pattern = f"python.* -m deepspeed_nmt train .*--run {job.run} "
    listed = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    (stopped,) = (int(pid) for pid in listed.split() if b"SLURM_PROCID=1\0" in environment_of(pid))
    os.kill(stopped, signal.SIGSTOP)
    job.gets_further(restarts=2)
    # Another job is more urgent.
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 1\n")
    urgent = cluster.submit("--partition", "high", "--nodes", "2", "--exclusive", str(script), cwd=tmp_path)
    assert cluster.ended(urgent, 200) == "COMPLETED"
    job.gets_further(restarts=3)
    # A power loss. SLURM may send SIGTERM to a new start for the old one when the node returns.
    said = job.said()
    assert said.count("stopped by SIGUSR1 after update") == said.count("stopped by SIGTERM after update") == 1
    cluster.cut_power(2)
    cluster.until(lambda: "down" in cluster.run("sinfo", "-h", "-n", "node2", "-o", "%T"), 120, "a node that is down")
    cluster.start_node(2)
    assert cluster.ended(job.number, 300) == "COMPLETED", job.said()[-5000:]
    said, restarts = job.said(), int(cluster.job(job.number, "Restarts"))
    assert restarts >= 4, "SLURM may kill the old job of a node that returns after its new start"
    assert said.count("stopped by SIGUSR1 after update") == 1
    assert said.count("rank 1 is gone or stopped: no heartbeat for 6 s") >= 1
    assert said.count("ended with status 137") >= 1, "the highest status: 70, or that of the killed task"
    assert said.count("resuming after update") >= 4
    assert len(re.findall(r"^job \d+, start \d+, on ", said, re.MULTILINE)) == restarts + 1
    assert_same(job.run, whole, UPDATES)
    assert list(logged(job.run, "train/loss")) == list(range(10, UPDATES + 1, 10)), "one complete log"


def test_a_cancelled_job_is_not_queued_again(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    job = Job(cluster, data, tmp_path)
    job.gets_further()
    cluster.run("scancel", str(job.number))
    assert cluster.ended(job.number, 200) == "CANCELLED"
    time.sleep(8)  # longer than a job waits before it is started again
    assert cluster.job(job.number, "JobState") == "CANCELLED" and cluster.job(job.number, "Restarts") == "0"


def environment_of(process: str) -> bytes:
    """Return the environment with which a process was started."""
    return Path("/proc", process, "environ").read_bytes()


def test_a_job_that_crashes_is_queued_again_up_to_a_limit(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setitem(cluster.environment, "CRASHES", "1")
    monkeypatch.setitem(cluster.environment, "PYTHON", str(tmp_path / "python"))
    words = [*NODES, "--comment", "my own words", "--output", "crash.log"]
    words += [str(ROOT / "launch/train.sbatch"), "--run", "x"]
    number = cluster.submit(*words, cwd=tmp_path)
    assert cluster.ended(number, 200) == "FAILED"
    said = (tmp_path / "crash.log").read_text()
    assert "it crashed 2 times, and CRASHES is 1; not queued again" in said
    assert "Comment=crashes:1 my own words" in cluster.run("scontrol", "show", "job", str(number))
    assert cluster.job(number, "Restarts") == "1" and cluster.job(number, "ExitCode") == "9:0"


def test_a_chain_of_jobs_prepares_trains_and_translates(
    cluster: Cluster, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container: a stand-in for Apptainer has the Python of the image."""
    program, image = tmp_path / "bin/apptainer", tmp_path / "image.sif"
    program.parent.mkdir()
    image.touch()
    program.write_text(
        f'#!/bin/sh\nuntil [ "$1" = {image} ]; do shift; done\necho "$5" >>{tmp_path}/contained\nshift 2\n'
        f'exec env PYTHONPATH={ROOT} {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setitem(cluster.environment, "PATH", f"{program.parent}:{cluster.environment['PATH']}")
    monkeypatch.setitem(cluster.environment, "CONTAINER", str(image))
    monkeypatch.setitem(cluster.environment, "PYTHON", "/of/the/host")
    text, out, run = data.parent / "text", tmp_path / "data", tmp_path / "run"
    words = ["--out", str(out), "--vocab-size", "500"]
    for split in ("train", "valid"):
        words += [f"--{split}-source", str(text / f"{split}.en"), f"--{split}-target", str(text / f"{split}.de")]
    prepared = cluster.submit(str(ROOT / "launch/prepare.sbatch"), *words, cwd=tmp_path)
    after = ["--kill-on-invalid-dep=yes", "--dependency"]
    words = [*after, f"afterok:{prepared}", str(ROOT / "launch/train.sbatch"), "--data", str(out), "--run", str(run)]
    trained = cluster.submit(*words, "--recipe", "transformer_base", *SMALL, cwd=tmp_path)
    words = [*after, f"afterok:{trained}", str(ROOT / "launch/translate.sbatch"), "--run", str(run)]
    words += ["--input", str(text / "test.en"), "--output", str(tmp_path / "test.hyp"), "--device", "cpu"]
    translated = cluster.submit(*words, cwd=tmp_path)
    assert cluster.ended(translated, 400) == "COMPLETED", [path.read_text() for path in tmp_path.glob("*.log")]
    assert len((tmp_path / "test.hyp").read_text().splitlines()) == 20
    assert (tmp_path / "contained").read_text().split() == ["prepare", "train", "translate"]


def test_an_array_trains_the_points_of_a_sweep(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    recipes = "transformer_base,transformer_big"
    words = ["--array", "1-2", str(ROOT / "launch/sweep.sbatch"), "--recipes", recipes, "--data", str(data)]
    settings = [*RUN[2:], "engine.name=plain", "engine.ds_config=null", f"training.max_updates={POINT_UPDATES}"]
    number = cluster.submit(*words, "--runs", str(tmp_path / "runs"), *settings, cwd=tmp_path)
    # One of the jobs has the number of the whole array. Queuing one again must not affect the other.
    waiting = {1, 2}

    def signalled() -> bool:
        for point in list(waiting):
            if (tmp_path / "runs" / str(point) / "checkpoints/latest").exists():
                cluster.run("scancel", "--batch", "--signal", "USR1", f"{number}_{point}")
                waiting.remove(point)
        return not waiting

    cluster.until(signalled, 200, "a checkpoint of each point")
    states = ["squeue", "--noheader", "--states", "all", "--format", "%T", "--jobs", str(number)]
    cluster.until(lambda: set(cluster.run(*states).split()) == {"COMPLETED"}, 400, "the end of an array")
    for point, dropout in ((1, 0.1), (2, 0.3)):
        run = tmp_path / "runs" / str(point)
        assert (run / f"checkpoints/update-{POINT_UPDATES:07d}").exists(), list(tmp_path.glob("*.log"))
        assert f" dropout: {dropout}" in (run / "config.yaml").read_text()
        starts = re.findall(
            r"^job \d+, start \d+, on ", next(tmp_path.glob(f"*_{point}.log")).read_text(), re.MULTILINE
        )
        assert len(starts) == 2
