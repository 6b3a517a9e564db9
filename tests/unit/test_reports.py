"""Reports of runs and of sweeps, on run directories that no training made."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.config import load_config
from deepspeed_nmt.engine.contract import EngineScalars
from deepspeed_nmt.reports.outcome import _RESULTS, Outcome, comparison_table, legend
from deepspeed_nmt.reports.run_log import run_names
from deepspeed_nmt.reports.text_scores import RecordedScore, ScoreKey
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.progress import Progress


def make_run(
    path: Path, *settings: str, recipe: str = "transformer_base", logged: int = 200_000, **last: float
) -> Path:
    """Make the settings and the log of a run that is finished, unless it has logged fewer updates.

    Args:
        path: run directory.
        settings: of the run.
        recipe: that it sets out from.
        logged: updates at the last entry of the log; 0 for no log.
        last: values of the last entry, ``_`` for the first ``/`` of a tag.
    """
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(load_config(recipe, settings=settings).to_yaml())
    if logged:
        entries = [{"update": update, "train/target_tokens": 100.0 * update} for update in (1, logged)]
        values = {tag.replace("_", "/", 1): value for tag, value in last.items()}
        lines = [json.dumps(entries[0] | {tag: 2 * value for tag, value in values.items()})]
        (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(entries[1] | values)]) + "\n")
    return path


class Report:
    """A report that must succeed, as JSON and as a table; its picture is OUT."""

    def __init__(self, capsys: pytest.CaptureFixture[str], out: Path, *words: str | Path) -> None:
        command = ["report", *map(str, words), "--out", str(out)]
        capsys.readouterr()
        assert main([*command, "--json"]) == 0
        printed, self.log = capsys.readouterr()
        self.rows = [json.loads(line, parse_constant=pytest.fail) for line in printed.splitlines()]
        assert main(command) == 0
        self.table = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
        self.picture = out.read_text(encoding="utf-8")


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Report]:
    """A function that reports the sweep deep_decoder_fig1 of the runs in ``tmp_path / "runs"``."""

    def report(*more: str, name: str = "deep_decoder_fig1") -> Report:
        return Report(capsys, tmp_path / "x.svg", "sweep", name, "--runs", tmp_path / "runs", *more)

    return report


def test_a_sweep_is_reported_by_settings_and_missing_runs_are_named(tmp_path: Path, sweep: Any) -> None:
    runs = tmp_path / "runs"
    done = {"train_ppl": 4.0, "valid_bleu": 27.0, "collapse_source_reliance": 2.5, "perf_hours": 3.0}
    make_run(runs / "six", "model.decoder_layers=6", **done)
    make_run(runs / "2", "model.decoder_layers=3", logged=1200, train_ppl=9.0)
    make_run(runs / "3", "model.decoder_layers=15", logged=0)
    make_run(runs / "other", "model.decoder_layers=5", **done)
    for name, content in (("broken", "model: 5"), ("damaged", "model: [5")):
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(content)
    (runs / "text.txt").write_text("no run")
    report = sweep()
    rows, log = report.rows, report.log
    assert [row["settings"]["model.decoder_layers"] for row in rows] == [1, 3, 6, 9, 12, 15, 18, 21, 24, 27]
    assert [row["status"] for row in rows[:3]] == ["missing", "1,200 of 200,000 updates", "finished"]
    expected = {"run": str(runs / "six"), "train_ppl": 4.0, "source_reliance": 2.5, "hours": 3.0}
    assert expected.items() <= rows[2].items()
    assert (rows[2]["metric"], rows[2]["score"]) == ("bleu", 54.0), "the best of validation without a test set"
    assert rows[5]["train_ppl"] is None and rows[5]["hours"] is None
    assert "<!-- final training perplexity -->" in report.picture
    assert report.table[3][:4] == ["3", "6", "4.000", "54.00"] and report.table[1][-1] == "missing"
    (line,) = (line for line in log.splitlines() if "no run in" in line)
    assert "7 of 10 points" in line and "point 1 (model.decoder_layers=1)" in line
    assert "`train $(deepspeed-nmt plan --sweep deep_decoder_fig1 --point 1)`" in line
    assert "runs/2 is not finished: 1,200 of 200,000 updates" in log
    assert "broken is left out" in log and "damaged is left out" in log and "in line 1, column 10" in log
    assert "no validation bleu is logged by 2, 3" in log, "the metric of the report is that of six"


def test_of_several_runs_of_a_point_the_one_nearest_to_the_recipe_is_taken(tmp_path: Path, sweep: Any) -> None:
    for name, more in (("1", ["optimizer.lr=1e-4"]), ("a", []), ("9", ["engine.name=plain"])):
        make_run(tmp_path / "runs" / name, "model.decoder_layers=1", *more, train_ppl=5.0)
    make_run(tmp_path / "runs" / "2", "model.decoder_layers=3", "model.dim=256", train_ppl=5.0)
    for number, weight in (("9", 2.0), ("2", 3.0)):
        record = {"path": "/data", "fingerprint": "a" * 64}
        parts = [{**record, "weights": [{"value": weight}]}, {**record, "weights": [{"value": 1.0}]}]
        (tmp_path / "runs" / number / "data.json").write_text(
            json.dumps({**record, "text": {}, "common_text": {}, "corpora": parts})
        )
    report = sweep()
    assert report.rows[0]["run"] == str(tmp_path / "runs" / "9"), "an engine is no difference; names decide"
    assert "point 1 (model.decoder_layers=1) has several runs" in report.log and "not a, 1" in report.log
    assert "also differ in model.dim, the data," in report.log, "in the weights of corpora"


def test_runs_are_compared_by_what_differs_and_what_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = {"train_ppl": 4.0, "valid_bleu": 20.0, "valid_chrf": 40.0, "valid_gone": 0.3, "perf_hours": 1.5}
    sets = {"valid_news/loss": 1.5, "valid_news/ppl": 4.4, "valid_news/ter": 60.0}
    one = make_run(tmp_path / "one", **logged, **sets)
    other = make_run(tmp_path / "other", "model.dropout=0.3", "optimizer.lr=5e-4", logged=100)
    for run, fingerprint in ((one, "a" * 64), (other, "b" * 64)):
        (run / "data.json").write_text(
            json.dumps({"path": "/data", "fingerprint": fingerprint, "text": {}, "common_text": {}})
        )
    report = Report(capsys, tmp_path / "runs.svg", "runs", one, other)
    first, second = report.rows
    assert ["fingerprint of the data", "a" * 12, "b" * 12] in report.table, "another text by the same path"
    assert first["settings"] == {"model.dropout": 0.1, "optimizer.lr": load_config("transformer_base").optimizer.lr}
    assert second["settings"] == {"model.dropout": 0.3, "optimizer.lr": 0.0005}
    assert first["status"] == "finished" and second["status"] == "100 of 200,000 updates"
    assert first["validation"] == {
        "bleu": {"last": 20.0, "best": 40.0},
        "chrf": {"last": 40.0, "best": 80.0},
        "gone": {"last": 0.3, "best": None},  # a program of earlier settings, of which less may be better
        "news/loss": {"last": 1.5, "best": 1.5},
        "news/ter": {"last": 60.0, "best": 60.0},
    }
    assert second["validation"] == {}
    assert (first["hours"], second["hours"], first["target_tokens"]) == (1.5, None, 20_000_000)
    assert first["parameters"] is None and first["test"] == []
    assert report.table[0] == ["", "one", "other"]
    for line in (["optimizer.lr", "0.0007", "0.0005"], ["validation chrf, best", "80.00", "-"]):
        assert line in report.table
    drawn = (tmp_path / "runs.svg").read_text(encoding="utf-8")
    assert "<!-- one (dropout=0.1, lr=0.0007) -->" in drawn, "curves are named by what differs"


def test_scores_of_texts_of_one_name_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither are those of different signatures."""
    common: dict[str, Any] = {"text": "test.en", "lines": 2, "checkpoint": "average", "metric": "bleu", "value": 9.0}
    for name, sha256, signature in (("one", "a" * 64, "old"), ("two", "b" * 64, "old"), ("three", "b" * 64, "new")):
        key = ScoreKey(text=sha256, signature=signature, weights="", search={})
        score = RecordedScore(key=key, signature=signature, **common).model_dump()
        file = make_run(tmp_path / name) / "test_scores.json"
        file.write_text(
            json.dumps({"scores": [score, {**score, "metric": "chrf", "value": 5.0}][: 1 + (name == "one")]})
        )
    report = Report(capsys, tmp_path / "runs.svg", "runs", *(tmp_path / name for name in ("one", "two", "three")))
    assert [line for line in report.table if " of test.en" in line[0]] == [
        ["bleu of test.en (aaaaaaaa, old)", "9.00", "-", "-"],
        ["chrf of test.en", "5.00", "-", "-"],
        ["bleu of test.en (bbbbbbbb, old)", "-", "9.00", "-"],
        ["bleu of test.en (bbbbbbbb, new)", "-", "-", "9.00"],
    ]
    assert [row["test"][0]["sha256"][0] for row in report.rows] == ["a", "b", "b"]
    other = [{**score, "checkpoint": "update-0000030"}]
    (tmp_path / "two" / "test_scores.json").write_text(json.dumps({"scores": other}))
    report = Report(capsys, tmp_path / "runs.svg", "runs", *(tmp_path / name for name in ("two", "three")))
    (line,) = (line for line in report.table if " of test.en" in line[0])
    assert line == ["bleu of test.en", "9.00 (update-0000030)", "9.00 (average)"]


