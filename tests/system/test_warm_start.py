"""Runs that start from another run (grown, stacked, fine-tuned), and translations by their exits."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.nbest import RerankLists, read_nbest
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests import commands
from tests.commands import log_of, pair_words, refused, train_words
from tests.support import change_settings, run_ranks
from tests.system.conftest import SMALL

GROW = ["model.name=depth_growing", "model.top_encoder_layers=1", "model.top_decoder_layers=1"]


@pytest.fixture(scope="module")
def bottom(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("bottom") / "run"
    assert main(train_words(data, run, *SMALL, "training.max_updates=4")) == 0
    return run


def translated(data: Path, run: Path, tmp_path: Path, *more: str) -> str:
    source = data.parent / "text" / "test.en"
    return "\n".join([*commands.translate(run, source, tmp_path / "out", "--checkpoint", "last", *more), ""])


def to_stdout(data: Path, run: Path, *more: str) -> list[str]:
    """Return the command line of a translation to stdout."""
    source = str(data.parent / "text" / "test.en")
    return ["translate", "--run", str(run), "--checkpoint", "last", "--input", source, "--output", "-", *more]


def newest(run: Path) -> dict[str, torch.Tensor]:
    return commands.newest(run).weights()


def test_a_grown_run_keeps_its_bottom(data: Path, bottom: Path, tmp_path: Path, small: list[str]) -> None:
    run, how = tmp_path / "grown", ["engine.name=deepspeed", "engine.ds_config=zero3"]
    command = ["-m", "deepspeed_nmt", *train_words(data, run, *small, *GROW, *how, "validation.metrics=[]")]
    run_ranks([*command, "--grow-from", str(bottom), "training.max_updates=6"], 2, tmp_path)
    run_ranks([*command, "training.max_updates=8"], 2, tmp_path)  # resumes without --grow-from
    below, grown = newest(bottom), newest(run)
    assert all(torch.equal(grown[f"bottom.{name}"], weight) for name, weight in below.items())
    origin = json.loads((run / "origin.json").read_text())
    assert origin["frozen"] and origin["update"] == 4
    shallow, deep = (translated(data, run, tmp_path, "--exit", name) for name in ("shallow", "deep"))
    assert shallow == translated(data, bottom, tmp_path) != deep
    reranked = translated(data, run, tmp_path, "--rerank", "deep-shallow", "--alpha", "0.4")
    assert reranked.count("\n") == deep.count("\n")
    assert translated(data, run, tmp_path, "--run", str(run)) == deep, "an ensemble of a run and itself"


def test_direct_stacking_initializes_the_common_layers(
    data: Path, bottom: Path, tmp_path: Path, small: list[str]
) -> None:
    run = tmp_path / "stacked"
    still = ["optimizer.lr=1e-20", "schedule.initial_lr=0", "training.max_updates=1"]
    more = ["model.decoder_layers=3", "--init-from", str(bottom), *still]
    assert main(train_words(data, run, *small, *more)) == 0
    stacked = newest(run)
    assert all(torch.allclose(stacked[name], weight) for name, weight in newest(bottom).items())
    assert any(name.startswith("decoder.layers.2.") for name in stacked)


def test_a_deeper_encoder_begins_with_copies_of_the_top_layers(data: Path, tmp_path: Path, small: list[str]) -> None:
    shallow, deep, sdt = tmp_path / "shallow", tmp_path / "deep", ["model.name=sdt", "model.stack_layers=1"]
    assert main(train_words(data, shallow, *small, *sdt, "training.max_updates=1")) == 0
    still = ["optimizer.lr=1e-20", "schedule.initial_lr=0", "training.max_updates=1"]
    more = ["model.encoder_layers=4", "--init-from", str(shallow), *still]
    assert main(train_words(data, deep, *small, *sdt, *more)) == 0
    below, grown = newest(shallow), newest(deep)
    assert all(torch.allclose(grown[name], weight) for name, weight in below.items())
    top = {name.partition(".layers.1.")[2] for name in below if name.startswith("encoder.layers.1.")}
    for name in top:
        for number in (2, 3):
            assert torch.allclose(grown[f"encoder.layers.{number}.{name}"], below[f"encoder.layers.1.{name}"])
    assert torch.allclose(grown["encoder.links.norms.3.bias"], below["encoder.links.norms.1.bias"])
    assert torch.allclose(grown["encoder.links.sums.4.weight"], torch.full((5,), 0.2))


def variant(run: Path, to: Path, **sections: dict[str, object]) -> Path:
    """Copy a run and change the settings that it records."""
    shutil.copytree(run, to)
    config = yaml.safe_load((to / "config.yaml").read_text())
    for name, settings in sections.items():
        config[name].update(settings)
    change_settings(to, config)
    return to


RECURRENT: dict[str, object] = {"name": "recurrent", "encoder_loops": 2}


def test_maps_of_loops_that_a_run_lacks_begin_as_the_identity(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    loops, run = variant(bottom, tmp_path / "loops", model=RECURRENT), tmp_path / "mapped"
    settings = ["model.name=recurrent", "model.encoder_loops=2", "model.decoder_loops=2", "model.loop_rank=3"]
    still = ["optimizer.lr=1e-20", "schedule.initial_lr=0", "training.max_updates=1", "--init-from", str(loops)]
    assert main(train_words(data, run, *small, *settings, *still)) == 0
    error = capsys.readouterr().err
    assert f"768 parameters are new: {loops} lacks them" in error and "different network" not in error
    assert translated(data, run, tmp_path) == translated(data, loops, tmp_path)


@pytest.mark.parametrize(
    ("option", "sections", "settings", "expected"),
    [
        ("", {}, GROW, ["frozen", "--grow-from"]),
        ("--grow-from", {}, [], ["--grow-from", "grows"]),
        ("--grow-from", {"model": {"heads": 2}}, GROW, ["model.heads is 2 there and 4 here"]),
        ("--grow-from", {"model": {"norm": "deepnorm"}}, GROW, ["model.norm is deepnorm there and pre here"]),
        ("--grow-from", {"model": RECURRENT}, GROW, ["model.name=recurrent"]),
        ("--grow-from", {"layer": {"name": "cross_attention_drop", "drop_depth": 1}}, GROW, ["layer.name="]),
        ("--init-from", {"model": {"activation": "gelu"}}, [], ["model.activation is gelu there and relu here"]),
        ("--init-from", {}, ["model.encoder_layers=1"], ["encoder.layers.1"]),
        ("--init-from", {}, ["--from-checkpoint", "nope"], ["--from-checkpoint", "nope"]),
    ],
)
def test_mismatched_origins_are_refused(
    data: Path,
    bottom: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    option: str,
    sections: dict[str, dict[str, object]],
    settings: list[str],
    expected: list[str],
) -> None:
    other = variant(bottom, tmp_path / "other", **sections) if sections else bottom
    origin = [option, str(other)] if option else []
    refused(train_words(data, tmp_path / "run", *small, *settings, *origin), capsys, *expected)


def test_origins_of_other_vocabularies_and_without_checkpoints_are_refused(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = train_words(data, tmp_path / "run", *small)
    refused([*words, *GROW, "--grow-from", str(tmp_path / "nope")], capsys, "--grow-from", "nope")
    other, pairs = variant(bottom, tmp_path / "other"), pair_words(data.parent / "text", train="train", valid="valid")
    for path in (other / "checkpoints").glob("update-*"):
        opened = Checkpoint(path)
        opened.restate(replace(opened.progress, best_score=None))
    refused([*words, "--init-from", str(other)], capsys, "--from-checkpoint last")
    shutil.rmtree(other / "checkpoints")
    refused([*words, "--init-from", str(other)], capsys, "checkpoint", "train first")
    assert main(["prepare", "--out", str(tmp_path / "data"), "--vocab-size", "400", *pairs]) == 0
    words = train_words(tmp_path / "data", tmp_path / "run", *small, *GROW, "--grow-from", str(bottom))
    refused(words, capsys, f"--vocab-from {bottom}")


def test_weights_trained_in_another_layer_order_give_a_warning(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = variant(bottom, tmp_path / "other", model={**RECURRENT, "dropout": 0.3})
    words = train_words(data, tmp_path / "run", *small, "--init-from", str(other), "training.max_updates=1")
    assert main(words) == 0
    error = capsys.readouterr().err
    assert "model.encoder_loops is 2 there and unset here" in error and "model.name is recurrent there" in error
    assert "dropout" not in error


def test_the_origin_of_a_run_cannot_change(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", variant(bottom, tmp_path / "other")
    command, start = train_words(data, run, *small), ["--init-from", str(bottom)]
    for number, more in enumerate((start, start, []), 1):
        assert main([*command, *more, f"training.max_updates={number}"]) == 0, "the same origin, or none named"
    refused([*command, "--init-from", str(other)], capsys, f"--init-from {bottom.resolve()}", str(other))
    refused([*command, *start, "--from-checkpoint", "last"], capsys, "last")
    refused([*command, "--grow-from", str(bottom)], capsys, "--grow-from")
    refused([*command, "--restart", "--init-from", str(run)], capsys, "and so is --run")
    assert newest(run), "nothing is set aside"
    refused(train_words(data, other, *small, *start), capsys, "without it")


@pytest.fixture(scope="module")
def grown(data: Path, bottom: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grown run that was validated by deep-shallow search."""
    run = tmp_path_factory.mktemp("grown") / "run"
    more = ["--grow-from", str(bottom), "training.max_updates=1", "search.name=deep_shallow"]
    assert main(train_words(data, run, *SMALL, *GROW, *more)) == 0
    return run


