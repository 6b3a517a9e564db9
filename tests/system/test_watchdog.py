"""If a rank dies, stops, hangs or fails, the others end in bounded time and name the rank, its host and its task."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.errors import EXIT_RANK_LOST
from tests.commands import await_until, log_of, train_words
from tests.programs import Program
from tests.support import ROOT, free_port, rank_environment, run_ranks

RANKS = 3
WORKER = str(ROOT / "tests/system/troubled_worker.py")
ENDLESS = ["engine.name=plain", "training.max_updates=100000", "training.validate_every=100000"]
ENDLESS += ["training.save_every=5", "validation.metrics=[]", "collapse.every=0"]
Start = Callable[..., list[Program]]


@pytest.fixture
def start(data: Path, small: list[str], tmp_path: Path) -> Iterator[Start]:
    """A function that starts the ranks of an endless run."""
    processes: list[Program] = []

    def begin(*settings: str, trouble: str = "-1:0:none") -> list[Program]:
        port = free_port()
        words = train_words(data, tmp_path / "run", *small, *ENDLESS, "engine.silent_s=3", *settings)
        for rank in range(RANKS):
            environment = {**rank_environment(rank, RANKS, port, tmp_path), "TROUBLE": trouble}
            processes.append(Program([WORKER, *words], environment, tmp_path / f"rank{rank}.log"))
        return processes

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def saved(tmp_path: Path) -> None:
    """Wait until the run has saved a checkpoint."""
    deadline = time.monotonic() + 200
    while not (tmp_path / "run/checkpoints/latest").exists():
        assert time.monotonic() < deadline, (tmp_path / "rank0.log").read_text()
        time.sleep(0.1)
    time.sleep(2)  # a few heartbeats


def said(tmp_path: Path, rank: int) -> str:
    return (tmp_path / f"rank{rank}.log").read_text()


def failure(tmp_path: Path) -> dict[str, Any]:
    """Return the only event of a failure."""
    (event,) = (event for event in log_of(tmp_path / "run", "events") if event["event"] == "failure")
    return event


def ends(processes: list[Program], within: float) -> list[int]:
    deadline = time.monotonic() + within
    return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_that_is_gone_or_stopped_is_named(
    start: Start, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    processes = start()
    saved(tmp_path)
    processes[rank].send_signal(number)
    assert ends([process for process in processes if process is not processes[rank]], 60) == [EXIT_RANK_LOST] * 2
    log = (tmp_path / "run/logs/rank-2.log").read_text()
    if rank == 0:
        assert "rank 0, which hosts the TCP store, is gone or stopped" in log
        return
    pattern = r"rank 1 is gone or stopped: no heartbeat for 3 s; it was last in .*update \d+.* on "
    for text in (said(tmp_path, 0), failure(tmp_path)["text"], log):
        assert re.search(pattern, text), text
    assert "start the same command again to resume from the last checkpoint" in said(tmp_path, 0)


@pytest.mark.parametrize(
    ("setting", "trouble", "pattern"),
    [
        (
            "engine.stuck_s=4",
            "2:7:hang",
            r"rank 2 is stuck in update 7, micro-batch 1 of \d+, .*engine/\w+\.py:\d+",
        ),
        (
            "engine.timeout_s=10",
            "0:5:disk",
            r"rank 0 is stuck in .* update 5 to \S+/checkpoints, .*saving\.py:\d+",
        ),
    ],
    ids=["update", "disk"],
)
def test_a_rank_that_hangs_is_named_with_its_task(
    start: Start, tmp_path: Path, setting: str, trouble: str, pattern: str
) -> None:
    assert ends(start(setting, trouble=trouble), 120) == [EXIT_RANK_LOST] * RANKS
    assert re.search(pattern, said(tmp_path, 0)), said(tmp_path, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_reports_its_error_and_is_named_by_the_others(
    start: Start, tmp_path: Path, rank: int
) -> None:
    processes = start(trouble=f"{rank}:7:raise")
    assert ends(processes, 120) == [1 if each == rank else EXIT_RANK_LOST for each in range(RANKS)]
    assert "Traceback" in said(tmp_path, rank) and "a tensor is not what it should be" in said(tmp_path, rank)
    assert "Traceback" in (tmp_path / f"run/logs/rank-{rank}.log").read_text()
    pattern = (
        rf"rank {rank} on \S+ failed in update 7, micro-batch 1 of \d+: ValueError: a tensor is not what it should be"
    )
    name = "ValueError: a tensor" if rank == 0 else f"rank {rank} on "
    assert failure(tmp_path)["text"].startswith(name) and failure(tmp_path)["update"] == 6
    other = (tmp_path / f"run/logs/rank-{1 - rank}.log").read_text()
    assert re.search(pattern, other) and "Traceback" not in other


def test_rank_0_waits_for_the_last_rank_to_leave(start: Start, tmp_path: Path) -> None:
    """Rank 0 hosts the store. Its end must not look like a loss to a rank that is still at work."""
    processes = start("training.max_updates=10", "engine.silent_s=9", trouble="1:0:linger")
    assert ends(processes, 120) == [0] * RANKS, said(tmp_path, 1)
    assert "gone or stopped" not in said(tmp_path, 1)


def test_a_second_signal_ends_the_run_at_once_with_the_last_checkpoint_intact(
    data: Path, small: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = train_words(data, run, *small, *ENDLESS, "training.save_every=3", "training.max_updates=12")
    environment = {**rank_environment(0, 1, free_port(), tmp_path), "TROUBLE": "0:5:hang"}
    log = tmp_path / "rank0.log"
    process = Program([WORKER, *words], environment, log)
    try:
        latest = run / "checkpoints/latest"
        await_until(lambda: latest.exists() and "this rank hangs" in log.read_text(), process, log)
        process.send_signal(signal.SIGTERM)
        time.sleep(2.5)  # longer than signals count as one request
        assert process.poll() is None, "the first signal waits for the end of the update, which hangs"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=300) == 128 + signal.SIGTERM
    finally:
        process.kill()
    run_ranks(["-m", "deepspeed_nmt", *words], 1, tmp_path)
    said_now = (run / "logs/rank-0.log").read_text()
    assert "resuming after update 3" in said_now and "done: 12 updates" in said_now
