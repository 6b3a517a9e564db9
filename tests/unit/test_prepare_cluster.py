"""`prepare --executor slurm` with stand-ins for SLURM's commands: tests/slurm/ has a real one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest

from deepspeed_nmt.data.data_directory import Meta
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.preparation import prepare
from deepspeed_nmt.data.stages import Preparation
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.manifest import write_record
from tests.commands import prepare_with, refused
from tests.unit.test_prepare import SOURCE, TARGET

_SBATCH = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/calls"
for script; do :; done
cat "$script" >>"$(dirname "$0")/scripts"
echo Submitted batch job $(wc -l <"$(dirname "$0")/calls")
"""
_SQUEUE = '#!/bin/sh\ncat "$(dirname "$0")/queue"\n'


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Options of `prepare`, of 3 tasks."""
    options: dict[str, Any] = {"out": tmp_path / "data", "segmented": True, "executor": "slurm", "tasks": 3}
    for name, lines in (("train_source", SOURCE), ("train_target", TARGET)):
        for split in ("train", "valid"):
            path = tmp_path / name.replace("train", split)
            path.write_text("".join(f"{line}\n" for line in (lines if split == "train" else lines[:5])))
            options[path.name] = (path,)
    return options


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands that only record how they are called."""
    pytest.importorskip("datatrove")
    (programs := tmp_path / "bin").mkdir()
    for name, text in (("sbatch", _SBATCH), ("squeue", _SQUEUE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("calls", "queue"):
        (programs / name).touch()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return programs


def _submit(options: dict[str, Any], **changes: Any) -> Meta | str:
    return prepare(PrepareOptions.model_validate({**options, **changes}))


def test_the_same_command_submits_what_is_not_done_and_reports_at_the_end(
    texts: dict[str, Any], slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed_nmt.data import cluster

    content = texts["train_source"][0].read_bytes()
    fsspec.filesystem("memory").pipe("/bucket/train", content)
    texts["train_source"] = ("memory://bucket/train",)
    expected = prepare_with(texts, out=tmp_path / "local", executor="local", tasks=None)
    out, directory = texts["out"], tmp_path / ".data.tasks"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/my programs/python")
        made = _submit(texts, array=2, partition="cpu")
    assert made == f"jobs 1 2 3 4 5 6; `deepspeed-nmt prepare --status {out}` shows their progress"
    calls, scripts = (slurm / "calls").read_text().splitlines(), (slurm / "scripts").read_text()
    assert "--dependency" not in calls[0]
    assert ["--dependency=afterok:1" in calls[1], "--dependency=afterok:5" in calls[5]] == [True, True]
    assert scripts.count("export PATH='/my programs':$PATH ") == 6
    assert scripts.count("#SBATCH --array=0-2%2\n") == 3 and scripts.count("#SBATCH --partition=cpu\n") == 6

    for task in (0, 2):
        cluster.run(Preparation, directory, "index", None, 0, 1)
        cluster.run(Preparation, directory, "clean", None, task, 3)
        fsspec.filesystem("memory").pipe("/bucket/train", b"what its copy is not")
    (log := cluster._log(Preparation.open(directory), "clean", 1)).parent.mkdir(parents=True)
    log.write_text("... | ERROR | ...\nDataError: the first line\n")
    (slurm / "queue").write_text("PENDING\nRUNNING\nPENDING\n")
    shown = cluster.status(Preparation, out)
    assert f"clean, task 1: DataError: the first line ({log})" in shown and "queue: 2 pending, 1 running" in shown
    assert ["clean", "3", "2", "1"] in [line.split() for line in shown.splitlines()]
    for number, path in enumerate((directory / "job.json", directory / "index/00000", directory / "clean/00000")):
        os.utime(path, (0.0, 60.0 * number))
    os.utime(directory / "clean/00002", (0.0, 160.0))
    pairs = sum(Preparation.open(directory).record("clean", task).read for task in (0, 2))
    assert f"clean: {pairs} pairs in 0:01:40; about 0:00:50 left at this pace" in cluster.status(Preparation, out)
    with pytest.raises(DataError, match=r"\.data\.tasks are in SLURM's queue"):
        _submit(texts)
    (slurm / "queue").unlink()
    assert "queue: 1 unknown" in cluster.status(Preparation, out)
    (slurm / "queue").write_text("")
    log.write_text("started\n")
    assert "clean, task 1: was killed (" in cluster.status(Preparation, out)

    made = _submit(texts, workers=3)
    assert isinstance(made, str) and made.startswith("jobs 7 8 9 10 11; "), "the index is done"
    assert json.loads((directory / "logs/clean/ranks_to_run.json").read_text()) == [1] and not log.exists()
    for stage, count in {**Preparation.open(directory).stages, "join": 1}.items():
        for task in range(count):
            cluster.run(Preparation, directory, stage, None, task, count)
    cluster.run(Preparation, directory, "join", None, 0, 1)  # twice
    fsspec.filesystem("memory").pipe("/bucket/train", content)
    assert (
        _submit(texts) == expected
        and cluster.status(Preparation, out) == f"all tasks are done: data directory  {out}"
    )
    local = tmp_path / "local"
    assert cluster.status(Preparation, local) == f"no task is left: {local} is a data directory"
    for path in local.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in directory.iterdir()} == {"ids", "job.json", "job.json.sha256", "logs"}


def test_tasks_refuse_other_options_other_text_and_other_packages(
    texts: dict[str, Any], slurm: Path, tmp_path: Path
) -> None:
    from deepspeed_nmt.data import cluster

    directory = tmp_path / ".data.tasks"
    texts["filters"] = "near_duplicates,repetition=4"
    _submit(texts)
    with pytest.raises(DataError, match=r"holds tasks of another --filters"):
        _submit(texts, filters="near_duplicates,repetition=5")
    with pytest.raises(DataError, match=r"holds tasks of another --tasks, --vocab-size; remove it"):
        _submit(texts, vocab_size=130, tasks=4)
    cluster.run(Preparation, directory, "index", None, 0, 1)
    work = Preparation.open(directory)
    assert work.options == PrepareOptions.model_validate(texts), "with the bounds of its filters"
    other = work.model_copy(update={"versions": {**work.versions, "sentencepiece": "0.1"}})
    job = (directory / "job.json").read_bytes()
    write_record(directory / "job.json", other.model_dump_json(exclude={"directory"}).encode())
    with pytest.raises(DataError, match=r"other packages .*'sentencepiece': '0\.1'.*; install the same"):
        cluster.run(Preparation, directory, "clean", None, 0, 3)
    write_record(directory / "job.json", job)
    for task in range(3):
        cluster.run(Preparation, directory, "clean", None, task, 3)
    part = directory / "clean/00001/duplicate.hashes.npy"
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"clean/00001 is damaged \(duplicate\.hashes\.npy has .* bytes instead of"):
        cluster.run(Preparation, directory, "duplicate", None, 0, 3)
    valid = texts["valid_target"][0]
    valid.write_text((content := valid.read_text()).replace("a", "b"))
    with pytest.raises(DataError, match=r"holds tasks that differ in valid.target text; remove it"):
        _submit(texts)
    valid.write_text(content)
    with texts["train_source"][0].open("a") as file:
        file.write("more\n")
    with pytest.raises(DataError, match=r"train_source has changed since .*; remove .*\.data\.tasks, and start"):
        _submit(texts)


def test_what_cannot_be_submitted(texts: dict[str, Any], slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_nmt.data import cluster

    os.mkfifo(pipe := texts["out"].with_name("pipe"))
    with pytest.raises(DataError, match=r"pipe is a pipe; write it to a file"):
        _submit(texts, train_source=(pipe,))
    with texts["train_source"][0].open("rb") as file, pytest.raises(DataError, match=r"fd/\d+ is a pipe"):
        _submit(texts, train_source=(Path(f"/dev/fd/{file.fileno()}"),))
    with pytest.raises(DataError, match="directory"):
        _submit(texts, train_source=(pipe.parent,))
    with pytest.raises(ConfigError, match=r"my data, which SLURM would split; give a path without spaces"):
        _submit(texts, out=texts["out"].with_name("my data"))
    with pytest.raises(DataError, match=r"no tasks of .*data; submit them"):
        cluster.status(Preparation, texts["out"])
    (slurm / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(DataError, match=r"sbatch ended with status 1"):
        _submit(texts)
    assert not texts["out"].with_name(".data.tasks").exists()
    monkeypatch.setenv("PATH", str(slurm / "none"))
    with pytest.raises(ConfigError, match=r"needs sbatch, which is not installed here"):
        _submit(texts)


def test_options_of_slurm(texts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "--out", str(texts["out"])]
    for name in ("train_source", "train_target", "valid_source", "valid_target"):
        words += [f"--{name.replace('_', '-')}", str(texts[name][0])]
    refused([*words, "--tasks", "4"], capsys, "--tasks is for --executor slurm")
    refused([*words, "--executor", "slurm"], capsys, "needs a number of tasks; give --tasks")
    refused([*words, "--executor", "slurm", "--tasks", "0"], capsys, "--tasks", "0")


def test_without_datatrove_a_message_says_how_to_install_it(
    texts: dict[str, Any], slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(ConfigError, match=r"needs the package datatrove, .* \(`pip install 'datatrove<0\.11'`\)"):
        _submit(texts)
