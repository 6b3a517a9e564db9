"""Files of a run that decide its outputs: verified, or refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.manifest import write_record
from deepspeed_nmt.run import directory as run_directory
from deepspeed_nmt.run import start as run_start
from deepspeed_nmt.run.directory import replace_files, verify_run
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.commands import refused, train_words
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


def words(run: Path, *more: str) -> list[str]:
    return train_words(run.parent / "data", run, *more)


def train(run: Path, *more: str) -> int:
    return main(words(run, *more))


@pytest.mark.parametrize("how", ["flip", "remove"])
@pytest.mark.parametrize(
    "name", ["vocabulary.model", "config.yaml", "data.json", "manifest.json", "manifest.json.sha256"]
)
def test_a_lost_or_damaged_file_is_named(run: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / name
    flip(file, 5) if how == "flip" else file.unlink()
    vocab_from = ["prepare", "--vocab-from", str(run), "--out", str(run.parent / "more")]
    for split in ("train", "valid"):
        vocab_from += [f"--{split}-source", str(run.parent / "in"), f"--{split}-target", str(run.parent / "in")]
    for status in (translate(run)[0], train(run, *SETTINGS), main(vocab_from)):
        assert status == 2
    error = capsys.readouterr().err
    assert error.count(name.removesuffix(".sha256")) >= 3 and "cop" in error
    assert ("data directory" in error) == (name == "vocabulary.model")


def test_a_run_continues_with_data_that_has_moved(run: Path) -> None:
    data = (run.parent / "data").rename(run.parent / "elsewhere")
    assert main(["train", "--run", str(run), "--data", str(data)]) == 0
    assert json.loads((run / "data.json").read_text())["path"] == str(data.resolve())
    assert main(["train", "--run", str(run)]) == 0, "its new place is recorded"


def test_a_manifest_of_another_format_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(run / "manifest.json", json.dumps({"format": 99, "files": {}}).encode())
    assert translate(run)[0] == 2 and "manifest.json is not what" in capsys.readouterr().err


def test_a_run_does_not_take_over_other_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = run.parent / "own"
    own.mkdir()
    (own / "config.yaml").write_text("mine: 1\n")
    checkpoint = run / "checkpoints" / "update-0000004"
    before = {path: path.read_bytes() for place in (own, checkpoint, run.parent / "data") for path in place.iterdir()}
    for place in (own, checkpoint, run.parent / "data"):
        for option in ([], ["--restart"]):
            refused([*train_words(run.parent / "data", place, *SETTINGS), *option], capsys, "--run", str(place))
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.parametrize("history", ["whole", "lost", "killed"])
def test_a_run_that_has_lost_its_checkpoints_begins_anew_only_on_request(
    run: Path, history: str, capsys: pytest.CaptureFixture[str]
) -> None:
    events = run / "events.jsonl"
    saved = [json.loads(line)["update"] for line in events.read_text().splitlines() if '"saved"' in line]
    assert saved == [2], "the first checkpoint"
    if history == "lost":
        events.unlink()
    elif history == "killed":  # before the first checkpoint
        events.write_text(events.read_text().splitlines()[0] + "\n")
    shutil.rmtree(run / "checkpoints")
    shorter = (*SETTINGS, "training.max_updates=1", "model.heads=2")
    if history == "killed":
        assert train(run, *shorter) == 0
        assert "training starts from the beginning" in capsys.readouterr().err
        return
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    refused(words(run, *shorter), capsys, str(run / "checkpoints"), "--restart", "update 4")
    assert before == {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    (run.parent / "run.before-1").mkdir()
    assert main([*words(run, *shorter), "--restart"]) == 0 and run.with_name("run.before-2").name in logs(run)
    assert before == {path.name: path.read_bytes() for path in run.with_name("run.before-2").glob("*.*")}
    assert "heads: 2" in (run / "config.yaml").read_text() and (run / "checkpoints" / "update-0000001").is_dir()


def logs(run: Path) -> str:
    return " ".join(path.name for path in run.parent.iterdir())


def test_a_job_that_is_started_again_resumes_although_it_was_to_begin_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main([*words(run, *SETTINGS), "--restart"]) == 0
    assert run.with_name("run.before-1").is_dir(), "its first start was lost before it had begun"
    assert main([*words(run, *SETTINGS), "--restart"]) == 0
    assert (run / "checkpoints" / "update-0000002").is_dir() and not run.with_name("run.before-2").exists()


def test_the_recorded_commit_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "venv" / "site-packages" / "deepspeed_nmt" / "run"
    package.mkdir(parents=True)
    monkeypatch.setattr(run_start, "__file__", str(package / "start.py"))
    for place, is_its_own in ((tmp_path, False), (package.parents[1], True)):
        git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
        assert (run_start.environment()["git"] is not None) == is_its_own


def test_commands_that_somebody_else_has_recorded_are_named_and_not_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = run.parent / "ran"
    notify = f"training.notify=touch {ran}"
    more = ["training.max_updates=5", "training.notify_on=[end]"]
    assert train(run, *SETTINGS, notify, *more) == 0 and ran.exists()

    def resumed(update: int, *options: str) -> list[str]:
        ran.unlink(missing_ok=True)
        return ["train", "--run", str(run), f"training.max_updates={update}", *options]

    assert main(resumed(6)) == 0 and ran.exists(), "its own user"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(run.parent / "elsewhere"))
    refused(resumed(7), capsys, "touch", str(ran), "--trust-run")
    refused(resumed(7, "training.notify_on=[best]"), capsys, "touch")
    assert not ran.exists()
    assert main(resumed(7, notify)) == 0 and ran.exists(), "given now"
    assert main(resumed(8)) == 0 and ran.exists(), "as it was given here"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(run.parent / "third"))
    assert main(resumed(9, "--trust-run")) == 0 and ran.exists()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(run.parent / "fourth"))
    assert main(resumed(10, "training.notify=")) == 0 and not ran.exists()


FILES = (
    *("config.yaml", "manifest.json", "vocabulary.model", "metrics.jsonl", "logs/rank-0.log"),
    *("checkpoints/chosen.json", "checkpoints/update-0000004/state.json", "validation/main/source.txt"),
)


@pytest.mark.parametrize("name", FILES)
def test_pipes_and_links_out_of_a_run_are_refused(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    for command in (words(run, *SETTINGS), ["average", "--run", str(run), "--last", "1"]):
        refused(command, capsys, str(file), "pipe")
    file.unlink()
    secret = run.parent / "secret"
    file.symlink_to(secret)  # where a file would be written
    refused(words(run, *SETTINGS), capsys, str(file), str(secret))
    secret.write_text("of this user")
    assert "of this user" not in refused(
        ["average", "--run", str(run), "--last", "1"], capsys, str(file), str(secret)
    )


WRONG = ("", "[]", "null", '"x"', "1", "{}", '{"update": 1e999}', '{"update": NaN}', '{"update": ' + "9" * 400 + "}")


def test_records_of_wrong_types_are_named_and_stop_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = run / "validation" / "main"
    late.mkdir(parents=True, exist_ok=True)
    known = {"update": 1, "target_tokens": 1, "values": {"valid/loss": 1.0}, "late": ["valid/a"]}
    known |= {"choice": {"by": "a", "tags": ["valid/a"], "losses": ["valid/loss"], "mean": ["", ""]}}
    changes: tuple[dict[str, Any], ...] = (
        {"late": 3},
        {"values": {}},
        {"values": {"valid/loss": "x"}},
        {"update": -1},
    )
    records = [late / f"update-{'0' * number}1.json" for number in range(7, 7 + len(WRONG) + len(changes))]
    texts = [*WRONG, *(json.dumps({**known, **change}) for change in changes)]
    for record, text in zip(records, texts, strict=True):
        record.write_text(text)
    for name in ("metrics.jsonl", "events.jsonl", "goodput.jsonl"):
        with (run / name).open("a") as stream:
            stream.writelines(f"{text}\n" for text in (*WRONG, '{"update": 2, "train/loss": ' + "9" * 400 + "}"))
    for name in ("resolved.json", "environment.json", "checkpoints/chosen.json"):
        (run / name).write_text(WRONG[-1])
    assert train(run, *SETTINGS, "training.max_updates=6") == 0
    said = capsys.readouterr().err
    assert "Traceback" not in said and all(str(path) in said for path in (*records, "chosen.json"))
    assert main(["choose-best", "--run", str(run)]) == 0


def test_a_checkpoint_of_another_run_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    more = ["model.heads=2", "training.max_updates=2"]
    assert main(train_words(run.parent / "data", other, *SETTINGS, *more)) == 0
    for name in ("update-0000002", "update-0000004"):
        shutil.rmtree(run / "checkpoints" / name)
    shutil.copytree(other / "checkpoints" / "update-0000002", run / "checkpoints" / "update-0000002")
    capsys.readouterr()
    assert translate(run)[0] == 2 and train(run, *SETTINGS) == 2
    assert capsys.readouterr().err.count("model.heads is 2") == 2


def test_files_are_replaced_so_that_a_crash_leaves_a_run_that_opens(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_nmt import manifest

    write, old, new = run_directory.atomic_write_bytes, (run / "config.yaml").read_bytes(), b"new: 1\n"
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
            patch.setattr(run_directory, "atomic_write_bytes", crash)
            try:
                replace_files(run, {"config.yaml": new})
            except OSError:
                assert failing < 7
        verify_run(run)
        assert (run / "config.yaml").read_bytes() == (old if failing < 4 else new)
    flip(run / "config.yaml")
    with pytest.raises(DataError, match=r"config\.yaml"):
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
    begin = run_start.begin

    def replaced(*arguments: Any, **options: Any) -> None:
        begin(*arguments, **options)
        meta = json.loads((data / "meta.json").read_bytes())
        write_record(data / "meta.json", json.dumps({**meta, "version": "another"}).encode())

    monkeypatch.setattr(run_start, "begin", replaced)
    refused(words(run, *SETTINGS, "training.max_updates=6"), capsys, str(data))


def test_a_job_that_gets_nowhere_ends_with_a_status_of_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start = {"time": "", "update": 0, "event": "start", "text": "", "job": "7"}
    shutil.rmtree(run / "checkpoints")
    (run / "events.jsonl").write_text(3 * f"{json.dumps(start)}\n")
    assert train(run, *SETTINGS) == 78
    assert "3 times in a row after update 0" in capsys.readouterr().err
    *_, last = (run / "events.jsonl").read_text().splitlines()
    assert json.loads(last)["event"] == "failure"
    assert not list(run.glob("checkpoints/update-*"))
