"""Runs with bad data: they are rolled back and skip it, or stop with an explanation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.run import trainer
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.commands import log_of, logged, newest, refused, train_words
from tests.support import ROOT, assert_same, run_ranks
from tests.system.bad_data import bad_loss
from tests.system.conftest import SMALL

# Updates 6 to 8 are bad. The checkpoint before them is that of update 4.
BAD = {5, 6, 7}
PATIENT = ["training.max_skipped=3", "training.log_every=1"]


@pytest.fixture
def bad(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make some of the data bad."""
    monkeypatch.setattr(LabelSmoothed, "__call__", bad_loss(data, BAD))


@pytest.fixture(scope="module")
def rolled_back(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of twelve updates, some of them on bad data."""
    run = tmp_path_factory.mktemp("rolled_back") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LabelSmoothed, "__call__", bad_loss(data, BAD))
        assert main(train_words(data, run, *SMALL, *PATIENT)) == 0
    return run


def test_a_run_is_rolled_back_and_skips_the_bad_data(rolled_back: Path) -> None:
    end = newest(rolled_back)
    assert all(torch.isfinite(weight).all() for weight in end.weights().values())
    progress = end.progress
    assert (progress.update, progress.rollbacks, progress.retries, progress.failed_at) == (12, 1, 0, 8)
    assert end.scalars.optimizer_step == 12, "skipped updates do not count as optimizer steps"
    assert [path.name[-2:] for path in sorted(rolled_back.glob("checkpoints/update-*"))] == ["04", "08", "12"]
    assert list(logged(rolled_back, "train/loss")) == list(range(1, 13)), "one continuous log"
    assert list(logged(rolled_back, "train/rollbacks").values()) == [0.0] * 4 + [1.0] * 8
    events = log_of(rolled_back, "events")
    named = [(event["event"], event["update"]) for event in events if event["event"] != "best"]
    skipped = [("skip", update) for update in (6, 7, 8)]
    assert named == [("start", 0), ("saved", 4), *skipped, ("rollback", 8), ("end", 12)]
    assert [event["to_update"] for event in events if event["event"] == "rollback"] == [4]
    said = (rolled_back / "logs/rank-0.log").read_text()
    for in_a_row, update in enumerate((6, 7, 8), 1):
        assert f"update {update} skipped: loss is not finite; the gradient of decoder.final_norm, " in said
        assert f"(loss scale 1, {in_a_row} in a row)" in said
    assert "; the loss is not finite on rank 0, for the pairs " in said, "the data is at fault"
    assert "rolling back from update 8 to 4" in said and "resuming after update 4" in said
    progress = Checkpoint(rolled_back / "checkpoints" / "update-0000004").progress
    assert (progress.update, progress.epoch, progress.epoch_update) == (4, 0, 8), "the position after the bad data"


def test_a_run_with_bad_data_resumes_to_the_bit(
    data: Path, rolled_back: Path, bad: None, tmp_path: Path, small: list[str]
) -> None:
    settings = [*small, *PATIENT, "training.validate_every=100", "training.save_every=4"]
    for last in (7, 10, 12):  # while updates are skipped, and after the rollback
        assert main(train_words(data, tmp_path / "run", *settings, f"training.max_updates={last}")) == 0
    end = newest(tmp_path / "run")
    assert (end.progress.update, end.progress.rollbacks) == (12, 1)
    for name, weight in end.weights().items():
        assert torch.equal(weight, newest(rolled_back).weight(name)), name


def test_a_run_that_keeps_one_checkpoint_can_be_rolled_back(
    data: Path, bad: None, tmp_path: Path, small: list[str]
) -> None:
    settings = [*small, *PATIENT, "training.keep_last=1", "training.keep_best=false", "training.save_every=1"]
    for last in (7, 12):
        assert main(train_words(data, tmp_path / "run", *settings, f"training.max_updates={last}")) == 0
    end = newest(tmp_path / "run")
    assert (end.progress.update, end.progress.rollbacks, end.scalars.optimizer_step) == (12, 1, 12)


def test_a_run_killed_between_rollback_and_next_checkpoint(
    data: Path, rolled_back: Path, bad: None, tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.gc, "collect", killed)
        assert main(train_words(data, tmp_path / "run", *small, *PATIENT)) == 130
    assert newest(tmp_path / "run").progress.update == 4
    assert main(train_words(data, tmp_path / "run", *small, *PATIENT)) == 0
    assert_same(tmp_path / "run", rolled_back, newest(rolled_back).progress.update)


def test_a_mixture_goes_on_with_the_data_after_the_bad(
    data: Path, tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its updates follow from their numbers, which are those of the checkpoint again."""
    mixture = f"{data}=1:1-9,2:10-"
    monkeypatch.setattr(LabelSmoothed, "__call__", bad_loss(mixture, BAD))
    assert main(train_words(mixture, tmp_path / "run", *small, *PATIENT)) == 0
    progress = newest(tmp_path / "run").progress
    assert (progress.update, progress.rollbacks, progress.retries, progress.failed_at) == (12, 1, 0, 8)


def test_a_run_without_progress_stops_with_a_reason(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LabelSmoothed, "__call__", bad_loss(data, set(range(5, 10))))
    settings = [*small, "training.max_skipped=2", "training.max_rollbacks=1", "training.save_every=1"]
    words = train_words(data, tmp_path / "run", *settings)
    error = refused(words, capsys, "update 7", "training.max_rollbacks is 1", "optimizer.lr", status=1)
    assert error.count("rolling back from update 7 to 5") == 1
    for weight in newest(tmp_path / "run").weights().values():
        assert torch.isfinite(weight).all()
    monkeypatch.setattr(LabelSmoothed, "__call__", bad_loss(data, set(range(4))))
    refused(train_words(data, tmp_path / "new", *settings), capsys, "update 2", "no checkpoint", status=1)


def test_ranks_are_rolled_back_together(data: Path, tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    worker = [str(ROOT / "tests/system/bad_data.py"), ",".join(map(str, BAD)), str(data)]
    settings = [*small, *PATIENT, "engine.ds_config=zero3"]
    outputs = run_ranks([*worker, *train_words(data, run, *settings)], 2, run)
    assert outputs[0].count("rolling back from update 8 to 4") == 1 and "rolling back" not in outputs[1]
    end = newest(run)
    assert all(torch.isfinite(weight).all() for weight in end.weights().values())
    assert (end.progress.update, end.progress.rollbacks, end.scalars.optimizer_step) == (12, 1, 12)


@pytest.mark.parametrize(("kind", "what"), [("loss", "computed another loss"), ("flip", "has other weights")])
def test_a_faulty_device_is_named(data: Path, tmp_path: Path, small: list[str], kind: str, what: str) -> None:
    worker = str(ROOT / "tests/system/troubled_worker.py")
    words = train_words(data, tmp_path / "run", *small, "engine.name=plain", "training.checksum_every=2")
    outputs = run_ranks([worker, *words], 2, tmp_path, status=71, TROUBLE=f"1:3:{kind}")
    said = "".join(outputs)
    assert said.count(what) == 1 and "rank 1 on " in said and "--exclude" in said
    assert ("rank 0 on " in said) == (kind == "flip"), "of two replicas nobody knows which one is right"
    last = log_of(tmp_path / "run", "events")[-1]
    assert last["event"] == "failure" and what in last["text"] and last["update"] == (3 if kind == "loss" else 4)


def test_a_probe_changes_nothing(data: Path, tmp_path: Path, small: list[str]) -> None:
    without, probed = tmp_path / "without", tmp_path / "probed"
    assert main(train_words(data, without, *small, "training.max_updates=6")) == 0
    for last in (3, 6):
        assert main(train_words(data, probed, *small, "training.probe=always", f"training.max_updates={last}")) == 0
    for name, weight in newest(without).weights().items():
        assert torch.equal(weight, newest(probed).weight(name)), name


def test_out_of_memory_stops_with_advice(
    data: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(PlainEngine, "_backward", full)
    for probe, what in (("always", "largest expected micro-batch"), ("never", "update 1")):
        words = train_words(data, tmp_path / "run", *small, f"training.probe={probe}")
        refused(words, capsys, what, "RAM", "batch.micro_tokens", status=1)


def test_micro_batches_that_do_not_fit_are_halved(
    data: Path, tmp_path: Path, small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, sizes, probed = tmp_path / "run", list[int](), PlainEngine.probe

    def probe(engine: PlainEngine, batch: Batch) -> None:
        sizes.append(batch.padded_tokens)
        if batch.padded_tokens > 512:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        probed(engine, batch)

    monkeypatch.setattr(PlainEngine, "probe", probe)
    auto = ["batch.micro_tokens=auto", "training.probe=always", "validation.metrics=[]", "collapse.every=0"]
    for last in (1, 2):  # a resumed run keeps its own
        settings = [*auto, "engine.memory_gib=64", f"training.max_updates={last}"]
        assert main(train_words(data, run, *small, *settings)) == 0
        assert json.loads((run / "resolved.json").read_text())["micro_tokens"] == 512
    assert len(sizes) == 3 and sizes[0] > 512 >= sizes[1] == sizes[2]
    assert "micro-batches of 1024 tokens do not fit; batch.micro_tokens=512" in (run / "logs/rank-0.log").read_text()
    assert [event["event"] for event in log_of(run, "events")].count("start") == 1
