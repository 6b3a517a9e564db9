"""The batch scripts under a real SLURM: jobs are interrupted as on clusters, and resume to the bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.support import ROOT, assert_same
from tests.system.conftest import SMALL

UPDATES = 120
RUN = [
    *("--recipe", "transformer_base", *SMALL),
    *("engine.name=deepspeed", "engine.ds_config=zero2", "engine.silent_s=6", "collapse.every=0"),
    *(f"training.max_updates={UPDATES}", "training.validate_every=100000", "training.save_every=10"),
    *("training.log_every=10", "validation.metrics=[]"),
]
NODES = ["--nodes", "2", "--ntasks-per-node", "1"]
pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def job(cluster: Cluster, data: Path, tmp_path: Path) -> Job:
    """A submitted training job on both nodes."""
    made = Job(cluster, data, tmp_path)
    yield made
    cluster.run("scancel", str(made.number))
    cluster.until(lambda: not cluster.run("squeue", "-h"), 60, "an empty queue")


class Job:
    """A job of launch/train.sbatch."""

    def __init__(self, cluster: Cluster, data: Path, directory: Path, *settings: str) -> None:
        self.cluster, self.run = cluster, directory / "run"
        cluster.environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        script = [str(ROOT / "launch/train.sbatch"), "--data", str(data), "--run", str(self.run)]
        self.number = cluster.submit(*NODES, "--output", "job.log", *script, *RUN, *settings, cwd=directory)
        self.log = directory / "job.log"

    def has_saved(self, update: int, within: float = 90) -> None:
        """Wait for a checkpoint of this update or a later one."""

        def saved() -> bool:
            return any(int(path.name.split("-")[1]) >= update for path in self.run.glob("checkpoints/update-*[0-9]"))

        self.cluster.until(saved, within, f"a checkpoint of update {update}; log of the job: {self.said()[-3000:]}")

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def completes(self, restarts: int, whole: Path, within: float = 150) -> None:
        """Assert that the job succeeds after these restarts with the weights of ``whole`` and a complete log."""
        state = self.cluster.ended(self.number, within)
        assert state == "COMPLETED", self.said()[-5000:]
        assert int(self.cluster.job(self.number, "Restarts")) == restarts
        assert_same(self.run, whole, UPDATES)
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        updates = [line["update"] for line in lines if "train/loss" in line]
        assert updates == list(range(10, UPDATES + 1, 10))
        assert len(re.findall(r"^job \d+, start \d+, on ", self.said(), re.MULTILINE)) == restarts + 1


@pytest.fixture(scope="module")
def whole(cluster: Cluster, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without interruption."""
    job = Job(cluster, data, tmp_path_factory.mktemp("whole"))
    assert cluster.ended(job.number, 150) == "COMPLETED", job.said()
    assert "done: 120 updates" in job.said() and "2 x cpu; DeepSpeedEngine" in job.said()
    return job.run


def test_a_job_near_its_time_limit_saves_and_is_queued_again(cluster: Cluster, whole: Path, job: Job) -> None:
    job.has_saved(10)
    # SLURM sends this to the batch shell some minutes before the limit.
    cluster.run("scancel", "--batch", "--signal", "USR1", str(job.number))
    job.completes(restarts=1, whole=whole)
    assert "stopped by SIGUSR1 after update" in job.said() and "resuming after update" in job.said()


def test_a_preempted_job_saves_and_is_queued_again(cluster: Cluster, whole: Path, job: Job, tmp_path: Path) -> None:
    job.has_saved(10)
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/sh\nsleep 1\n")
    urgent = cluster.submit("--partition", "high", "--nodes", "2", "--exclusive", str(script), cwd=tmp_path)
    assert cluster.ended(urgent, 60) == "COMPLETED"
    job.completes(restarts=1, whole=whole)
    assert "stopped by SIGTERM after update" in job.said()


def test_a_cancelled_job_is_not_queued_again(cluster: Cluster, job: Job) -> None:
    job.has_saved(10)
    cluster.run("scancel", str(job.number))
    assert cluster.ended(job.number, 60) == "CANCELLED"
    time.sleep(8)  # longer than a job waits before it is started again
    assert cluster.job(job.number, "JobState") == "CANCELLED" and cluster.job(job.number, "Restarts") == "0"


