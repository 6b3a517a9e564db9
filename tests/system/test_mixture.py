"""Training on several data directories: shares, tags, the record in the run, and changes on resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.reports.outcome import Outcome
from deepspeed_nmt.run.directory import DataRecord
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.commands import logged, pair_words, refused
from tests.support import ZERO2, run_ranks
from tests.system.conftest import SMALL

SETTINGS = ["validation.metrics=[]", "collapse.every=0", "model.dropout=0"]


@pytest.fixture(scope="module")
def second(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of 60 pairs with the vocabulary of ``data``."""
    scratch, text = tmp_path_factory.mktemp("second"), data.parent / "text"
    words = ["prepare", "--out", str(scratch / "small"), "--vocab-from", str(data)]
    for side in ("en", "de"):
        lines = (text / f"train.{side}").read_text(encoding="utf-8").splitlines(keepends=True)
        (scratch / f"train.{side}").write_text("".join(lines[:60]), encoding="utf-8")
        kind = "source" if side == "en" else "target"
        words += [f"--train-{kind}", str(scratch / f"train.{side}"), f"--valid-{kind}", str(text / f"valid.{side}")]
    assert main(words) == 0
    return scratch / "small"


def words_of(run: Path, *words: str) -> list[str]:
    """Return a command line; words are values of --data, and settings of training."""
    given = [word if word.startswith("training.") else f"--data={word}" for word in words]
    return ["train", "--run", str(run), *SMALL, *SETTINGS, *given]


def train(run: Path, *words: str) -> int:
    """Train in this process."""
    return main(words_of(run, *words))


def checkpoint(run: Path, update: int) -> Checkpoint:
    return Checkpoint(run / "checkpoints" / f"update-{update:07d}")


def test_a_mixture_is_trained_on_recorded_and_changed_on_resume(
    data: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, both = tmp_path / "run", [str(data), f"{second}=3:1-8,1:9-"]
    assert train(run, *both, "training.max_updates=8") == 0
    shares = logged(run, "data/small/share")
    assert (shares[4] + shares[8]) / 2 == pytest.approx(0.75, abs=0.03)
    assert logged(run, "data/small/epochs")[8] > logged(run, "data/data/epochs")[8] > 0
    assert logged(run, "train/small/nll")[8] > 0
    record = DataRecord.read(run)
    assert [Path(each.path).name for each in record.corpora] == ["data", "small"]
    # The same corpora without --data; the schedule goes on.
    assert train(run) == 0
    assert logged(run, "data/small/share")[12] == pytest.approx(0.5, abs=0.1)
    assert len(checkpoint(run, 12).progress.phases) == 1
    # Two ranks, and one that was interrupted, have made the same updates.
    whole = tmp_path / "whole"
    run_ranks(["-m", "deepspeed_nmt", *words_of(whole, *both), ZERO2], 2, tmp_path)
    ours, theirs = checkpoint(run, 12).weights(), checkpoint(whole, 12).weights()
    assert all(torch.allclose(theirs[name], weight, atol=1e-4) for name, weight in ours.items())
    # Other weights from here on: a second phase, in which the corpora go on where they were.
    assert train(run, str(data), f"{second}=0.5", "training.max_updates=16") == 0
    before, after = checkpoint(run, 16).progress.phases
    assert (before.first, after.first) == (1, 13) and after.streams[1].start > 60
    log = (run / "logs/rank-0.log").read_text()
    assert f"mixture: {data}, {second}=3:1-8,1:9-; temperature 0, tags in front of sources" in log
    assert f"from update 13 on the run has another mixture: {data}, {second}=0.5" in log
    assert Outcome.read(run).data == f"{data} {second}=0.5"
    refused(words_of(run, str(second), str(data)), capsys, "--data", str(data))
    assert logged(run, "data/small/share")[16] == pytest.approx(1 / 3, abs=0.1)


def test_other_vocabularies_and_repeated_corpora_are_refused(
    data: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, pairs = tmp_path / "other", pair_words(data.parent / "text", train="train", valid="valid")
    assert main(["prepare", "--out", str(other), "--vocab-size", "200", *pairs]) == 0
    for words, names in (
        ((str(data), str(other)), ["vocabulary", str(other)]),
        ((str(data), f"{data}=2"), ["are the same"]),
        ((str(data), f"{second}@<none>"), ["<none>"]),
        ((f"{data}=1:1-3", f"{second}=1:6-"), ["from update 4 to 5"]),
    ):
        refused(words_of(tmp_path / "run", *words), capsys, *names)
        assert not (tmp_path / "run").exists()
