"""Collectives, agreement on errors, and joining a world."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel import world
from tests.support import ROOT, run_ranks


@pytest.mark.parametrize("ranks", [1, 3])
def test_collectives(ranks: int, tmp_path: Path) -> None:
    outputs = run_ranks([str(ROOT / "tests/distributed/collectives_worker.py")], ranks, tmp_path)
    if ranks == 1:
        return  # the error propagates to the command line, which reports it
    who_said = {
        what: [rank for rank, output in enumerate(outputs) if what in output]
        for what in ("error: only rank 0", "error: only the last rank", "stopped: all alike")
    }
    assert list(who_said.values()) == [[0], [ranks - 1], [0]]


def test_slurm_may_show_each_task_only_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    with pytest.raises(ConfigError, match=r"local rank 3 .* sees 1"):
        world.gpu_of(3)
    for shown in ("1", "v100:1"):
        monkeypatch.setenv("SLURM_GPUS_PER_TASK", shown)
        assert world.gpu_of(3) == 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert world.gpu_of(3) == 3
