"""Runs that cannot be saved are refused, and a disk that fills up is announced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.train import disk, saving


def words(data: Path, run: Path, *settings: str) -> list[str]:
    return ["train", "--recipe", "transformer_base", "--data", str(data), "--run", str(run), *settings]


def test_a_run_without_room_is_refused_before_it_starts_and_a_finished_one_is_not(
    data: Path,
    trained: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    settings = [*small, "engine.name=plain", "validation.metrics=[]"]
    run = tmp_path / "run"
    assert main(words(data, run, *settings)) == 2
    error = capsys.readouterr().err
    assert f"{run}/checkpoints must have room for 2 more checkpoints of " in error
    assert "but its disk has 0 bytes free; free some space, or give another --run" in error
    assert main(words(data, trained, *settings)) == 0, "nothing is to be done"
    usage.free = 5 << 20
    monkeypatch.setattr(saving, "available_bytes", lambda: 0)
    capsys.readouterr()
    assert main(words(data, run, *settings, "training.keep_last=60")) == 0
    error = capsys.readouterr().err
    assert "is nearly full: it has 5.0 MiB free, room for" in error and "of the 62 checkpoints of " in error
    assert "training waits while checkpoints are written" in error
    assert (run / "checkpoints/update-0000012/manifest.json").exists()
