"""Bad input is refused with one clear message, without a traceback and without loss of data."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.console import setup_logging
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.run.directory import recorded_data
from deepspeed_nmt.run.lock import run_lock
from deepspeed_nmt.train import store
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.support import run_ranks


def refused(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 2) -> str:
    """Return the message with which a command is refused."""
    capsys.readouterr()
    assert main(words) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def train_words(data: Path, run: Path, *settings: str) -> list[str]:
    return ["train", "--data", str(data), "--run", str(run), *settings]


def test_all_wrong_settings_are_named_and_no_run_is_made(
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
    assert "error: model.ffn_dim must stay 64 once" in error
    assert "without --recipe, --config and this setting the run keeps its own" in error


def test_only_one_rank_reports_an_error_common_to_all(data: Path, tmp_path: Path, small: list[str]) -> None:
    run, copy = tmp_path / "run", tmp_path / "data"
    command = ["-m", "deepspeed_nmt", *train_words(copy, run, *small)]

    def said(message: str, *settings: str) -> None:
        outputs = run_ranks([*command, *settings], 2, tmp_path, timeout=60, status=2)
        assert message in outputs[0] and "Traceback" not in outputs[0] + outputs[1]
        assert "[rank 1]" not in outputs[1]

    shutil.copytree(data, copy)
    said("heads must divide dim", "model.heads=5")
    assert main(train_words(copy, run, *small, "training.max_updates=1")) == 0
    (run / "checkpoints" / "update-0000001" / "state.json").unlink()
    said("all checkpoints in")
    text = (copy / "valid.target").read_bytes()
    (copy / "valid.target").write_bytes(text[:-2] + b"~" + text[-1:])
    said("valid.target has other content than was written")


@pytest.mark.parametrize("what", ["data", "settings"])
def test_hosts_with_other_files_are_refused(data: Path, tmp_path: Path, small: list[str], what: str) -> None:
    text, config, other = data.parent / "text", tmp_path / "config-0.yaml", tmp_path / "data-1"
    sides = [f"--{split}-{side}" for split in ("train", "valid") for side in ("source", "target")]
    pairs = [
        word
        for pair in zip(sides, 2 * [str(text / "valid.en"), str(text / "valid.de")], strict=True)
        for word in pair
    ]
    assert main(["prepare", "--out", str(other), "--vocab-from", str(data), *pairs]) == 0
    (tmp_path / "data-0").symlink_to(data)
    config.write_text("training: {log_every: 4}")
    (tmp_path / "config-1.yaml").write_text("training: {log_every: 2}")
    # Each rank sees the files of its host, which a shell chooses by the rank.
    settings = [each for each in small if not each.startswith("training.log_every")]
    words = train_words(tmp_path / ("data-RANK" if what == "data" else "data-0"), tmp_path / "run", *settings)
    words += ["--config", str(tmp_path / ("config-RANK.yaml" if what == "settings" else "config-0.yaml"))]
    (tmp_path / "host.py").write_text(
        "import os, sys\nfrom deepspeed_nmt.cli import main\n"
        "sys.exit(main([word.replace('RANK', os.environ['RANK']) for word in sys.argv[1:]]))\n"
    )
    outputs = run_ranks([str(tmp_path / "host.py"), *words], 2, tmp_path, timeout=60, status=2)
    assert f"all ranks must have the same {what}, but" in outputs[1] and not (tmp_path / "run").exists()
    if what == "settings":
        assert "differs from rank 0 in training;" in outputs[1]


def test_nan_is_skipped_then_rolled_back_then_stops_the_run(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert main(train_words(data, run, *small, "training.max_updates=4")) == 0
    sound = LabelSmoothed.__call__

    def broken(self: LabelSmoothed, *arguments: object) -> object:
        output = sound(self, *arguments)  # type: ignore[arg-type]
        return output._replace(loss=output.loss * torch.nan)

    monkeypatch.setattr(LabelSmoothed, "__call__", broken)
    error = refused(train_words(data, run, *small, "training.max_skipped=3"), capsys, status=1)
    assert "update 5 skipped: loss is not finite" in error and "3 updates in a row, up to update 7" in error
    assert error.count("rolling back from update 7 to 4") == 2 and "2 rollbacks did not help" in error
    assert "Lower optimizer.lr" in error
    assert [path.name for path in (run / "checkpoints").glob("update-*")] == ["update-0000004"]
    for weight in Checkpoint(run / "checkpoints" / "update-0000004").weights().values():
        assert torch.isfinite(weight).all()
    error = refused(train_words(data, tmp_path / "new", *small, "training.max_skipped=3"), capsys, status=1)
    assert "up to update 3, had no finite gradient" in error and "there is no checkpoint from before them" in error


def test_training_continues_on_a_full_disk(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, calls = tmp_path / "run", store.save_file, []

    def full(tensors: object, path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:  # the first file of the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "save_file", full)
    capsys.readouterr()
    assert main(train_words(data, run, *small)) == 0
    error = capsys.readouterr().err
    assert "the checkpoint of update 8 could not be written" in error and "No space left on device" in error
    assert "last good one is of update 4" in error and "training continues" in error
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (unsaved,) = (each for each in events if each["event"] == "unsaved")
    assert unsaved["update"] == 8 and "the checkpoint of update 8 could not be written" in unsaved["text"]
    assert sorted(p.name for p in (run / "checkpoints").glob("update-*"))[-1] == "update-0000012"
    monkeypatch.setattr(store, "save_file", lambda *_: _raise())
    error = refused(train_words(data, run, *small, "training.max_updates=14"), capsys, status=1)
    assert error.count("the checkpoint of update 14 could not be written") == 1 and "training continues" not in error
    assert Checkpoint(run / "checkpoints" / "update-0000012").resumable


def _raise() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_data_of_a_run_that_has_moved(tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"path": "/nowhere/data", "fingerprint": "0"}')
    with pytest.raises(DataError, match=r"there is no directory /nowhere/data; give the place of its data by --data"):
        recorded_data(tmp_path)


def test_translate_and_average_name_missing_files(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["translate", "--run", str(run), "--output", str(tmp_path / "out"), "--input"]
    assert "must be a directory made by `train`" in refused([*words, str(data / "valid.source")], capsys)
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    assert "must be a text file, but does not exist" in refused([*words, str(tmp_path / "none")], capsys)
    source = str(data.parent / "text" / "test.en")
    assert "has no average" in refused([*words, source, "--checkpoint", "average"], capsys)
    assert "beam" in refused([*words, source, "--beam", "0"], capsys)
    assert "--length-penalty must be gnmt:A" in refused([*words, source, "--length-penalty", "long"], capsys)
    assert "--last must be between 1 and the 1 checkpoints" in refused(
        ["average", "--run", str(run), "--last", "5"], capsys
    )
    shutil.rmtree(run / "checkpoints")
    assert "must hold a checkpoint, but is empty; train first" in refused([*words, source], capsys)


def test_a_failed_start_leaves_no_settings_behind(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    refused(
        train_words(data, run, *small, "batch.micro_tokens=10", "model.ffn_dim=128", "optimizer.beta2=0.9"), capsys
    )
    (run / "origin.json").write_text("{}")
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    assert "beta2: 0.98" in (run / "config.yaml").read_text() and not (run / "origin.json").exists()


def test_a_misspelt_configuration_of_deepspeed_makes_no_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", "--recipe", "sample_small", "--data", str(data), "--run", str(run)]
    assert main([*words, "engine.device=cpu", "engine.ds_config=zero3_ofload"]) == 2
    assert "did you mean 'zero3_offload'?" in capsys.readouterr().err and not run.exists()


def test_a_run_in_use_is_refused(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with run_lock(tmp_path / "run"):
        error = refused(train_words(data, tmp_path / "run", *small), capsys)
        assert "--run must not be in use, but process " in error and not (tmp_path / "run/config.yaml").exists()
    assert not (tmp_path / "run").exists()
    assert main(train_words(data, tmp_path / "run", *small, "training.max_updates=1")) == 0


def test_a_requeued_slurm_job_waits_for_the_lock_of_a_lost_host(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems keep the lock for a while."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    lock = ExitStack()
    lock.enter_context(run_lock(tmp_path / "run"))
    asleep: list[float] = []

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        if len(asleep) == 2:
            lock.close()

    monkeypatch.setattr("deepspeed_nmt.locks.time.sleep", sleep)
    assert main(train_words(data, tmp_path / "run", *small, "training.max_updates=1")) == 0
    assert asleep[:2] == [10.0, 10.0]
    said = capsys.readouterr().err
    assert "is still locked by process " in said and "waiting, 300 s at most" in said


def test_missing_manifests_do_not_start_a_new_run(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(train_words(data, run, *small, "training.max_updates=8")) == 0
    second = run / "checkpoints" / "update-0000008" / "manifest.json"
    second.write_text("{}")
    assert main(train_words(data, run, *small, "training.max_updates=9")) == 0
    assert "using update-0000004, because update-0000008 is damaged" in capsys.readouterr().err
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    assert "all checkpoints in" in refused(train_words(data, run, *small), capsys)


def test_a_corpus_changed_in_place(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    corpus = next(copy.glob("train.source.uint*.bin"))
    corpus.write_bytes(corpus.read_bytes()[::-1])
    error = refused(train_words(copy, tmp_path / "run", *small), capsys)
    assert f"{corpus.name} has other content than was written" in error


def test_the_run_is_a_file(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("")
    assert "--run must be a directory, but" in refused(train_words(data, tmp_path / "run"), capsys)


def test_an_empty_validation_set(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, empty = data.parent / "text", tmp_path / "empty"
    empty.write_text("")
    words = ["prepare", "--train-source", str(text / "train.en"), "--train-target", str(text / "train.de")]
    words += ["--valid-source", str(empty), "--valid-target", str(empty), "--vocab-size", "500"]
    error = refused([*words, "--out", str(tmp_path / "out")], capsys)
    assert "the validation set must have a sentence" in error
    assert not (tmp_path / "out").exists()


def test_a_translation_replaces_the_output_only_when_complete(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    text = data.parent / "text" / "test.en"
    out.write_text(before := "an older translation\n")
    words = ["translate", "--run", str(run), "--checkpoint", "last", "--input", str(text), "--beam", "1", "--output"]

    def interrupted(*_: object, **__: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.api.translate_lines", interrupted)
        assert refused([*words, str(out)], capsys, status=130)
    assert out.read_text(encoding="utf-8") == before and not list(tmp_path.glob(".out*"))
    assert "which is no directory" in refused([*words, str(tmp_path / "no" / "out")], capsys)
    assert main([*words, str(out)]) == 0
    lines = [path.read_text(encoding="utf-8").split("\n") for path in (text, out)]
    assert len(lines[0]) == len(lines[1])


def test_a_run_directory_that_cannot_be_written(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("needs root: a file system that is read-only for everybody")
    words = ["train", "--data", str(data), "--run", str(place / "run"), *small]
    try:
        assert main([*words, "training.max_updates=4"]) == 0
        setup_logging()  # closes the log, like the end of a process
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        capsys.readouterr()
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "Read-only file system" in said and str(place / "run") in said and "Traceback" not in said
        subprocess.run(["mount", "-o", "remount,rw", place], check=True)
        assert main(words) == 0, "nothing was lost"
    finally:
        subprocess.run(["umount", "-l", place], check=True)
