"""Training on several data directories: shares, tags, the record in the run, and changes on resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.run.manifest import DataRecord
from deepspeed_nmt.run.outcome import Outcome
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.support import run_ranks
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


def train(run: Path, *words: str) -> int:
    """Train in this process; words are values of --data, and settings of training."""
    data = [word for word in words if not word.startswith("training.")]
    options = [f"--data={each}" for each in data]
    settings = [word for word in words if word not in data]
    return main(["train", "--run", str(run), *options, *SMALL, *SETTINGS, *settings])


def logged(run: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by update."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["update"]: line[tag] for line in lines if tag in line}


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
    words = ["train", "--run", str(whole), *(f"--data={each}" for each in both), *SMALL, *SETTINGS]
    run_ranks(["-m", "deepspeed_nmt", *words], 2, tmp_path, timeout=100)
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
    capsys.readouterr()
    assert train(run, str(second), str(data)) == 2
    assert f"the first --data must be that of {data}" in capsys.readouterr().err
    assert logged(run, "data/small/share")[16] == pytest.approx(1 / 3, abs=0.1)


def test_a_corpus_is_added_to_a_run_of_one(data: Path, second: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, str(data), "training.max_updates=4") == 0
    assert "data/data/share" not in (run / "metrics.jsonl").read_text()
    assert train(run, str(data), str(second), "training.max_updates=8") == 0
    (phase,) = checkpoint(run, 8).progress.phases
    assert phase.first == 5 and 60 < phase.streams[0].start < 200 and phase.streams[1].start == 0
    # Back to one corpus; the run keeps to its mixtures.
    assert train(run, str(data), "training.max_updates=9") == 0
    assert [each.corpus for each in checkpoint(run, 9).progress.phases[1].absent] == [phase.streams[1].corpus]


def test_other_vocabularies_and_repeated_corpora_are_refused(
    data: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, other = data.parent / "text", tmp_path / "other"
    words = ["prepare", "--out", str(other), "--vocab-size", "200"]
    for side, kind in (("en", "source"), ("de", "target")):
        words += [f"--{split}-{kind}" if i % 2 == 0 else str(text / f"{split}.{side}")
                  for split in ("train", "valid") for i in range(2)]  # fmt: skip
    assert main(words) == 0
    capsys.readouterr()

    def refused(*words: str) -> str:
        assert train(tmp_path / "run", *words) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    assert "must have the same vocabulary" in refused(str(data), str(other))
    assert "are the same; give it once" in refused(str(data), f"{data}=2")
    assert "a tag must be a symbol" in refused(str(data), f"{second}@<none>")
    assert "number above 0" in refused(str(data), f"{second}=0")
    gap = refused(f"{data}=1:1-3", f"{second}=1:6-")
    assert "from update 4 to 5 no --data has a weight" in gap
