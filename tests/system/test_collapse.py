"""The collapse monitor warns of a decoder that ignores its source, and only of such a decoder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.sample import write_sample
from tests.commands import log_of, logged, newest, pair_words, refused
from tests.support import run_ranks
from tests.system.conftest import SMALL

SETTINGS = [
    *("--recipe", "sample_small", "model.dim=64", "model.ffn_dim=128", "model.heads=4", "engine.device=cpu"),
    *("model.encoder_layers=1", "model.decoder_layers=2", "model.dropout=0.0", "batch.update_tokens=600"),
    *("schedule.warmup_updates=60", "optimizer.lr=6e-3", "training.max_updates=240", "training.validate_every=240"),
    *("collapse.every=60", "collapse.sentences=48", "validation.metrics=[]"),
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data directories: good/ of the sample corpus, shuffled/ of the same with shuffled training sources."""
    directory = tmp_path_factory.mktemp("collapse")
    text = directory / "text"
    write_sample(text, train=3000, valid=150, test=20, seed=3)
    lines = (text / "train.en").read_text(encoding="utf-8").splitlines()
    random.Random(1).shuffle(lines)
    (text / "shuffled.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (text / "shuffled.de").write_bytes((text / "train.de").read_bytes())
    for name, train in (("good", "train"), ("shuffled", "shuffled")):
        words = ["prepare", "--out", str(directory / name), "--vocab-size", "700", "--max-ratio", "100"]
        assert main([*words, *pair_words(text, train=train, valid="valid")]) == 0
    return directory


def reliance(run: Path) -> list[float]:
    return list(logged(run, "collapse/source_reliance").values())


@pytest.fixture(scope="module")
def runs(texts: Path) -> dict[str, tuple[Path, str]]:
    """A run on each directory, and the output of its ranks: two, of which one is to warn, on shuffled text."""
    done = {}
    adapted = ["layer.name=cross_attention_drop", "layer.drop_depth=1", "layer.drop_ratio=0.3"]
    adapted += ["layer.target_reliance=0.5", "layer.max_ratio=0.35", "collapse.every=35", "training.max_updates=210"]
    for name, ranks, *settings in (("good", 1), ("shuffled", 2, *adapted)):
        run = texts / f"run-{name}"
        words = ["-m", "deepspeed_nmt", "train", "--data", str(texts / name), "--run", str(run), *SETTINGS]
        done[name] = (run, "".join(run_ranks([*words, "engine.name=plain", *map(str, settings)], ranks, texts)))
    return done


def test_it_warns_of_a_model_that_ignores_its_source(runs: dict[str, tuple[Path, str]]) -> None:
    run, said = runs["shuffled"]
    assert all(abs(value) < 0.05 for value in reliance(run)), "a language model"
    assert said.count("the decoder ignores its source") == 1, "one rank warns in every second measurement"


def test_a_drop_ratio_rises_to_its_bound_while_the_source_is_ignored(runs: dict[str, tuple[Path, str]]) -> None:
    run, _ = runs["shuffled"]
    ratios = logged(run, "collapse/drop_ratio")
    assert list(ratios)[-1] == 210 and min(ratios) > 120, "not in the grace period"
    ratio = 0.3
    for update, value in ratios.items():
        ratio = min(0.35, ratio + 0.1 * min(1.0, 1.0 - logged(run, "collapse/source_reliance")[update] / 0.5))
        assert value == pytest.approx(ratio, rel=1e-9)
    assert ratio == 0.35
    assert newest(run).progress.drop_ratio == 0.35
    assert not logged(runs["good"][0], "collapse/drop_ratio")


def test_a_run_that_adapts_resumes_to_the_bit_and_is_the_same_on_two_ranks(data: Path, tmp_path: Path) -> None:
    words = [
        "train",
        "--data",
        str(data),
        *SMALL,
        "model.dropout=0",
        "batch.micro_tokens=250",
        "training.log_every=1",
    ]
    words += ["layer.name=cross_attention_drop", "layer.drop_depth=2", "layer.drop_ratio=0.1", "layer.adapt_step=0.5"]
    words += ["collapse.every=2", "collapse.grace=1", "collapse.sentences=8", "validation.metrics=[]"]
    words += ["engine.name=plain"]
    target, runs = "layer.target_reliance=9", {name: tmp_path / name for name in ("one", "stopped", "two", "fixed")}
    for name, updates, *more in (("one", 6, target), ("stopped", 3, target), ("stopped", 6, target), ("fixed", 6)):
        assert main([*words, f"training.max_updates={updates}", "--run", str(runs[name]), *more]) == 0
    pair = [*words, "training.max_updates=6", "--run", str(runs["two"]), target]
    run_ranks(["-m", "deepspeed_nmt", *pair], 2, tmp_path)
    ratios = {name: logged(run, "collapse/drop_ratio") for name, run in runs.items()}
    losses = {name: list(logged(run, "train/loss").values()) for name, run in runs.items()}
    assert list(ratios["one"]) == [2, 4, 6] and 0.5 < ratios["one"][2] < 0.7 and ratios["one"][4] == 0.9
    assert ratios["stopped"] == ratios["one"] and losses["stopped"] == losses["one"] and not ratios["fixed"]
    straight, resumed = newest(runs["one"]), newest(runs["stopped"])
    assert straight.progress.drop_ratio == resumed.progress.drop_ratio == 0.9
    for name, weight in straight.weights().items():
        assert torch.equal(weight, resumed.weight(name)), name
    assert ratios["two"] == pytest.approx(ratios["one"], abs=1e-6)
    assert losses["two"] == pytest.approx(losses["one"], abs=1e-4)
    assert losses["fixed"][:2] == losses["one"][:2] and losses["fixed"][2:] != losses["one"][2:], "the ratio counts"


def test_it_does_not_warn_of_a_good_model(runs: dict[str, tuple[Path, str]]) -> None:
    run, said = runs["good"]
    assert reliance(run)[-1] > 0.6
    assert "the decoder ignores its source" not in said
    shares = [logged(run, f"collapse/cross_share/layer_{layer:02}")[240] for layer in (1, 2)]
    assert all(0.05 < share < 0.95 for share in shares)


def test_it_can_stop_the_run(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--data", str(texts / "shuffled"), "--run", str(tmp_path / "run"), *SETTINGS]
    words += ["collapse.action=stop", "collapse.every=5", "collapse.grace=5"]
    assert main([*words, "training.max_updates=10"]) == 0
    assert "ignores its source" not in capsys.readouterr().err
    # The bad measurement of update 10 still counts after the run is resumed.
    refused(words, capsys, "update 15: the decoder ignores its source", "saved after update 15", status=1)
    assert (tmp_path / "run" / "checkpoints" / "update-0000015" / "manifest.json").is_file()
    events = {event["event"]: event for event in log_of(tmp_path / "run", "events")}
    collapse, failure = events["collapse"], events["failure"]
    assert collapse["update"] == failure["update"] == 15 and collapse["action"] == "stop"
    assert "ignores its source" in collapse["text"] and "was saved after update 15" in failure["text"]


def test_report_compares_runs(
    runs: dict[str, tuple[Path, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(run) for run, _ in runs.values()]
    picture = tmp_path / "both.svg"
    assert main(["report", "runs", *paths, "--out", str(picture), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["run"] for row in rows] == ["run-good", "run-shuffled"]
    assert rows[0]["source_reliance"] == reliance(runs["good"][0])[-1] and rows[0]["updates"] == 240
    assert 1.0 < rows[0]["train_ppl"] < rows[1]["train_ppl"] and list(rows[0]["cross_share"]) == ["1", "2"]
    drawn = picture.read_text(encoding="utf-8")
    assert "<!-- training perplexity -->" in drawn and drawn.count("QuadMesh") == 2, "a map for each run"
    refused(["report", "runs", *paths, "--out", str(tmp_path / "x.doc")], capsys, "--out", ".svg")
