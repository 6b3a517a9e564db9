"""Runs that start from another run (grown, stacked, fine-tuned), and translations by their exits."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sacrebleu
import torch
import yaml

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.metrics import METRICS, Scorer
from deepspeed_nmt.evaluate.nbest import read_nbest
from deepspeed_nmt.evaluate.reranking import RerankLists
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.support import change_settings, run_ranks

GROW = ["model.name=depth_growing", "model.top_encoder_layers=1", "model.top_decoder_layers=1"]


def words(data: Path, run: Path, *more: str) -> list[str]:
    return ["train", "--data", str(data), "--run", str(run), *more]


@pytest.fixture(scope="module")
def bottom(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.system.conftest import SMALL

    run = tmp_path_factory.mktemp("bottom") / "run"
    assert main(words(data, run, *SMALL, "training.max_updates=4")) == 0
    return run


def translated(data: Path, run: Path, tmp_path: Path, *more: str) -> str:
    out = tmp_path / "out"
    source = str(data.parent / "text" / "test.en")
    assert (
        main(["translate", "--run", str(run), "--checkpoint", "last", "--input", source, "--output", str(out), *more])
        == 0
    )
    return out.read_text(encoding="utf-8")


def newest(run: Path) -> dict[str, torch.Tensor]:
    return Checkpoint(sorted(run.glob("checkpoints/update-*"))[-1]).weights()


@pytest.mark.parametrize("engine", ["plain", "zero3"])
def test_a_grown_run_keeps_its_bottom(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], engine: str
) -> None:
    run = tmp_path / "grown"
    how = ["engine.name=plain"] if engine == "plain" else ["engine.name=deepspeed", f"engine.ds_config={engine}"]
    command = words(data, run, *small, *GROW, *how, "validation.metrics=[]")
    run_ranks(
        ["-m", "deepspeed_nmt", *command, "--grow-from", str(bottom), "training.max_updates=6"], 2, tmp_path, 120
    )
    run_ranks(
        ["-m", "deepspeed_nmt", *command, "training.max_updates=8"], 2, tmp_path, 120
    )  # resumes without --grow-from
    below, grown = Checkpoint(bottom / "checkpoints" / "update-0000004").weights(), newest(run)
    assert all(torch.equal(grown[f"bottom.{name}"], weight) for name, weight in below.items())
    origin = json.loads((run / "origin.json").read_text())
    assert origin["frozen"] and origin["update"] == 4
    shallow, deep = (translated(data, run, tmp_path, "--exit", name) for name in ("shallow", "deep"))
    assert shallow == translated(data, bottom, tmp_path) != deep
    assert translated(data, run, tmp_path, "--rerank", "deep-shallow", "--alpha", "0.4").count("\n") == deep.count(
        "\n"
    )
    twice = translated(data, run, tmp_path, "--run", str(run))
    assert twice == deep, "an ensemble of a run and itself"


def test_direct_stacking_initializes_the_common_layers(
    data: Path, bottom: Path, tmp_path: Path, small: list[str]
) -> None:
    run = tmp_path / "stacked"
    still = ["optimizer.lr=1e-20", "schedule.initial_lr=0", "training.max_updates=1"]
    more = ["model.decoder_layers=3", "--init-from", str(bottom), *still]
    assert main(words(data, run, *small, *more)) == 0
    below, stacked = Checkpoint(bottom / "checkpoints" / "update-0000004").weights(), newest(run)
    assert all(torch.allclose(stacked[name], weight) for name, weight in below.items())
    assert any(name.startswith("decoder.layers.2.") for name in stacked)


def test_mismatched_origins_are_refused(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str, where: Path = data) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        capsys.readouterr()
        assert main(words(where, tmp_path / "run", *small, *more)) == 2
        return capsys.readouterr().err

    assert "this model has frozen parts, which need trained weights; give their run with" in refused(*GROW)
    grow = ["--grow-from", str(bottom)]
    assert "--grow-from needs a model that grows" in refused(*grow)
    error = refused(*GROW, *grow, "model.dim=16")
    assert f"the bottom must be that of {bottom}, but model.dim is 32 there and 16 here; make" in error
    error = refused("--init-from", str(bottom), "model.encoder_layers=1")
    assert "is unexpected" in error
    other, text = tmp_path / "other", data.parent / "text"
    sides = [f"--{split}-{side}" for split in ("train", "valid") for side in ("source", "target")]
    files = [str(text / name) for name in ("train.en", "train.de", "valid.en", "valid.de")]
    pairs = [word for pair in zip(sides, files, strict=True) for word in pair]
    assert main(["prepare", "--out", str(other), "--vocab-size", "400", *pairs]) == 0
    assert f"prepare the data with --vocab-from {bottom}" in refused(*GROW, *grow, where=other)
    assert "objective.multi_softmax trains many exits" in refused(
        *GROW, *grow, "objective.label_smoothed=null", "objective.multi_softmax.exits=all"
    )


def variant(run: Path, to: Path, **sections: dict[str, object]) -> Path:
    """Copy a run and change the settings that it records."""
    shutil.copytree(run, to)
    config = yaml.safe_load((to / "config.yaml").read_text())
    for name, settings in sections.items():
        config[name].update(settings)
    change_settings(to, config)
    return to


RECURRENT = {"name": "recurrent", "encoder_loops": 2}


@pytest.mark.parametrize(
    ("option", "sections", "message"),
    [
        ("--grow-from", {"model": {"heads": 2}}, "but model.heads is 2 there and 4 here; make these settings those"),
        ("--grow-from", {"model": {"norm": "deepnorm"}}, "but model.norm is deepnorm there and pre here"),
        ("--grow-from", {"model": RECURRENT}, "has model.name=recurrent, which cannot be grown"),
        (
            "--grow-from",
            {"layer": {"name": "cross_attention_drop", "drop_depth": 1}},
            "decoder layers all have cross-attention, but those of layer.name=cross_attention_drop",
        ),
        ("--init-from", {"model": {"activation": "gelu"}}, "but model.activation is gelu there and relu here"),
    ],
)
def test_another_network_of_the_same_shape_is_refused(
    data: Path,
    bottom: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    option: str,
    sections: dict[str, dict[str, object]],
    message: str,
) -> None:
    other = variant(bottom, tmp_path / "other", **sections)
    grow = GROW if option == "--grow-from" else []
    assert main(words(data, tmp_path / "run", *small, *grow, option, str(other))) == 2
    assert message in capsys.readouterr().err


def test_weights_trained_in_another_layer_order_give_a_warning(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = variant(bottom, tmp_path / "other", model={**RECURRENT, "dropout": 0.3})
    assert main(words(data, tmp_path / "run", *small, "--init-from", str(other), "training.max_updates=1")) == 0
    error = capsys.readouterr().err
    assert "model.encoder_loops is 2 there and unset here and model.name is recurrent there" in error
    assert "were trained in a different network" in error and "dropout" not in error


def test_the_origin_of_a_run_cannot_change(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", variant(bottom, tmp_path / "other")
    command = words(data, run, *small)
    start = ["--init-from", str(bottom)]

    def refused(*more: str, where: list[str] = command) -> str:
        capsys.readouterr()
        assert main([*where, *more]) == 2
        return capsys.readouterr().err

    assert "neither --init-from nor --grow-from is given; give one of them" in refused("--from-checkpoint", "last")
    assert main([*command, *start, "training.max_updates=1"]) == 0
    assert main([*command, *start, "training.max_updates=2"]) == 0, "the same command again"
    assert main([*command, "training.max_updates=3"]) == 0
    error = refused("--init-from", str(other))
    assert (
        f"began with --init-from {bottom.resolve()} --from-checkpoint best, but now" in error and str(other) in error
    )
    assert "leave --init-from out to resume" in error
    assert "but now --init-from is" in refused(*start, "--from-checkpoint", "last")
    assert "but now --grow-from is" in refused("--grow-from", str(bottom))
    assert "has begun without it" in refused(*start, where=words(data, other, *small))


def test_errors_name_the_option_of_the_origin(
    data: Path, bottom: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*more: str) -> str:
        capsys.readouterr()
        assert main(words(data, tmp_path / "run", *small, *more)) == 2
        return capsys.readouterr().err

    assert "--grow-from must be a directory made by `train`" in refused(*GROW, "--grow-from", str(tmp_path / "nope"))
    start = ["--init-from", str(bottom)]
    assert "--from-checkpoint must be best, last, average or the path" in refused(*start, "--from-checkpoint", "nope")
    other = variant(bottom, tmp_path / "other")
    for checkpoint in (other / "checkpoints").glob("update-*"):
        opened = Checkpoint(checkpoint)
        opened.restate(replace(opened.progress, best_score=None))
    assert "use --from-checkpoint last" in refused("--init-from", str(other))
    shutil.rmtree(other / "checkpoints")
    assert "must hold a checkpoint, but is empty; train first" in refused("--init-from", str(other))


@pytest.fixture(scope="module")
def grown(data: Path, bottom: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grown run that was validated by deep-shallow search."""
    from tests.system.conftest import SMALL

    run = tmp_path_factory.mktemp("grown") / "run"
    more = ["--grow-from", str(bottom), "training.max_updates=1", "search.name=deep_shallow"]
    assert main(words(data, run, *SMALL, *GROW, *more)) == 0
    return run


