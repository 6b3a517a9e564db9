"""Bad input gets one clear message, no traceback, and nothing is lost."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.train import checkpoint
from deepspeed_nmt.train.checkpoint import Checkpoint


def refused(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """The message a command is refused with."""
    capsys.readouterr()
    assert main(words) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def train_words(data: Path, run: Path, *settings: str) -> list[str]:
    return ["train", "--data", str(data), "--run", str(run), *settings]


def test_wrong_settings_are_all_named_and_no_run_is_made(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(train_words(data, tmp_path / "run", "model.heads=5", "optimizer.lrr=1"), capsys)
    assert "2 settings are wrong" in error and "heads must divide dim" in error
    assert "did you mean 'optimizer.lr'?" in error
    assert not (tmp_path / "run").exists()


def test_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(train_words(tmp_path / "nothing", tmp_path / "run"), capsys)
    assert "must be a directory made by `prepare`, but does not exist" in error


def test_a_sentence_longer_than_micro_tokens(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(train_words(data, tmp_path / "run", *small, "batch.micro_tokens=10"), capsys)
    assert "batch.micro_tokens must be at least the longest training sentence" in error and "but is 10" in error


def test_data_changed_since_the_run_began(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, text = tmp_path / "run", data.parent / "text"
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    other = tmp_path / "other"
    sides = [f"--{split}-{side}" for split in ("train", "valid") for side in ("source", "target")]
    files = [str(text / name) for name in ("valid.en", "valid.de", "valid.en", "valid.de")]
    pairs = [word for pair in zip(sides, files, strict=True) for word in pair]
    assert main(["prepare", "--out", str(other), "--vocab-from", str(data), *pairs]) == 0
    error = refused(train_words(other, run, *small), capsys)
    assert "but it has changed; restore it, or start a new run" in error
    error = refused(train_words(data, run, *small, "model.ffn_dim=128"), capsys)
    assert "model must stay" in error and "start a new run instead" in error


def test_nan_is_skipped_by_name_and_then_stops(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(train_words(data, run, *small, "training.max_updates=4")) == 0
    sound = LabelSmoothed.__call__

    def broken(self: LabelSmoothed, model: object, batch: object) -> object:
        output = sound(self, model, batch)  # type: ignore[arg-type]
        return type(output)(loss=output.loss * torch.nan, nll=output.nll)

    monkeypatch.setattr(LabelSmoothed, "__call__", broken)
    error = refused(train_words(data, run, *small, "training.max_skipped=3"), capsys, status=1)
    assert "update 5 skipped: loss is not finite" in error and "3 updates in a row, up to update 7" in error
    assert "Lower optimizer.lr" in error
    assert [path.name for path in (run / "checkpoints").glob("update-*")] == ["update-0000004"]
    for weight in Checkpoint(run / "checkpoints" / "update-0000004").weights().values():
        assert torch.isfinite(weight).all()


def test_a_full_disk_is_survived_until_the_end(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, calls = tmp_path / "run", checkpoint.save_file, []

    def full(tensors: object, path: Path) -> None:
        calls.append(path)
        if len(calls) in (3, 4):  # the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_file", full)
    capsys.readouterr()
    assert main(train_words(data, run, *small)) == 0
    error = capsys.readouterr().err
    assert "the checkpoint of update 8 could not be written" in error and "No space left on device" in error
    assert "last good one is of update 4" in error and "training goes on" in error
    assert sorted(p.name for p in (run / "checkpoints").glob("update-*"))[-1] == "update-0000012"
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: _raise())
    error = refused(train_words(data, run, *small, "training.max_updates=14"), capsys, status=1)
    assert "could not be written" in error
    assert Checkpoint(run / "checkpoints" / "update-0000012").resumable


def _raise() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_translate_and_average_say_what_is_missing(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["translate", "--run", str(run), "--output", str(tmp_path / "out"), "--input"]
    assert "must be a directory made by `train`" in refused([*words, "x"], capsys)
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    assert "--input must be a text file" in refused([*words, str(tmp_path / "none")], capsys)
    source = str(data.parent / "text" / "test.en")
    assert "has no average" in refused([*words, source, "--checkpoint", "average"], capsys)
    assert "beam" in refused([*words, source, "--beam", "0"], capsys)
    assert "length_penalty" in refused([*words, source, "--length-penalty", "long"], capsys)
    assert "--last must be between 1 and the 1 checkpoints" in refused(
        ["average", "--run", str(run), "--last", "5"], capsys
    )
    shutil.rmtree(run / "checkpoints")
    assert "has no best checkpoint" in refused([*words, source], capsys)
