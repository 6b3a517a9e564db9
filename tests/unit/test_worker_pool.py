"""Work in several processes: order, errors, and ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_nmt.data import preparation as worker_pool
from deepspeed_nmt.data.preparation import ordered_map
from deepspeed_nmt.errors import DataError

ROOT = Path(__file__).resolve().parents[2]  # workers import this file, and no other of the tests
PIECES = list(range(12))


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "ALONE_BYTES", 2)


def _size(piece: int) -> int:
    return 1


def _square(piece: int) -> tuple[int, int]:
    time.sleep(0.02 * (piece % 3))  # the first of three is done last
    return piece * piece, os.getpid()


def _refuse(piece: int) -> int:
    if piece == 5:
        raise DataError("piece 5 must be another")
    return piece


def _die(piece: int) -> int:
    if piece == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def _wait(piece: int) -> int:
    Path(f"worker.{os.getpid()}").touch()
    time.sleep(0.2)
    return piece


@pytest.mark.usefixtures("_at_once")
def test_results_come_in_order_and_pieces_are_read_as_they_are_needed() -> None:
    read: list[int] = []
    mapped = ordered_map(_square, (read.append(piece) or piece for piece in range(40)), 2, _size)
    results = [next(mapped) for _ in range(6)]
    assert len(read) <= 6 + 2 * 2 + 1, "memory is bounded: text is not read far ahead of the results"
    results += mapped
    assert [value for value, _ in results] == [piece * piece for piece in range(40)]
    assert [process == os.getpid() for _, process in results] == [True, True, *[False] * 38]


@pytest.mark.usefixtures("_at_once")
def test_an_error_is_that_of_the_first_piece_that_has_one() -> None:
    mapped = ordered_map(_refuse, PIECES, 2, _size)
    assert [next(mapped) for _ in range(5)] == PIECES[:5]
    with pytest.raises(DataError, match=r"^piece 5 must be another$"):
        next(mapped)


@pytest.mark.usefixtures("_at_once")
def test_a_worker_that_is_killed_is_reported() -> None:
    with pytest.raises(DataError, match=r"was killed, .* fewer --workers"):
        list(ordered_map(_die, PIECES, 2, _size))


_PROGRAM = """
from deepspeed_nmt.data import preparation as worker_pool
from deepspeed_nmt.interruption import interruptible
from tests.unit import test_worker_pool

if __name__ == "__main__":
    worker_pool.ALONE_BYTES = 0
    with interruptible():
        for each in worker_pool.ordered_map(test_worker_pool._wait, range(1000), 2, lambda piece: 1):
            print(each, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_no_worker_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert [program.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
        if number == signal.SIGKILL:
            program.kill()
        else:
            os.killpg(program.pid, number)  # as a terminal does
        _, errors = program.communicate(timeout=60)
    assert program.returncode == (-number if number == signal.SIGKILL else 1)
    if number != signal.SIGKILL:
        assert errors.count("Traceback") == 1 and "Interrupted" in errors, "only the parent reports the signal"
    workers = [int(path.suffix[1:]) for path in tmp_path.glob("worker.*")]
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)