def test_a_tuned_pair_chooses_what_translate_writes_with_it(
    data: Path, bottom: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All candidates of both exits, in one n-best file, suffice to translate with any alpha and exponent."""
    nbest, reference = tmp_path / "nbest", str(data.parent / "text" / "test.de")
    nbest.write_text(translated(data, grown, tmp_path, "--beam", "3", "--nbest", "6"), encoding="utf-8")
    lists = read_nbest(str(nbest))
    assert len(lists) == 20 and max(map(len, lists)) > 3
    reranked, seen = RerankLists(lists), set()
    for alpha, exponent in [(0.5, 0.4), (0.3, -2.0)]:
        options = ["--beam", "3", "--alpha", str(alpha), "--exponent", str(exponent)]
        text = translated(data, grown, tmp_path, *options)
        places = reranked.choose(alpha, exponent)
        assert text.splitlines() == [candidates[place].text for candidates, place in zip(lists, places, strict=True)]
        seen.add(text)
    assert len(seen) > 1, "the pairs must choose differently"
    assert main(["score", "--tune-rerank", str(nbest), "--reference", reference, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    pair = ["--alpha", str(best["alpha"]), "--exponent", str(best["exponent"])]
    hypothesis = tmp_path / "hypothesis"
    hypothesis.write_text(translated(data, grown, tmp_path, "--beam", "3", *pair), encoding="utf-8")
    assert main(["score", "--hypothesis", str(hypothesis), "--reference", reference, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"]["score"] == pytest.approx(best["bleu"], abs=1e-9)
    refused(to_stdout(data, grown, "--nbest", "7", "--beam", "3"), capsys, "--nbest", "7", "--beam", "6")
    refused(to_stdout(data, bottom, "--alpha", "0.5"), capsys, "--alpha", "search.name=beam")
    refused(to_stdout(data, grown, "--rerank", "deep-shallow", "--exit", "shallow"), capsys, "--exit")


def test_both_exits_score_the_candidates_as_the_search_did(data: Path, grown: Path, tmp_path: Path) -> None:
    sources = (data.parent / "text" / "test.en").read_text(encoding="utf-8").splitlines()[:10]
    translator = Translator.open(grown, checkpoint="last", device="cpu")
    for exit in ("deep", "shallow"):
        scorer = Translator.open(grown, checkpoint="last", device="cpu", exit=exit)
        compared = 0
        for source, found in zip(sources, translator.stream(sources, nbest=4), strict=True):
            scored = scorer.score([source] * len(found), (each.text for each in found))
            for each, score in zip(found, scored, strict=True):
                if score.tokens == each.tokens:  # text can be segmented in several ways
                    assert score.mean_log_prob == pytest.approx(each.features[exit], rel=1e-4)
                    compared += 1
        assert compared > 10


def test_report_sweep_translates_a_test_set_once(
    data: Path, bottom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [("transformer_base", [f"model.decoder_layers={layers}"]) for layers in (2, 3)]
    monkeypatch.setattr("deepspeed_nmt.reports.sweep.load_sweep", lambda name: points)
    run = tmp_path / "runs" / "1"
    shutil.copytree(bottom, run)
    command = ["report", "sweep", "some", "--runs", str(run.parent), "--data", str(data), "--out"]
    command += [str(tmp_path / "sweep.svg"), "--json", "--checkpoint"]

    def reported(which: str) -> dict[str, object]:
        capsys.readouterr()
        assert main([*command, which]) == 0
        row, missing = map(json.loads, capsys.readouterr().out.splitlines())
        assert missing["status"] == "missing"
        return row  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.reports.text_scores.atomic_write_text", read_only)
        first = reported("last")
    assert not (run / "test_scores.json").exists(), "a run that cannot be written to is reported all the same"
    hypotheses = translated(data, run, tmp_path).splitlines()
    references = (data.parent / "text" / "test.de").read_text(encoding="utf-8").splitlines()
    assert first["score"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)
    assert first["scores"] == {"bleu": first["score"]}
    assert first["updates"] == 4 and first["status"] == "finished" and first["hours"] > 0.0  # type: ignore[operator]
    assert reported("last") == first
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.reports.text_scores.Translator.open", None)
        assert reported("last") == first and reported("best") == first, "one checkpoint by two names"
    (score,) = json.loads((run / "test_scores.json").read_text())["scores"]
    assert (score["checkpoint"], score["lines"], score["value"]) == ("update-0000004", 20, first["score"])
    assert main(train_words(data, run, "training.max_updates=6")) == 0
    assert reported("last")["updates"] == 6
    scores = json.loads((run / "test_scores.json").read_text())["scores"]
    assert [score["checkpoint"] for score in scores] == ["update-0000004", "update-0000006"], "other weights"
    report = ["report", "runs", str(run), str(bottom), "--out", str(tmp_path / "runs.svg")]
    capsys.readouterr()
    assert main([*report, "--json"]) == 0
    trained, copied = map(json.loads, capsys.readouterr().out.splitlines())
    assert [test["value"] for test in trained["test"]] == [score["value"] for score in scores] and not copied["test"]
    assert trained["settings"] == {"training.max_updates": 6}


def read_only(path: Path, text: str) -> None:
    raise OSError(30, "Read-only file system", str(path))


def test_a_model_of_many_exits_translates_at_each(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    exits = ["objective.label_smoothed=null", "objective.multi_softmax.exits=2x2"]
    assert main(train_words(data, run, *small, *exits)) == 0
    assert "train/mean_exit_nll" in log_of(run)[0]
    whole = translated(data, run, tmp_path)
    capsys.readouterr()
    assert translated(data, run, tmp_path, "--encoder-layers", "2", "--decoder-layers", "2") == whole
    assert translated(data, run, tmp_path, "--exit", "1-2")
    assert "was not trained at exit" not in capsys.readouterr().err
    assert translated(data, run, tmp_path, "--decoder-layers", "1") == translated(
        data, run, tmp_path, "--exit", "2-1"
    )
    text = data.parent / "text"
    picture = tmp_path / "depths.svg"
    report = ["report", "depths", "--run", str(run), "--checkpoint", "last", "--input", str(text / "test.en")]
    report += ["--reference", str(text / "test.de"), "--out", str(picture)]
    capsys.readouterr()
    rule = tmp_path / "rule.json"
    assert main([*report, "--json", "--oracle", "--signs", "--fit", str(rule)]) == 0
    found = json.loads(capsys.readouterr().out)
    written = json.loads(rule.read_text())
    assert {**found["rule"], "weights": written["weights"]} == written and found["rule"]["exits"] == [1, 2]
    translated(data, run, tmp_path, "--choose-exits", str(rule))
    assert "was fitted on other weights" not in capsys.readouterr().err
    rule.write_text(json.dumps({**written, "weights": "another"}))
    translated(data, run, tmp_path, "--choose-exits", str(rule))
    assert f"rule.json was fitted on other weights than those of {run}" in capsys.readouterr().err
    for threshold, layers in ((-1e6, "1"), (1.0, "2")):
        rule.write_text(json.dumps({**found["rule"], "threshold": threshold}))
        fixed = translated(data, run, tmp_path, "--decoder-layers", layers)
        assert translated(data, run, tmp_path, "--choose-exits", str(rule)) == fixed
    assert [(d["encoder"], d["decoder"]) for d in found["depths"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(math.isfinite(depth["reliance"]) and depth["reliance"] != 0.0 for depth in found["depths"])
    assert [depth["accepted"] is not None for depth in found["depths"]] == [False, False, True, False]
    assert 0.0 <= found["depths"][2]["accepted"] <= 1.0
    assert sum(found["oracle"]["sentences"].values()) == 20 and found["cheapest"]
    # After a few updates sentences have no BLEU, by which the oracle chooses (tests/unit/test_depths.py).
    assert 0.0 <= found["oracle"]["bleu"] < 5.0
    assert all(word in picture.read_text(encoding="utf-8") for word in ("<svg", "reliance on the source"))
    refused([word.replace(str(run), str(bottom)) for word in [*report, "--fit", str(rule)]], capsys, "--fit", "one")
    refused([*report, "--fit", str(tmp_path / "none" / "rule")], capsys, "--fit", "there is no directory")
    refused([*report, "--fit", str(text / "test.de")], capsys, "--fit", "which the report reads")
    rule.write_text(json.dumps({**found["rule"], "exits": [1, 3]}))
    refused(to_stdout(data, run, "--choose-exits", str(rule)), capsys, "search.exits has 3", "decoder_layers is 2")
    refused([*report[:-4], "--reference", str(text / "valid.de")], capsys, "20", "31")
    refused(to_stdout(data, run, "--encoder-layers", "3"), capsys, "exit", "from 1 to 2")


def test_added_exits_leave_the_full_depth_as_it_was(
    data: Path, bottom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their settings and data are those of the run that they are added to; a resumed run is the same one."""
    run, straight = tmp_path / "exits", tmp_path / "straight"
    add = [
        "--add-exits",
        "1",
        "--init-from",
        str(bottom),
        "objective.added_exits.rank=2",
        "training.validate_every=1",
    ]
    for path, updates in ((run, 2), (run, 4), (straight, 4)):
        assert main(["train", "--run", str(path), *add, f"training.max_updates={updates}"]) == 0
    before, after = newest(bottom), newest(run)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert set(after) - set(before) == {
        f"decoder.exits.1.{name}" for name in ("norm.weight", "norm.bias", "down_RD", "up_DR")
    }
    assert all(torch.equal(weight, after[name]) for name, weight in newest(straight).items())
    assert not torch.equal(after["decoder.exits.1.norm.weight"], before["decoder.final_norm.weight"])
    losses = commands.logged(run, "valid/loss")
    assert losses[4] < losses[1], "validation measures the exits"
    assert main(["average", "--run", str(run), "--last", "3"]) == 0
    capsys.readouterr()
    deep = translated(data, bottom, tmp_path)
    for checkpoint in ("last", "average"):
        assert translated(data, run, tmp_path, "--checkpoint", checkpoint) == deep
    assert translated(data, run, tmp_path, "--decoder-layers", "1") != deep
    assert "was not trained at exit" not in capsys.readouterr().err
    again = ["train", "--run", str(tmp_path / "again"), "--init-from", str(bottom)]
    refused([*again[:3], "--add-exits", "1"], capsys, "--add-exits", "--init-from")
    refused([*again, "--add-exits", "1,2"], capsys, "exits has 2", "model.decoder_layers is 2")
    refused([*again, "--add-exits", "1],x"], capsys, "objective.added_exits.exits")
    refused(train_words(data, run, "--add-exits", "2", "--init-from", str(bottom)), capsys, "exits has 2")
    refused(["train", "--run", str(run), *add, "objective.added_exits.rank=3"], capsys, "rank is 3")
