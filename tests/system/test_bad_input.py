"""Bad input is refused with one clear message, without a traceback and without loss of data."""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.console import setup_logging
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.run.start import recorded_data, run_lock
from deepspeed_nmt.train import checkpoint
from deepspeed_nmt.train.checkpoint import Checkpoint
from deepspeed_nmt.train.loop import TrainingLoop
from tests.commands import log_of, logged, newest, pair_words, refused, train_words
from tests.support import run_ranks
from tests.system.conftest import SMALL


@pytest.fixture(scope="module")
def first_update(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one update."""
    run = tmp_path_factory.mktemp("first") / "run"
    assert main(train_words(data, run, *SMALL, "training.max_updates=1")) == 0
    return run


@pytest.fixture
def run(first_update: Path, tmp_path: Path) -> Path:
    """A copy of the run of one update."""
    return shutil.copytree(first_update, tmp_path / "run")


@pytest.fixture(scope="module")
def other(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of other sentences with the same vocabulary."""
    out = tmp_path_factory.mktemp("other") / "data"
    pairs = pair_words(data.parent / "text", train="valid", valid="valid")
    assert main(["prepare", "--out", str(out), "--vocab-from", str(data), *pairs]) == 0
    return out


def test_a_failed_start_leaves_no_settings_behind(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, wrong = tmp_path / "run", ["batch.micro_tokens=10", "model.ffn_dim=128", "optimizer.beta2=0.9"]
    refused(
        train_words(data, run, *small, "model.heads=5", "optimizer.lrr=1"), capsys, "2 settings", "'optimizer.lr'"
    )
    refused(train_words(tmp_path / "nowhere", run, *small), capsys, "nowhere", "prepare")
    assert not run.exists()
    refused(train_words(data, run, *small, *wrong), capsys, "batch.micro_tokens is 10")
    run.mkdir(exist_ok=True)
    (run / "origin.json").write_text("{}")
    assert main(train_words(data, run, *small, "training.max_updates=1")) == 0
    assert "beta2: 0.98" in (run / "config.yaml").read_text() and not (run / "origin.json").exists()


def test_data_and_settings_changed_since_the_run_began(
    data: Path, run: Path, other: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(train_words(other, run, *small), capsys, str(other), "no longer")
    refused(train_words(data, run, *small, "model.ffn_dim=128"), capsys, "model.ffn_dim", "64")
    copy = shutil.copytree(data, tmp_path / "copy")
    corpus = next(copy.glob("train.source.uint*.bin"))
    corpus.write_bytes(corpus.read_bytes()[::-1])
    refused(train_words(copy, tmp_path / "new", *small), capsys, corpus.name, "other content")
    (tmp_path / "data.json").write_text(
        '{"path": "/nowhere/data", "fingerprint": "0", "text": {}, "common_text": {}}'
    )
    with pytest.raises(DataError, match=r"/nowhere/data.* --data"):
        recorded_data(tmp_path)


def test_whatever_ends_the_comparison_with_hashes_is_its_result(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first checkpoint would wait for ever."""

    def verify(directory: DataDirectory, split: str = "") -> None:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(DataDirectory, "verify_hashes", verify)
    with pytest.raises(ValueError, match="a fault of the program"):
        TrainingData([DataOption(data)]).verify_hashes().result(60.0)


@pytest.mark.parametrize("updates", [1, 1000])
def test_damage_that_is_found_while_training_ends_the_run_before_a_checkpoint(
    data: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    updates: int,
) -> None:
    """Hashes of large data take minutes: the first checkpoint waits for them, and training ends at a difference."""
    run, found = tmp_path / "run", threading.Event()
    until = "_save" if updates == 1 else "_values"  # of the first line of the log
    method = getattr(TrainingLoop, until)

    def reached(loop: TrainingLoop, *arguments: Any, **options: Any) -> Any:
        found.set()
        return method(loop, *arguments, **options)

    def verify(directory: DataDirectory, split: str = "") -> None:
        if not split:
            found.wait(60.0)
            time.sleep(0.2)
            raise DataError(f"{directory.path} is damaged")

    monkeypatch.setattr(TrainingLoop, until, reached)
    monkeypatch.setattr(DataDirectory, "verify_hashes", verify)
    words = [f"training.max_updates={updates}", "training.validate_every=1000", "training.log_every=1"]
    refused(train_words(data, run, *small, *words), capsys, f"{data} is damaged")
    assert 1 <= len(logged(run, "train/loss")) <= min(updates, 500)
    assert not any((run / "checkpoints").glob("update-*"))


def test_only_one_rank_reports_an_error_common_to_all(
    data: Path, run: Path, tmp_path: Path, small: list[str]
) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    text = (copy / "valid.target").read_bytes()
    command = ["-m", "deepspeed_nmt", *train_words(copy, run, *small)]

    def harm_checkpoint() -> None:
        (run / "checkpoints" / "update-0000001" / "state.json").unlink()

    def harm_data() -> None:
        (copy / "valid.target").write_bytes(text[:-2] + b"~" + text[-1:])

    for harm, message in ((harm_checkpoint, "all checkpoints in"), (harm_data, "valid.target")):
        harm()
        outputs = run_ranks(command, 2, tmp_path, status=2)
        assert message in outputs[0] and "Traceback" not in outputs[0] + outputs[1]
        assert "[rank 1]" not in outputs[1]


@pytest.mark.parametrize("what", ["data", "settings"])
def test_hosts_with_other_files_are_refused(
    data: Path, other: Path, tmp_path: Path, small: list[str], what: str
) -> None:
    (tmp_path / "data-0").symlink_to(data)
    (tmp_path / "data-1").symlink_to(other)
    for rank, log_every in enumerate((4, 2)):
        (tmp_path / f"config-{rank}.yaml").write_text(f"training: {{log_every: {log_every}}}")
    # Each rank sees the files of its host, which a shell chooses by the rank.
    settings = [word for word in small if not word.startswith("training.log_every")]
    words = train_words(tmp_path / ("data-RANK" if what == "data" else "data-0"), tmp_path / "run", *settings)
    words += ["--config", str(tmp_path / ("config-RANK.yaml" if what == "settings" else "config-0.yaml"))]
    (tmp_path / "host.py").write_text(
        "import os, sys\nfrom deepspeed_nmt.cli import main\n"
        "sys.exit(main([word.replace('RANK', os.environ['RANK']) for word in sys.argv[1:]]))\n"
    )
    outputs = run_ranks([str(tmp_path / "host.py"), *words], 2, tmp_path, status=2)
    assert "rank 0" in outputs[1] and ("training" if what == "settings" else "data") in outputs[1]
    assert not (tmp_path / "run").exists()


def test_training_continues_on_a_full_disk(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, calls = tmp_path / "run", checkpoint.save_file, []

    def full(tensors: object, path: Path) -> None:
        calls.append(path)
        if len(calls) == 3 or len(calls) > 5:  # the first file of the second checkpoint, and those of a later start
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert main(train_words(data, run, *small)) == 0
    error = capsys.readouterr().err
    assert "the checkpoint of update 8" in error and "No space left on device" in error
    assert "update 4" in error and "training continues" in error
    (unsaved,) = (event for event in log_of(run, "events") if event["event"] == "unsaved")
    assert unsaved["update"] == 8 and "the checkpoint of update 8" in unsaved["text"]
    assert newest(run).progress.update == 12 and len(calls) == 5
    error = refused(train_words(data, run, *small, "training.max_updates=14"), capsys, status=1)
    assert error.count("the checkpoint of update 14") == 1 and "training continues" not in error
    assert Checkpoint(run / "checkpoints" / "update-0000012").resumable


def test_translate_and_average_name_missing_files(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["translate", "--run", str(run), "--output", str(tmp_path / "out"), "--input"]
    source = str(data.parent / "text" / "test.en")
    refused([*words[:2], str(tmp_path / "none"), *words[3:], source], capsys, str(tmp_path / "none"), "train")
    refused([*words, str(tmp_path / "none")], capsys, str(tmp_path / "none"))
    refused([*words, source, "--checkpoint", "average"], capsys, "average")
    refused([*words, source, "--length-penalty", "long"], capsys, "--length-penalty", "gnmt:A")
    refused(["average", "--run", str(run), "--last", "5"], capsys, "--last", "5", "1")
    shutil.rmtree(run / "checkpoints")
    refused([*words, source], capsys, "checkpoint", "train first")


def test_a_run_in_use_is_refused(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with run_lock(run):
        refused(train_words(data, run, *small), capsys, str(run), "is training in", "process ")
        assert not (run / "config.yaml").exists()
    assert not run.exists()
    run.write_text("")
    refused(train_words(data, run), capsys, "--run", str(run), "is a file")


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

    monkeypatch.setattr("deepspeed_nmt.files.time.sleep", sleep)
    assert main(train_words(data, tmp_path / "run", *small, "training.max_updates=1")) == 0
    assert asleep[:2] == [10.0, 10.0]
    assert "waiting, 300 s at most" in capsys.readouterr().err


def test_a_translation_replaces_the_output_only_when_complete(
    data: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, text = tmp_path / "out", data.parent / "text" / "test.en"
    out.write_text(before := "an older translation\n")
    words = ["translate", "--run", str(run), "--checkpoint", "last", "--input", str(text), "--beam", "1", "--output"]

    def interrupted(*_: object, **__: object) -> Iterator[object]:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.api.translate_lines", interrupted)
        refused([*words, str(out)], capsys, status=130)
    assert out.read_text(encoding="utf-8") == before and not list(tmp_path.glob(".out*"))
    refused([*words, str(tmp_path / "no" / "out")], capsys, str(tmp_path / "no"))
    assert main([*words, str(out)]) == 0
    assert len(out.read_text(encoding="utf-8").split("\n")) == len(text.read_text(encoding="utf-8").split("\n"))


def test_a_run_directory_that_cannot_be_written(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True).returncode != 0:
        pytest.skip("needs root: a file system that is read-only for everybody")
    words = train_words(data, place / "run", *small)
    try:
        assert main([*words, "training.max_updates=4"]) == 0
        setup_logging()  # closes the log, like the end of a process
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        refused(words, capsys, "Read-only file system", str(place / "run"))
        subprocess.run(["mount", "-o", "remount,rw", place], check=True)
        assert main(words) == 0, "nothing was lost"
    finally:
        subprocess.run(["umount", "-l", place], check=True)
