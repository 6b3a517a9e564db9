"""`translate` on several ranks: the same bytes however many there are, however often they are killed or stopped."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.programs import Program
from tests.support import ROOT, free_port, rank_environment, run_ranks

KILLS = 4
"""Few enough that a fast machine does not finish all pieces before the last one."""


class Job:
    """A translation that is started repeatedly."""

    def __init__(self, run: Path, data: Path, directory: Path) -> None:
        self.directory, self.target, self.links = directory, directory / "out", directory / "links"
        self.logs, self.reliance = [directory / "rank0", directory / "rank1"], directory / "reliance"
        source, prefix = data.parent / "text/train.en", directory / "prefix"
        lines = source.read_text(encoding="utf-8").count("\n")
        prefix.write_text("".join("\n" if number % 5 else "Ein\n" for number in range(lines)), encoding="utf-8")
        self.words = ["translate", "--run", str(run), "--input", str(source), "--max-tokens", "64", "--nbest", "2"]
        self.words += ["--prefix", str(prefix), "--alignment", str(self.links), "--alignment-layer", "2"]
        self.words += ["--reliance", str(self.reliance)]

    def command(self) -> list[str]:
        return ["-m", "deepspeed_nmt", *self.words, "--output", str(self.target)]

    def read(self) -> bytes:
        """Return the translations, their alignments and signs of doubt."""
        return b"".join(path.read_bytes() for path in (self.target, self.links, self.reliance))

    def start(self) -> list[Program]:
        """Start two ranks."""
        port = free_port()
        environments = [rank_environment(rank, 2, port, self.directory) for rank in range(2)]
        return [Program(self.command(), *each) for each in zip(environments, self.logs, strict=True)]

    def finished(self) -> int:
        """Return the number of pieces that are finished."""
        return len(list(self.directory.glob("out.pieces/piece-*")))

    def gets_further(self, processes: Sequence[Program | subprocess.Popen[str]], pieces: int = 1) -> None:
        """Wait until further pieces are finished."""
        before, deadline = self.finished(), time.monotonic() + 200
        while self.finished() < before + pieces:
            assert all(process.poll() is None for process in processes), self.logs[0].read_text()
            assert time.monotonic() < deadline, self.logs[0].read_text()
            time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(trained: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The translation by one process."""
    job = Job(trained, data, tmp_path_factory.mktemp("alone"))
    run_ranks(job.command(), 1, job.directory)
    lines = [path.read_text().count("\n") for path in (job.target, job.links, job.reliance)]
    assert len(set(lines)) == 1
    return job.read()


@pytest.fixture
def job(trained: Path, data: Path, tmp_path: Path) -> Job:
    """A translation that has not begun."""
    return Job(trained, data, tmp_path)


def test_kills_and_other_numbers_of_ranks_change_no_byte(job: Job, alone: bytes) -> None:
    dice = random.Random(int(os.environ.get("KILL_SEED", "1")))
    for kill in range(KILLS):
        processes = job.start()
        try:
            job.gets_further(processes)
            time.sleep(dice.uniform(0.0, 0.3))
            assert not job.target.exists()
            processes[0].kill()
            if kill % 3 == 0:
                assert processes[1].wait(120) == 70, "a rank ends when rank 0 is gone"
        finally:
            for process in processes:
                process.kill()
                process.wait()
    finished = job.finished()
    run_ranks(job.command(), 3, job.directory)
    assert job.read() == alone
    assert f"resumes: {finished} of 50 pieces" in (job.directory / "rank0.log").read_text()
    assert not job.finished() and not list(job.directory.glob(".*")), "nothing is left behind"


def test_a_request_to_one_rank_stops_all_and_they_resume(job: Job, alone: bytes) -> None:
    def said() -> str:
        return job.logs[0].read_text()

    for signalled, number in ((1, signal.SIGUSR1), (0, signal.SIGTERM)):
        processes = job.start()
        job.gets_further(processes, 3)
        processes[signalled].send_signal(number)
        assert [process.wait(120) for process in processes] == [75, 0], said()
        kept = re.search(
            rf"stopped by {number.name}; (\d+) of 50 pieces are finished, in {job.target}.pieces; start", said()
        )
        assert kept is not None, said()
        assert 0 <= job.finished() - int(kept[1]) <= 1, "the other rank may finish a piece meanwhile"
    run_ranks(job.command(), 1, job.directory)
    assert job.read() == alone


def test_workers_of_one_host(job: Job, alone: bytes, request: pytest.FixtureRequest) -> None:
    def start() -> subprocess.Popen[str]:
        with job.logs[0].open("w") as log:
            started = subprocess.Popen(
                [sys.executable, *job.command(), "--workers", "2"],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stderr=log,
                text=True,
            )
        request.addfinalizer(started.kill)  # its workers notice
        return started

    def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
        children = psutil.Process(process.pid).children()
        return [child for child in children if any("spawn_main" in word for word in child.cmdline())]

    process = start()
    job.gets_further([process], 3)
    first, second = workers(process)
    second.kill()
    assert process.wait(120) == 70 and not first.is_running()
    assert "worker 1 of 2 was killed by SIGKILL; start again to resume" in job.logs[0].read_text()
    process = start()
    job.gets_further([process], 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75
    assert "stopped by SIGTERM; " in job.logs[0].read_text() and "Traceback" not in job.logs[0].read_text()
    process = start()
    assert process.wait(120) == 0, job.logs[0].read_text()
    assert job.read() == alone


def test_what_cannot_be_shared_is_refused(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed_nmt.cli import main

    def refused(*changes: str) -> str:
        assert main([*job.words, "--output", str(job.target), "--device", "cpu", *changes]) == 2
        return capsys.readouterr().err

    for changes, named in (
        (("--workers", "99999"), "--workers is 99999"),
        (("--workers", "2", "--input", "-"), "--input is -"),
        (("--workers", "2", "--device", "cuda"), "--workers .* --device is cuda"),
    ):
        assert re.search(named, refused(*changes))
