"""A job that is killed at random moments, half of them while it writes a checkpoint, loses only time.

Checkpoints are written in the background to a slow disk, so that updates go on meanwhile.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import Program
from tests.support import ROOT, assert_same, free_port, rank_environment, run_ranks

RANKS = 2
SLOW_DISK = {"SLOW_DISK_S": "0.06"}
WORKER = str(ROOT / "tests/system/slow_disk.py")


class Run:
    """A run on two ranks that is restarted repeatedly."""

    def __init__(self, data: Path, path: Path, scratch: Path, *settings: str) -> None:
        self.path, self._scratch = path, scratch
        words = ["train", "--recipe", "transformer_base", "--data", str(data), "--run", str(path), *settings]
        self.command = [WORKER, *words, "engine.name=plain", "training.save_every=4"]
        self.command += ["training.validate_every=100000", "validation.metrics=[]", "collapse.every=0"]

    def updates(self) -> list[int]:
        """Return the updates of the complete checkpoints."""
        names = [path.name for path in self.path.glob("checkpoints/update-*")]
        return sorted(int(name.removeprefix("update-")) for name in names if re.fullmatch(r"update-\d+", name))

    def saving(self) -> bool:
        """Return True if a checkpoint is being written."""
        return any(not re.fullmatch(r"update-\d+", path.name) for path in self.path.glob("checkpoints/*update-*"))

    def killed(self, during_save: bool, delay: float) -> None:
        """Start the job, wait until it gets further than before, and kill all its processes at once."""
        before = max(self.updates(), default=0)
        port = free_port()
        logs = [self._scratch / f"rank{rank}.log" for rank in range(RANKS)]
        processes = []
        for rank, log in enumerate(logs):
            environment = {**rank_environment(rank, RANKS, port, self._scratch), **SLOW_DISK}
            processes.append(Program([*self.command, "training.max_updates=100000"], environment, log))
        try:
            deadline = time.monotonic() + 200
            while max(self.updates(), default=0) <= before or (during_save and not self.saving()):
                assert all(process.poll() is None for process in processes), logs[0].read_text()
                assert time.monotonic() < deadline, logs[0].read_text()
                if max(self.updates(), default=0) <= before:
                    time.sleep(0.01)
            time.sleep(delay)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_equal_to_the_bit(
    kills: int, data: Path, small: list[str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dice = random.Random(int(os.environ.get("KILL_SEED", "1")))
    run = Run(data, tmp_path / "run", tmp_path, *small)
    caught = 0
    for number in range(kills):
        during_save = number % 2 == 0
        run.killed(during_save, dice.uniform(0.0, 0.1 if during_save else 0.4))
        caught += run.saving()
    record_property(f"of {kills} kills hit a checkpoint that was being written:", caught)
    assert caught >= kills / 10, "too few kills hit a checkpoint that was being written"
    end = max(run.updates()) + 6
    last = f"training.max_updates={end}"
    run_ranks([*run.command, last], RANKS, tmp_path, **SLOW_DISK)
    straight = Run(data, tmp_path / "straight", tmp_path, *small, "training.save=blocking")
    run_ranks([*straight.command, last], RANKS, tmp_path, SLOW_DISK_S="0")
    assert_same(run.path, straight.path, end)
    assert not run.saving(), "no incomplete checkpoint is left"
