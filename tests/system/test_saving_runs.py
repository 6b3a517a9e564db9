"""Runs that cannot be saved are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.parallel.hardware import HostMemory
from deepspeed_nmt.train import saving
from tests.commands import train_words


def test_a_run_without_room_is_refused_before_it_starts_and_a_finished_one_is_not(
    data: Path,
    trained: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    settings = [*small, "engine.name=plain", "validation.metrics=[]"]
    run = tmp_path / "run"
    assert main(train_words(data, run, "--recipe", "transformer_base", *settings)) == 2
    error = capsys.readouterr().err
    assert f"the disk of {run}/checkpoints has 0 bytes free, and 2 more checkpoints of " in error
    assert "give another --run" in error
    assert not run.exists(), "nothing is left that was not there"
    assert main(train_words(data, trained, "--recipe", "transformer_base", *settings)) == 0, "nothing is to be done"
    words = train_words(data, trained, "--recipe", "transformer_base", *settings, "--restart")
    assert main(words) == 2 and "has 0 bytes free, and 2 more checkpoints of " in capsys.readouterr().err
    usage.free = 5 << 20
    monkeypatch.setattr(saving, "host_memory", lambda: HostMemory(0, 0, False))
    capsys.readouterr()
    assert main(train_words(data, run, "--recipe", "transformer_base", *settings, "training.keep_last=60")) == 0
    error = capsys.readouterr().err
    assert "training waits while checkpoints are written" in error
    last = run / "checkpoints/update-0000012"
    for path in run.glob("checkpoints/update-*"):  # a process was killed while it replaced the only checkpoint
        path.rename(last.with_name(".update-0000012.old-01234567")) if path == last else shutil.rmtree(path)
    assert main(train_words(data, run, "--recipe", "transformer_base", *settings, "training.keep_last=60")) == 0
    error = capsys.readouterr().err
    assert f"{last} is restored" in error and "done: 12 updates" in error and "update 12/12" not in error