def test_scores_of_several_checkpoints_are_told_apart() -> None:
    common = {"text": "test.en", "metric": "bleu", "signature": "s", "sha256": "a" * 64}
    scores = {"one": {"update-400": 30.0, "update-100": 10.0}, "two": {"update-400": 25.0004}}
    rows = {
        run: {
            **dict.fromkeys((*_RESULTS, "data", "fingerprint")), "settings": {}, "status": "", "validation": {},
            "test": [{**common, "checkpoint": name, "value": value} for name, value in values.items()],
        }
        for run, values in scores.items()
    }  # fmt: skip
    assert comparison_table(rows, [])[-1] == [
        "bleu of test.en",
        "30.00 (update-400), 10.00 (update-100)",
        "25.00 (update-400)",
    ]
    for row in rows.values():
        row["test"] = [{**score, "metric": "comet"} for score in row["test"]]
    assert comparison_table(rows, ["valid/comet"])[-1][2] == "25.0004 (update-400)", (
        "scores of programs differ by less"
    )


def test_runs_are_named_by_more_than_a_number() -> None:
    numbers = [Path("/runs/lr/1"), Path("/runs/lr/2")]
    assert run_names(numbers) == ["lr/1", "lr/2"]
    assert run_names([*numbers, Path("/runs/depth/1")]) == ["lr/1", "lr/2", "depth/1"]
    assert run_names([Path("/runs/a"), Path("/runs/b")]) == ["a", "b"]
    assert legend("a", {}) == "a" == legend("a", dict.fromkeys("xyz"))


def test_a_checkpoint_says_what_the_log_does_not(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "training.patience=3", logged=100)
    assert not Outcome.read(run).is_finished and Outcome.read(run).hours is None
    progress = Progress(update=120, target_tokens=7, train_seconds=5400.0, validations_since_best=3)
    CheckpointStore(run / "checkpoints").save(progress, EngineScalars(), [])
    outcome = Outcome.read(run)
    assert outcome.is_finished, "by early stopping"
    assert (outcome.updates, outcome.hours) == (120, 1.5)
    (run / "metrics.jsonl").unlink()
    assert Outcome.read(run).target_tokens == 7
    (run / "checkpoints" / "update-0000120" / "state.json").write_text("damaged")
    assert Outcome.read(run).status == "0 of 200,000 updates"
