"""Files of a run that decide its outputs: verified, restored where they are lost, or refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.manifest import write_record
from deepspeed_nmt.run import directory as run_directory
from deepspeed_nmt.run import manifest as run_manifest
from deepspeed_nmt.run.manifest import replace_files, verify_run
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.support import assert_same
from tests.system.conftest import SMALL

SETTINGS = [*SMALL, "training.max_updates=4", "training.validate_every=2", "training.save_every=2"]


@pytest.fixture(scope="module")
def original(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A trained run and its data directory, which no test changes, both in one directory."""
    directory = tmp_path_factory.mktemp("original")
    shutil.copytree(data, directory / "data")
    assert main(["train", "--data", str(directory / "data"), "--run", str(directory / "run"), *SETTINGS]) == 0
    (directory / "data").rename(directory / "moved")
    return directory / "run", directory / "moved"


@pytest.fixture
def run(original: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the run, beside a copy of its data."""
    run, data = original
    shutil.copytree(run, tmp_path / "run")
    shutil.copytree(data, tmp_path / "data")
    replace_files(tmp_path / "run", {"data.json": data_json(run, tmp_path / "data")})
    return tmp_path / "run"


def data_json(run: Path, data: Path) -> bytes:
    return json.dumps({**json.loads((run / "data.json").read_text()), "path": str(data)}).encode()


def flip(file: Path, byte: int = -3) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


def translate(run: Path, *more: str) -> tuple[int, str]:
    """The status of `translate` and its output."""
    source, output = run.parent / "in", run.parent / "out"
    source.write_text("The dog sees a house.\nA man reads books.\n")
    output.unlink(missing_ok=True)
    status = main(["translate", "--run", str(run), "--input", str(source), "--output", str(output), *more])
    return status, output.read_text() if output.exists() else ""


def train(run: Path, *more: str) -> int:
    return main(["train", "--data", str(run.parent / "data"), "--run", str(run), *more])


def vocabulary(run: Path) -> Path:
    return run / "vocabulary.model"


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_vocabulary_is_restored_from_the_data(run: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, content = translate(run), vocabulary(run).read_bytes()
    flip(vocabulary(run)) if harm == "flip" else vocabulary(run).unlink()
    capsys.readouterr()
    assert translate(run) == expected and vocabulary(run).read_bytes() == content
    assert f"it is restored from {run.parent / 'data'}" in capsys.readouterr().err
    assert translate(run) == expected and "it is restored" not in capsys.readouterr().err


def test_a_vocabulary_that_nobody_has_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(vocabulary(run))
    flip(run.parent / "data" / "vocabulary.model")
    words = ["prepare", "--vocab-from", str(run), "--out", str(run.parent / "more")]
    for split in ("train", "valid"):
        words += [f"--{split}-source", str(run.parent / "in"), f"--{split}-target", str(run.parent / "in")]
    assert translate(run)[0] == 2 and main(words) == 2
    error = capsys.readouterr().err
    assert error.count("must be as `train` wrote it") == 2
    assert f"{vocabulary(run)} must be as `train` wrote it, but it has other content than was written" in error
    assert "or bring back the data directory that" in error


def test_lost_settings_are_restored_and_changed_ones_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = run / "config.yaml"
    expected, content = translate(run), config.read_text()
    config.unlink()
    assert train(run, *SETTINGS, "model.heads=2") == 2 and "model.heads must stay 4" in capsys.readouterr().err
    assert config.read_text() == content, "restored before anything is compared"
    config.unlink()
    assert translate(run) == expected and "is restored from the newest checkpoint" in capsys.readouterr().err
    config.write_text(content.replace("beam: 2", "beam: 3"))
    assert translate(run)[0] == 2
    assert "delete it to restore it from the newest checkpoint" in capsys.readouterr().err


def test_a_changed_optimizer_is_logged_when_a_run_is_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(run) == 0 and "other settings" not in capsys.readouterr().err
    assert train(run, *SETTINGS, "optimizer.clip_norm=0", "training.log_every=1") == 0
    assert f"{run} continues with other settings: optimizer.clip_norm was 1.0 and is 0.0\n" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_lost_record_of_the_data_is_restored(run: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = run / "data.json"
    content = json.loads(record.read_text())
    flip(record) if harm == "flip" else record.unlink()
    assert train(run, *SETTINGS) == 0 and "is restored from the newest checkpoint" in capsys.readouterr().err
    assert json.loads(record.read_text())["fingerprint"] == content["fingerprint"]


def test_the_place_of_moved_data_is_recorded_when_the_run_is_resumed(run: Path) -> None:
    data = (run.parent / "data").rename(run.parent / "elsewhere")
    assert main(["train", "--run", str(run), "--data", str(data), "training.max_updates=4"]) == 0
    assert json.loads((run / "data.json").read_text())["path"] == str(data.resolve())
    assert main(["train", "--run", str(run), "training.max_updates=4"]) == 0


@pytest.mark.parametrize("harm", ["remove", "flip", "no hash", "schema"])
def test_a_lost_manifest_is_made_again(run: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected, manifest = translate(run), run / "manifest.json"
    content = json.loads(manifest.read_text())
    if harm == "remove":
        manifest.unlink()
    elif harm == "flip":
        flip(manifest, 30)
    elif harm == "no hash":
        (run / "manifest.json.sha256").unlink()
    else:
        run_manifest.write_record(manifest, json.dumps({"format": 99, "files": {}}).encode())
    flip(vocabulary(run))
    assert translate(run) == expected, "the checkpoint records the vocabulary, too"
    assert "is compared with its newest checkpoint instead" in capsys.readouterr().err
    assert json.loads(manifest.read_text())["files"] == content["files"]
    assert translate(run) == expected and capsys.readouterr().err.count("instead") == 0


def test_without_a_manifest_settings_and_data_are_compared_with_the_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, expected = run / "config.yaml", translate(run)
    (run / "manifest.json").unlink()
    (run / "data.json").write_text('{"pa')
    assert translate(run) == expected and "data.json cannot be read; it is restored" in capsys.readouterr().err
    (run / "manifest.json").unlink()
    config.write_text(config.read_text().replace("beam: 2", "beam: 3"))
    assert translate(run)[0] == 2
    error = capsys.readouterr().err
    assert "config.yaml must be as `train` wrote it, but it differs from the settings in the newest" in error
    config.unlink()
    assert translate(run) == expected


def test_a_run_does_not_take_over_other_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run.parent / "own"
    own.mkdir()
    (own / "config.yaml").write_text("mine: 1\n")
    checkpoint = run / "checkpoints" / "update-0000004"
    before = {path: path.read_bytes() for each in (own, checkpoint, run.parent / "data") for path in each.iterdir()}
    for place in (own, checkpoint, run.parent / "data"):
        words = ["--data", str(run.parent / "data"), "--run", str(place), *SETTINGS]
        assert main(["train", *words]) == 2
        assert f"--run must be a new directory or one made by `train`, but {place} has" in capsys.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())
    shutil.rmtree(run / "checkpoints")
    assert train(run, *SETTINGS, "training.max_updates=1") == 0
    assert "has no checkpoint: training starts from the beginning" in capsys.readouterr().err


def test_a_checkpoint_is_not_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / "update-0000004"
    assert main(["translate", "--run", str(checkpoint), "--input", "-", "--output", "-"]) == 2
    assert f"is one of its checkpoints; give {run} and the checkpoint update-0000004" in capsys.readouterr().err


def test_a_refused_start_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data", str(run.parent / "data"), "--run", str(run.parent / "new"), "--init-from", "nowhere"]
    assert main(["train", *words]) == 2 and not (run.parent / "new").exists()


def test_moved_data_restores_a_lost_vocabulary(run: Path) -> None:
    vocabulary(run).unlink()
    data = (run.parent / "data").rename(run.parent / "elsewhere")
    assert main(["train", "--run", str(run), "--data", str(data)]) == 0


def age(run: Path) -> None:
    """Make a run one of an older version: no manifest, and checkpoints without hashes of theirs."""
    (run / "manifest.json").unlink()
    (run / "manifest.json.sha256").unlink()
    for checkpoint in (run / "checkpoints").glob("update-*"):
        content = json.loads((checkpoint / "manifest.json").read_text())
        del content["run"], content["files"]["run.json"]
        (checkpoint / "run.json").unlink()
        (checkpoint / "manifest.json.sha256").unlink()
        (checkpoint / "manifest.json").write_text(json.dumps({**content, "format": 1}))


def test_a_run_of_an_older_version_is_adopted_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = translate(run)
    age(run)
    (run / "vocabulary.of a user").mkdir()
    assert translate(run) == expected
    error = capsys.readouterr().err
    assert error.count("because an older version wrote it") == 2, "the run, and its best checkpoint"
    assert translate(run) == expected and "older version" not in capsys.readouterr().err
    (run / "config.yaml").unlink()
    assert translate(run)[0] == 2 and "restore it from a copy" in capsys.readouterr().err


def test_an_older_run_whose_vocabulary_is_damaged_takes_that_of_its_data(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = translate(run)
    age(run)
    flip(vocabulary(run))
    assert translate(run) == expected and "it is restored from" in capsys.readouterr().err


def test_an_older_run_is_resumed(run: Path, original: tuple[Path, Path]) -> None:
    age(run)
    debris = [run / ".config.yaml.0123abcd.tmp", run / "checkpoints/update-0000002/.manifest.json.0123abcd.tmp"]
    for each in debris:
        each.touch()
    shutil.rmtree(run / "checkpoints" / "update-0000004")
    assert train(run, *SETTINGS) == 0
    assert not any(each.exists() for each in debris), "what killed processes left goes with the next start"
    assert_same(run, original[0], 4)
    assert Checkpoint(run / "checkpoints" / "update-0000004").run is not None


def test_a_checkpoint_of_another_run_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    words = ["--data", str(run.parent / "data"), "--run", str(other), *SETTINGS, "model.heads=2"]
    assert main(["train", *words, "training.max_updates=2"]) == 0
    for name in ("update-0000002", "update-0000004"):
        shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(other / "checkpoints" / "update-0000002", run / "checkpoints" / "update-0000002")
    capsys.readouterr()
    assert translate(run)[0] == 2 and train(run, *SETTINGS) == 2
    assert (
        capsys.readouterr().err.count("must be a checkpoint of this run, but its model.heads is 2 instead of 4") == 2
    )


def test_files_are_replaced_so_that_a_crash_leaves_a_run_that_opens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_nmt import manifest

    write, old, new = run_manifest.atomic_write_bytes, (run / "config.yaml").read_bytes(), b"new: 1\n"
    for failing in range(8):
        calls = 0

        def crash(path: Path, content: bytes) -> None:
            nonlocal calls
            calls += 1
            if calls > failing:  # noqa: B023 - called in this turn of the loop only
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, content)

        replace_files(run, {"config.yaml": old})
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "atomic_write_bytes", crash)
            patch.setattr(run_manifest, "atomic_write_bytes", crash)
            try:
                replace_files(run, {"config.yaml": new})
            except OSError:
                assert failing < 7
        verify_run(run)
        assert (run / "config.yaml").read_bytes() == (old if failing < 4 else new)
    flip(run / "config.yaml")
    with pytest.raises(DataError, match=r"config\.yaml must be as `train` wrote it"):
        verify_run(run)


def test_a_run_that_cannot_be_written_to_is_not_restored(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary(run).unlink()

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_manifest, "write_record", refuse)
    with pytest.raises(DataError, match=r"must be writable, because vocabulary.model must be restored, but is not"):
        verify_run(run)


def test_a_checkpoint_that_is_removed_while_it_is_loaded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, loaded = Checkpoint.load_into, []

    def removed(self: Checkpoint, model: nn.Module) -> None:
        if not loaded:  # a training of the run removes it
            shutil.rmtree(self.path)
        loaded.append(self.progress.update)
        load(self, model)

    monkeypatch.setattr(Checkpoint, "load_into", removed)
    assert translate(run, "--checkpoint", "last")[0] == 0 and loaded == [4, 2]


def test_data_prepared_again_while_a_run_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.parent / "data"
    begin = run_directory.begin

    def replaced(*arguments: Any) -> None:
        begin(*arguments)
        meta = json.loads((data / "meta.json").read_bytes())
        write_record(data / "meta.json", json.dumps({**meta, "version": "another"}).encode())

    monkeypatch.setattr(run_directory, "begin", replaced)
    assert train(run, *SETTINGS, "training.max_updates=6") == 2
    assert f"{data} must not be replaced while a run opens it" in capsys.readouterr().err


def test_names_that_are_not_utf8_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = run.parent / os.fsdecode(b"run\xff")
    run.rename(name)
    assert train(name, *SETTINGS) == 2
    assert main(["average", "--run", str(name), "--last", "1"]) == 2
    data = run.parent / os.fsdecode(b"data\xff")
    (run.parent / "data").rename(data)
    assert main(["train", "--data", str(data), "--run", str(run), *SETTINGS]) == 2
    words = ["prepare", "--out", str(run.parent / "more")]
    for split in ("train", "valid"):
        words += [f"--{split}-source", str(data / "valid.source"), f"--{split}-target", str(data / "valid.target")]
    assert main(words) == 2
    assert capsys.readouterr().err.count("in UTF-8, but is") == 4
