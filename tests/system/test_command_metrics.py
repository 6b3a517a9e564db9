"""Programs that are metrics, on the spot and late: they choose the best checkpoint, and fail without ending a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspeed_nmt.cli import main
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.commands import logged, refused, train_words
from tests.support import run_ranks
from tests.system.conftest import SMALL

UPDATES = (4, 8, 12)


def program(path: Path, *lines: str) -> Path:
    """Write a shell script that may be called."""
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def scored(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks, scored by programs: by one of which less is better, by a late one, and by one that fails.

    Only the newest checkpoint is kept, and the best one. The late program chooses. Its second result comes while the
    third validation is scored, its others come later.
    """
    scratch = tmp_path_factory.mktemp("scored")
    count = program(
        scratch / "count.sh",
        'case "$1" in *0012.txt) echo 0.5 > "${1%0012.txt}0008.rated.result" ;; esac',
        "echo words:",
        'cat "$1" | wc -w',
        'env | grep "^RANK=" || true',
    )
    late = program(scratch / "late.sh", 'echo "$@"')
    broken = program(scratch / "broken.sh", "echo 3", "echo out of memory >&2", "exit 9")
    metrics = f"[bleu,command:{count}:lower,rated=late:{late},command:{broken}]"
    words = ["train", "--data", str(data), "--run", str(scratch / "run"), *SMALL, "engine.name=plain"]
    words += [f"validation.metrics={metrics}", "validation.best_by=rated", "training.keep_last=1"]
    run_ranks(["-m", "deepspeed_nmt", *words, "model.dropout=0"], 2, scratch)
    return scratch / "run"


def test_translations_of_all_validations_are_kept_beside_their_sources_and_references(
    data: Path, scored: Path
) -> None:
    texts = scored / "validation" / "main"
    sides = [(data / f"valid.{side}").read_text().splitlines()[:7] for side in ("source", "target")]
    assert (texts / "source.txt").read_text().splitlines() == sides[0]
    assert (texts / "reference.txt").read_text().splitlines() == sides[1]
    translations = {update: (texts / f"update-{update:07d}.txt").read_text() for update in UPDATES}
    assert all(text.count("\n") == 7 for text in translations.values())
    signatures = json.loads((texts / "signatures.json").read_text())
    assert list(signatures) == ["bleu", "count", "rated", "broken"]
    assert signatures["bleu"].startswith("nrefs:1|") and signatures["count"].endswith("|lower")
    board = EventAccumulator(str(scored / "tensorboard"))
    board.Reload()
    (first, *_) = board.Tensors("valid/samples/text_summary")
    assert first.step == 4 and sides[0][0] in first.tensor_proto.string_val[0].decode()
    # A program scores on the spot; one that fails is left out.
    assert logged(scored, "valid/count") == {update: len(text.split()) for update, text in translations.items()}
    assert not logged(scored, "valid/broken")
    said = (scored / "logs" / "rank-0.log").read_text()
    assert said.count("broken.sh, the metric broken, ended with status 9: 'out of memory'") == 3


def test_training_keeps_checkpoints_for_late_scores_and_choose_best_chooses_among_them(
    scored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(scored, tmp_path / "run")
    kept = {path.name for path in (run / "checkpoints").glob("update-*")}
    assert kept == {f"update-{update:07d}" for update in UPDATES}, "12 is the newest, 4 and 8 await their scores"
    assert not logged(run, "valid/rated"), "training reads no late score"
    texts = run / "validation" / "main"
    arguments = (texts / "update-0000004.rated.log").read_text().split()
    names = ("update-0000004.txt", "reference.txt", "source.txt", "update-0000004.rated.result")
    assert arguments == [str(scored / "validation" / "main" / name) for name in names]
    assert main(["choose-best", "--run", str(run)]) == 0
    assert logged(run, "valid/rated") == {8: 0.5}, "under the update that it belongs to"
    assert f"{run}/checkpoints/update-0000008 (valid/rated 0.5000); 2 scores to come" in capsys.readouterr().out
    (texts / "update-0000004.rated.result").write_text("0.9\n")
    assert main(["choose-best", "--run", str(run)]) == 0
    assert logged(run, "valid/rated") == {8: 0.5, 4: 0.9}
    assert main(["train", "--run", str(run), "training.max_updates=13"]) == 0
    assert (run / "checkpoints" / "best").read_text() == "update-0000004\n", "training keeps the choice"
    capsys.readouterr()
    assert main(["choose-best", "--run", str(run)]) == 0
    said = capsys.readouterr()
    assert "update-0000004" in said.out and "late values" not in said.err, "they are logged once"


def test_a_program_chooses_and_only_significant_gains_reset_patience(scored: Path, tmp_path: Path) -> None:
    run = shutil.copytree(scored, tmp_path / "run")
    # Each validation is better than the one before by as much in every sentence, which is significant at any level
    # that 1000 resamples can show, and at no lower one.
    less = program(
        tmp_path / "less.sh",
        "number=$(basename \"$1\" .txt | sed 's/update-0*//')",
        'for _ in 1 2 3 4 5 6 7; do expr 100 - "$number"; done | tee "$DEEPSPEED_NMT_SENTENCES"',
    )
    settings = [f"validation.metrics=[command:{less}:lower]", "validation.best_by=less", "training.validate_every=1"]
    settings += ["collapse.every=0", "training.patience=2", "training.max_updates=16"]
    assert main(["train", "--run", str(run), *settings, "validation.significant=0.0005"]) == 0
    progress = Checkpoint(run / "checkpoints" / "update-0000015").progress
    assert logged(run, "valid/less") == {13: 87.0, 14: 86.0, 15: 85.0}, "stopped early"
    assert progress.best_by is not None and progress.best_by.startswith("valid/less by settings ")
    assert (progress.best_update, progress.best_score) == (15, -85.0)
    assert (progress.validations_since_best, progress.patience_update) == (2, 13)
    assert main(["train", "--run", str(run), "validation.significant=0.05", "training.patience=3"]) == 0
    progress = Checkpoint(run / "checkpoints" / "update-0000016").progress
    assert (progress.best_update, progress.validations_since_best) == (16, 0)


def test_a_run_whose_program_is_missing_does_not_begin(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train_words(data, tmp_path / "run", *SMALL)
    refused([*command, f"validation.metrics=[late:{tmp_path}/none.sh]"], capsys, f"{tmp_path}/none.sh")
    late = program(tmp_path / "late.sh", "exit 0")
    patient = [*command, f"validation.metrics=[late:{late}]", "training.patience=2"]
    refused(patient, capsys, "training.patience", "late")
    assert not (tmp_path / "run" / "config.yaml").exists()