def test_an_exit_of_a_run_with_deep_shallow_search_decodes_by_beam(
    data: Path, bottom: Path, grown: Path, tmp_path: Path
) -> None:
    assert translated(data, grown, tmp_path, "--exit", "shallow") == translated(data, bottom, tmp_path)
    deep = translated(data, grown, tmp_path, "--exit", "deep")
    assert translated(data, grown, tmp_path, "--run", str(grown)) == deep, (
        "an ensemble is not decoded by deep-shallow search"
    )


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
        assert text.splitlines() == reranked.texts(alpha, exponent)
        seen.add(text)
    assert len(seen) > 1, "the pairs must choose differently"
    assert main(["score", "--tune-rerank", str(nbest), "--reference", reference, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    pair = ["--alpha", str(best["alpha"]), "--exponent", str(best["exponent"])]
    hypothesis = tmp_path / "hypothesis"
    hypothesis.write_text(translated(data, grown, tmp_path, "--beam", "3", *pair), encoding="utf-8")
    assert main(["score", "--hypothesis", str(hypothesis), "--reference", reference, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"]["score"] == pytest.approx(best["bleu"], abs=1e-9)
    source = str(data.parent / "text" / "test.en")
    for run, more, message in (
        (
            grown,
            ["--nbest", "7", "--beam", "3"],
            "--nbest must be at most 2 x --beam, which is 6, but is 7; raise --beam",
        ),
        (
            grown,
            ["--exit", "deep", "--exponent", "1"],
            "--exponent is no option of search.name=beam, which decodes here; leave out --exit to decode with deep_",
        ),
        (bottom, ["--alpha", "0.5"], "--alpha is no option of search.name=beam, which decodes here; leave it out"),
    ):
        capsys.readouterr()
        assert main(["translate", "--run", str(run), "--input", source, "--output", "-", *more]) == 2
        assert message in capsys.readouterr().err


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


def test_rerank_refuses_other_runs_and_exits(
    data: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(data.parent / "text" / "test.en")
    command = ["translate", "--run", str(grown), "--checkpoint", "last", "--input", source, "--output", "-"]

    def refused(*more: str) -> str:
        capsys.readouterr()
        assert main([*command, "--rerank", "deep-shallow", *more]) == 2
        return capsys.readouterr().err

    assert "takes one --run, but 2 are given" in refused("--run", str(grown))
    assert "decodes from two exits, --exit from one; give one of them" in refused("--exit", "shallow")
    assert "--encoder-layers or --decoder-layers from one" in refused("--encoder-layers", "1")


def test_an_exit_applies_to_each_run_of_an_ensemble(
    data: Path, bottom: Path, grown: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    deeper = tmp_path / "deeper"
    more = ["model.decoder_layers=3", "--init-from", str(bottom), "training.max_updates=1"]
    assert main(words(data, deeper, *small, *more)) == 0
    capsys.readouterr()
    assert translated(data, bottom, tmp_path, "--run", str(deeper), "--encoder-layers", "1").count("\n") == 20
    error = capsys.readouterr().err
    assert error.count("was not trained at exit") == 2
    assert f"{bottom} was not trained at exit 1-2" in error and f"{deeper} was not trained at exit 1-3" in error
    source = str(data.parent / "text" / "test.en")
    command = ["translate", "--checkpoint", "last", "--input", source, "--output", "-", "--decoder-layers"]
    assert main([*command, "3", "--run", str(bottom), "--run", str(deeper)]) == 2
    assert f"error: {bottom}: the exit must be n-m with" in capsys.readouterr().err
    assert main([*command, "1", "--run", str(bottom), "--run", str(grown)]) == 2
    assert f"error: {grown}: the exit must be shallow or deep" in capsys.readouterr().err


def test_report_depths_checks_its_options(
    data: Path, bottom: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = data.parent / "text"
    command = ["report", "depths", "--checkpoint", "last", "--input", str(text / "test.en")]
    command += ["--reference", str(text / "test.de"), "--out"]

    def refused(out: Path, *more: str, run: Path = bottom) -> str:
        capsys.readouterr()
        assert main([*command, str(out), "--run", str(run), *more]) == 2
        error = capsys.readouterr().err
        assert "update" not in error or run == grown, "refused before the model is loaded"
        return error

    picture = tmp_path / "depths.png"
    for loss in ("-1", "nan", "inf"):
        assert "--max-loss must be at least 0 and finite" in refused(picture, "--max-loss", loss)
    assert "--out must end in .png, .svg or .pdf" in refused(tmp_path / "depths")
    assert "--out must be a file, but" in refused(tmp_path)
    assert "has the exits shallow and deep; translate with --exit" in refused(picture, run=grown)
    assert main([*command, str(picture), "--run", str(bottom)]) == 0
    error = capsys.readouterr().err
    assert "was trained at only 1 of its 4 depths (2-2)" in error
    assert "20 sentences are too few to compare depths" in error and "give 200 or more" in error
    assert [path.name for path in tmp_path.iterdir()] == ["depths.png"]


def test_report_sweep_translates_a_test_set_once(
    data: Path, bottom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [("transformer_base", [f"model.decoder_layers={layers}"]) for layers in (2, 3)]
    monkeypatch.setattr("deepspeed_nmt.run.sweep.load_sweep", lambda name: points)
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
        patch.setattr("deepspeed_nmt.run.scores.atomic_write_text", read_only)
        first = reported("last")
    assert not (run / "test_scores.json").exists(), "a run that cannot be written to is reported all the same"
    hypotheses = translated(data, run, tmp_path).splitlines()
    references = (data.parent / "text" / "test.de").read_text(encoding="utf-8").splitlines()
    assert first["score"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)
    assert first["scores"] == {"bleu": first["score"]}
    assert first["updates"] == 4 and first["status"] == "finished" and first["hours"] > 0.0  # type: ignore[operator]
    assert reported("last") == first
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.run.scores.Translator.open", None)
        assert reported("last") == first and reported("best") == first, "one checkpoint by two names"
    (score,) = json.loads((run / "test_scores.json").read_text())["scores"]
    assert (score["checkpoint"], score["lines"], score["value"]) == ("update-0000004", 20, first["score"])
    assert main(words(data, run, "training.max_updates=6")) == 0
    assert reported("last")["updates"] == 6
    scores = json.loads((run / "test_scores.json").read_text())["scores"]
    assert [each["checkpoint"] for each in scores] == ["update-0000004", "update-0000006"], "other weights"
    report = ["report", "runs", str(run), str(bottom), "--out", str(tmp_path / "runs.svg")]
    capsys.readouterr()
    assert main([*report, "--json"]) == 0
    trained, copied = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["value"] for each in trained["test"]] == [each["value"] for each in scores] and not copied["test"]
    assert trained["settings"] == {"training.max_updates": 6}
    count = sum(weight.numel() for weight in newest(run).values())
    assert trained["parameters"] == copied["parameters"] == count
    assert main(report) == 0
    assert f"bleu of {data}/test.source" in capsys.readouterr().out


def test_report_runs_translates_a_test_set_once_and_records_all_scores(
    data: Path, bottom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, text = tmp_path / "run", data.parent / "text"
    shutil.copytree(bottom, run)
    report = ["report", "runs", str(run), "--out", str(tmp_path / "runs.svg"), "--checkpoint", "last"]
    command = [*report, "--json", "--input", str(text / "test.en"), "--reference", str(text / "test.de")]

    def scorer(run: Run, references: list[str]) -> Scorer:
        return Scorer([METRICS["bleu"], METRICS["chrf"]], run.text_form, references)

    def reported() -> dict[str, float]:
        capsys.readouterr()
        assert main(command) == 0
        return {each["metric"]: each["value"] for each in json.loads(capsys.readouterr().out)["test"]}

    assert list(reported()) == ["bleu"], "raw text has one"
    monkeypatch.setattr(Run, "scorer", scorer)
    scores = reported()
    hypotheses = translated(data, run, tmp_path).splitlines()
    references = (text / "test.de").read_text(encoding="utf-8").splitlines()
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score)
    recorded = json.loads((run / "test_scores.json").read_text())["scores"]
    assert [each["metric"] for each in recorded] == ["bleu", "chrf"], "the score that was recorded is kept"
    monkeypatch.setattr("deepspeed_nmt.run.scores.Translator.open", None)
    other = {**recorded[0], "value": 99.0, "key": {**recorded[0]["key"], "weights": "those of another checkpoint"}}
    (run / "test_scores.json").write_text(json.dumps({"scores": [*recorded, other]}))
    assert reported() == scores
    assert main(report) == 0
    assert "chrf of" in capsys.readouterr().out
    points = [("transformer_base", [f"model.decoder_layers={layers}"]) for layers in (2, 3)]
    monkeypatch.setattr("deepspeed_nmt.run.sweep.load_sweep", lambda name: points)
    sweep = ["report", "sweep", "some", "--runs", str(tmp_path), *command[command.index("--input") :]]
    assert main([*sweep, "--checkpoint", "last", "--out", str(tmp_path / "sweep.svg")]) == 0
    head, point, missing = (re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    found = dict(zip(head, point, strict=True))
    assert {f"test {metric}": f"{value:.2f}" for metric, value in scores.items()}.items() <= found.items()
    assert len(missing) == len(head)


def read_only(path: Path, text: str) -> None:
    raise OSError(30, "Read-only file system", str(path))


def test_a_model_of_many_exits_translates_at_each(
    data: Path,
    bottom: Path,
    tmp_path: Path,
    small: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    exits = ["objective.label_smoothed=null", "objective.multi_softmax.exits=2x1"]
    assert main(words(data, run, *small, *exits)) == 0
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "train/mean_exit_nll" in log[0]
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
    batches: list[int] = []
    from deepspeed_nmt.search import translate as module

    def counted(model: object, tokenizer: object, lines: list[str], *more: object, **named: object) -> object:
        batches.append(len(lines))
        return translate_lines(model, tokenizer, lines, *more, **named)

    translate_lines = module.translate_lines
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(module, "translate_lines", counted)
        assert main([*report, "--json", "--oracle"]) == 0
    assert batches == [8, 20] * 4, "a warm-up that is not timed comes first"
    captured = capsys.readouterr()
    assert "rest on one measurement of each pair; --repeat 3 steadies them" in captured.err
    found = json.loads(captured.out)
    assert [(d["encoder"], d["decoder"]) for d in found["depths"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert sum(found["oracle"]["sentences"].values()) == 20 and found["cheapest"]
    # After a few updates sentences have no BLEU, by which the oracle chooses (tests/unit/test_depths.py).
    assert 0.0 <= found["oracle"]["bleu"] < 5.0
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert main([*report, "--max-loss", "100"]) == 0
    assert "Pareto front: " in capsys.readouterr().out
    assert main([*report, "--run", str(bottom), "--repeat", "2", "--oracle", "--json"]) == 0
    captured = capsys.readouterr()
    assert "rest on one measurement" not in captured.err
    single, many = map(json.loads, captured.out.splitlines())
    assert [(d["encoder"], d["decoder"]) for d in single["depths"]] == [(2, 2)]
    assert single["oracle"]["sentences"] == {"2-2": 20}
    assert [d["bleu"] for d in many["depths"]] == [d["bleu"] for d in found["depths"]]
    assert all(depth["loading_seconds"] > 0.0 for depth in [*single["depths"], *many["depths"]])
    assert list(many["oracle"]["cumulative"])[-1] == "2-2" and many["oracle"]["cumulative"]["2-2"] == 1.0
    assert main([*report[:-4], "--reference", str(text / "valid.de")]) == 2
    assert "must have equally many lines" in capsys.readouterr().err
    source = str(data.parent / "text" / "test.en")
    command = ["translate", "--run", str(run), "--checkpoint", "last", "--input", source, "--output", "-"]
    assert main([*command, "--encoder-layers", "3"]) == 2
    assert "n from 1 to 2 stages of the encoder" in capsys.readouterr().err
    # As if the run were older than the weights by inverse probability.
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["objective"]["multi_softmax"].pop("inverse_probability") is True
    change_settings(run, config)
    assert translated(data, run, tmp_path) == whole
    for more in ("training.max_updates=13", "training.max_updates=14"):
        assert main(words(data, run, *small, *exits, more)) == 0, "the same command resumes it, once and again"
        assert "inverse_probability: false" in (run / "config.yaml").read_text()
    capsys.readouterr()
    refused = "objective.multi_softmax.inverse_probability=true"
    assert main(words(data, run, *small, *exits, refused)) == 2
    assert "objective.multi_softmax.inverse_probability must stay False" in capsys.readouterr().err
