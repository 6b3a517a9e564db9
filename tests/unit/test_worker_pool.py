"""Work in several processes: order, errors, and ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_nmt.data.tasks import worker_pool
from deepspeed_nmt.errors import DataError

ROOT = Path(__file__).resolve().parents[2]  # workers import this file, and no other of the tests
ITEMS = list(range(12))


def _square(item: int) -> tuple[int, int]:
    time.sleep(0.02 * (item % 3))  # the first of three is done last
    return item * item, os.getpid()


def _refuse(item: int) -> int:
    if item == 5:
        raise DataError("item 5 must be another")
    if item > 5:
        time.sleep(300)
    return item


def _die(item: int) -> int:
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def _wait(item: int) -> int:
    Path(f"worker.{os.getpid()}").touch()
    while len(list(Path().glob("worker.*"))) < 2:  # until the other one works, too
        time.sleep(0.05)
    time.sleep(0.2)
    return item


def test_results_come_in_order_and_a_single_item_is_worked_on_here() -> None:
    with worker_pool(2) as run:
        assert list(run(_square, [3])) == [(9, os.getpid())]
        results = [*run(_square, ITEMS), *run(_square, ITEMS)]
    assert [value for value, _ in results] == 2 * [item * item for item in ITEMS]
    assert os.getpid() not in {process for _, process in results}
    with worker_pool(1) as run:
        assert {process for _, process in run(_square, ITEMS)} == {os.getpid()}


def test_an_error_is_that_of_the_first_item_that_has_one_and_ends_the_workers() -> None:
    before = time.monotonic()
    with pytest.raises(DataError, match=r"^item 5 must be another$"), worker_pool(2) as run:
        results = run(_refuse, ITEMS)
        assert [next(results) for _ in range(5)] == ITEMS[:5]
        next(results)
    assert time.monotonic() - before < 60, "others are not waited for"


def test_a_worker_that_is_killed_is_reported() -> None:
    with pytest.raises(DataError, match=r"was killed, .* fewer --workers"), worker_pool(2) as run:
        list(run(_die, ITEMS))


_PROGRAM = """
from deepspeed_nmt.data.tasks import worker_pool
from deepspeed_nmt.interruption import interruptible
from tests.unit import test_worker_pool

if __name__ == "__main__":
    with interruptible(), worker_pool(2) as run:
        for each in run(test_worker_pool._wait, range(1000)):
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


def _environment(item: int) -> str:
    time.sleep(0.3)  # so that each worker gets one
    return os.environ["CUDA_VISIBLE_DEVICES"]


def test_each_worker_has_its_own_environment() -> None:
    with worker_pool(2, [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]) as run:
        assert {*run(_environment, ITEMS)} == {"4", "7"}