def test_a_job_resumes_after_a_power_loss_of_a_node(cluster: Cluster, whole: Path, job: Job) -> None:
    job.has_saved(20)
    cluster.cut_power(2)
    cluster.until(lambda: "down" in cluster.run("sinfo", "-h", "-n", "node2", "-o", "%T"), 60, "a node that is down")
    cluster.start_node(2)
    job.completes(restarts=1, whole=whole, within=200)
    assert "resuming after update" in job.said()


def test_a_job_resumes_after_a_task_is_stopped(
    cluster: Cluster, whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tasks notice and end. SLURM kills the stopped one, which cannot end by itself."""
    monkeypatch.setitem(cluster.environment, "SLURM_WAIT", "3")
    made = Job(cluster, data, tmp_path)
    made.has_saved(20)
    pattern = f"python.* -m deepspeed_nmt train .*--run {made.run} "
    found = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, timeout=20)
    (stopped,) = (int(pid) for pid in found.stdout.split() if b"SLURM_PROCID=1\0" in environment_of(pid))
    os.kill(stopped, signal.SIGSTOP)
    made.completes(restarts=1, whole=whole)
    assert "rank 1 is gone or stopped: no heartbeat for 6 s" in made.said()
    assert "ended with status 137" in made.said(), "the highest status: 70, or that of the killed task"


def environment_of(process: str) -> bytes:
    """Return the environment with which a process was started."""
    return Path("/proc", process, "environ").read_bytes()


def test_a_job_that_crashes_is_queued_again_up_to_a_limit(
    cluster: Cluster, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setitem(cluster.environment, "CRASHES", "1")
    made = Job(cluster, data, tmp_path)
    cluster.run("scancel", str(made.number))
    monkeypatch.setitem(cluster.environment, "PYTHON", str(tmp_path / "python"))
    words = [*NODES, "--comment", "my own words", "--output", "crash.log"]
    words += [str(ROOT / "launch/train.sbatch"), "--run", "x"]
    number = cluster.submit(*words, cwd=tmp_path)
    assert cluster.ended(number, 60) == "FAILED"
    said = (tmp_path / "crash.log").read_text()
    assert "it crashed 2 times, and CRASHES is 1; not queued again" in said
    assert "Comment=crashes:1 my own words" in cluster.run("scontrol", "show", "job", str(number))
    assert cluster.job(number, "Restarts") == "1" and cluster.job(number, "ExitCode") == "9:0"


def test_a_user_error_is_not_retried(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    made = Job(cluster, data, tmp_path, "model.heds=4")
    assert cluster.ended(made.number, 60) == "FAILED"
    assert cluster.job(made.number, "Restarts") == "0" and cluster.job(made.number, "ExitCode") == "2:0"
    assert made.said().count("did you mean 'model.heads'?") == 2, "the first rank of each host reports it"


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
    assert cluster.ended(translated, 180) == "COMPLETED", [path.read_text() for path in tmp_path.glob("*.log")]
    assert len((tmp_path / "test.hyp").read_text().splitlines()) == 20
    assert (tmp_path / "contained").read_text().split() == ["prepare", "train", "translate"]


def test_an_array_trains_the_points_of_a_sweep(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    recipes = "transformer_base,transformer_big"
    words = ["--array", "1-2", str(ROOT / "launch/sweep.sbatch"), "--recipes", recipes, "--data", str(data)]
    settings = [*RUN[2:], "engine.name=plain", "engine.ds_config=null"]
    number = cluster.submit(*words, "--runs", str(tmp_path / "runs"), *settings, cwd=tmp_path)
    # One of the jobs has the number of the whole array. Queuing one again must not affect the other.
    for point in (1, 2):
        place = tmp_path / "runs" / str(point) / "checkpoints/latest"
        cluster.until(place.exists, 90, f"a checkpoint of point {point}")
        cluster.run("scancel", "--batch", "--signal", "USR1", f"{number}_{point}")
    cluster.until(lambda: not cluster.run("squeue", "-h", "-j", str(number)), 180, "the end of an array")
    for point, dropout in ((1, 0.1), (2, 0.3)):
        run = tmp_path / "runs" / str(point)
        assert (run / f"checkpoints/update-{UPDATES:07d}").exists(), list(tmp_path.glob("*.log"))
        assert f" dropout: {dropout}" in (run / "config.yaml").read_text()
        starts = re.findall(
            r"^job \d+, start \d+, on ", next(tmp_path.glob(f"*_{point}.log")).read_text(), re.MULTILINE
        )
        assert len(starts) == 2
