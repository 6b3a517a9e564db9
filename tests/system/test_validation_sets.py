"""Runs with several validation sets: their values on one and two ranks, the best checkpoint, resuming, refusals."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.commands import log_of, pair_words, refused
from tests.support import run_ranks
from tests.system.conftest import SMALL


def prepare(text: Path, out: Path, *options: str) -> Path:
    """Make a data directory whose validation set is the sample's test set."""
    assert main(["prepare", "--out", str(out), *pair_words(text, train="test", valid="test"), *options]) == 0
    return out


def values_of(run: Path) -> dict[str, float]:
    """Return the last values of validation."""
    last = [line for line in log_of(run) if "valid/loss" in line][-1]
    return {tag: value for tag, value in last.items() if tag.startswith("valid/")}


@pytest.fixture(scope="module")
def news(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the vocabulary of the data, whose text is tokenised."""
    out = tmp_path_factory.mktemp("news") / "news"
    return prepare(data.parent / "text", out, "--vocab-from", str(data), "--text", "tokenised")


@pytest.fixture(scope="module")
def validated(data: Path, news: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates on two ranks, validated on its own set, on the same one by another name, and on news."""
    scratch = tmp_path_factory.mktemp("validated")
    words = ["train", "--data", str(data), "--run", str(scratch / "run"), *SMALL, "engine.name=plain"]
    words += ["--valid", f"again={data}", "--valid", f"news={news}"]
    words += ["training.max_updates=4", "validation.best_by=news/bleu_tokenised", "model.dropout=0"]
    run_ranks(["-m", "deepspeed_nmt", *words], 2, scratch)
    return scratch / "run"


def test_each_set_is_measured_by_the_metrics_of_its_text(data: Path, validated: Path) -> None:
    values = values_of(validated)
    losses = {f"valid/{of}{name}" for of in ("", "again/", "news/") for name in ("loss", "nll", "ppl")}
    assert values.keys() == losses | {"valid/bleu", "valid/again/bleu", "valid/news/bleu_tokenised"}
    for name in ("loss", "nll", "ppl", "bleu"):
        assert values[f"valid/again/{name}"] == values[f"valid/{name}"]
    sides = ((data.parent / "text" / f"test.{language}").read_text().splitlines() for language in ("en", "de"))
    pairs = list(Translator.open(validated, checkpoint="last").score(*sides))
    nll = -sum(pair.log_prob for pair in pairs) / sum(len(pair.log_probs) for pair in pairs)
    assert values["valid/news/nll"] == pytest.approx(nll, rel=1e-5)
    progress = Checkpoint(validated / "checkpoints" / "update-0000004").progress
    assert progress.best_by is not None and progress.best_by.startswith("valid/news/bleu_tokenised of ")
    assert progress.best_loss == values["valid/news/loss"]
    said = (validated / "logs" / "rank-0.log").read_text()
    assert re.search(r"done: 4 updates, .* target tokens, best valid news bleu_tokenised \d+\.\d\d \(update", said)
    assert "valid/news/bleu_tokenised: nrefs:1|" in said and "valid/again/bleu: nrefs:1|" in said


def test_sets_change_when_a_run_resumes_and_another_measure_begins_anew(
    news: Path, validated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(validated, tmp_path / "run")
    monkeypatch.chdir(news.parent)  # a relative path is one of this start
    resume = ["train", "--run", str(run), "collapse.every=0", "training.validate_every=1"]
    changes = ["--valid", "more=news", "validation.sets.again=null", "validation.best_by=mean/loss"]
    assert main([*resume, *changes, "training.max_updates=5"]) == 0
    values = values_of(run)
    assert values.keys() == {
        *("valid/loss", "valid/nll", "valid/ppl", "valid/bleu", "valid/mean/loss"),
        *(f"valid/{of}/{name}" for of in ("news", "more") for name in ("loss", "nll", "ppl", "bleu_tokenised")),
    }
    assert values["valid/more/loss"] == values["valid/news/loss"] != values["valid/loss"]
    assert values["valid/mean/loss"] == fmean(values[f"valid/{of}loss"] for of in ("", "news/", "more/"))
    progress = Checkpoint(run / "checkpoints" / "update-0000005").progress
    assert (progress.best_update, progress.best_score) == (5, -values["valid/mean/loss"])
    by = progress.best_by
    monkeypatch.chdir(tmp_path)
    assert main([*resume, "training.max_updates=6", "validation.sets.more=null"]) == 0, "it keeps its other sets"
    sets = yaml.safe_load((run / "config.yaml").read_text())["validation"]["sets"]
    assert sets == {"news": str(news)} and "valid/more/loss" not in values_of(run)
    progress = Checkpoint(run / "checkpoints" / "update-0000006").progress
    assert progress.best_update == 6 and by is not None
    assert progress.best_by != by, "means over other sets are not compared"


def test_a_set_of_another_vocabulary_or_place_is_refused(
    data: Path, news: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = prepare(data.parent / "text", tmp_path / "other", "--vocab-size", "300")
    train = ["train", "--data", str(data), "--run", str(tmp_path / "run"), *SMALL]
    capsys.readouterr()
    error = refused([*train, "--valid", f"x={other}", f"validation.sets.y={tmp_path}/none"], capsys)
    first, second = [line for line in error.splitlines() if "validation.sets." in line]
    assert "validation.sets.x" in first and str(other) in first and str(data) in first
    assert f"{tmp_path}/none" in second and "validation.sets.y=null" in second
    damaged = shutil.copytree(news, tmp_path / "damaged")
    with (damaged / "valid.target").open("r+b") as stream:
        stream.write(b"#")
    refused([*train, "--valid", f"news={damaged}"], capsys, "valid.target")
    assert not (tmp_path / "run" / "config.yaml").exists()
