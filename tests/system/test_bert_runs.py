"""Runs on two BERTs, from prepare to score, through the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from tests.berts import make_bert
from tests.commands import log_of, pair_words, refused
from tests.support import assert_same, run_ranks

RECIPES = ["bert_coordinator", "abnet_original_serial"]
"""One of each kind; others are trained by every engine."""
SETTINGS = [
    *("batch.update_tokens=600", "batch.micro_tokens=600", "schedule.warmup_updates=10", "optimizer.lr=2e-3"),
    *("training.max_updates=8", "training.validate_every=4", "training.log_every=4", "training.keep_last=9"),
    *("validation.max_sentences=7", "collapse.every=8", "engine.device=cpu"),
]


@pytest.fixture(scope="module")
def berts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """BERTs of the two languages of the sample corpus."""
    path, text = tmp_path_factory.mktemp("berts"), data.parent / "text"
    return [
        make_bert(
            path / side, (text / f"train.{side}").read_text(encoding="utf-8").splitlines(), seed, 300 + 50 * seed
        )
        for seed, side in enumerate(("en", "de"))
    ]


@pytest.fixture(scope="module")
def prepared(data: Path, berts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample corpus prepared with the BERTs' vocabularies."""
    out, text = tmp_path_factory.mktemp("bert-data") / "data", data.parent / "text"
    words = ["prepare", "--out", str(out), "--tokenizer", f"hf:{berts[0]},{berts[1]}", "--max-length", "126"]
    assert main([*words, *pair_words(text, train="train", valid="valid", test="test")]) == 0
    return out


def train(recipe: str, prepared: Path, run: Path, berts: list[Path], *settings: str) -> list[str]:
    """A command."""
    words = ["train", "--recipe", recipe, "--data", str(prepared), "--run", str(run), *SETTINGS]
    named = [f"model.{side}_encoder={path}" for side, path in zip(("source", "target"), berts, strict=True)]
    if recipe == "bert_coordinator":
        named.append("model.coordinator_layers=2")
    if recipe.startswith("abnet"):
        named.append("model.adapter_dim=48")
    return [*words, *named, *settings]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_trained_resumed_translated_and_scored(
    recipe: str, prepared: Path, berts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(train(recipe, prepared, whole, berts)) == 0
    said = capsys.readouterr().err
    assert ("of them trained" in said) == (recipe != "bert_coordinator")
    # Resumed without its BERTs.
    copies = [Path(shutil.copytree(bert, tmp_path / bert.name)) for bert in berts]
    assert main(train(recipe, prepared, run, copies, "training.max_updates=4")) == 0
    for copy in copies:
        shutil.rmtree(copy)
    assert main(train(recipe, prepared, run, copies)) == 0
    assert "resuming after update 4" in capsys.readouterr().err
    assert_same(run, whole, 8)
    abnet, hypothesis = recipe.startswith("abnet"), tmp_path / "hypothesis"
    options = ["--iterations", "3", "--length-beam", "2"] if abnet else ["--beam", "2"]
    words = ["translate", "--run", str(run), "--input", str(prepared / "test.source"), "--output", str(hypothesis)]
    words += ["--device", "cpu", *options]
    assert main([*words, "--nbest", "2"]) == 0
    assert len(hypothesis.read_text(encoding="utf-8").splitlines()) == 40
    assert main(words) == 0 and len(hypothesis.read_text(encoding="utf-8").splitlines()) == 20
    if abnet:
        assert main([*words, "--exit", "top"]) == 0
        refused([*words, "--run", str(run)], capsys, "masked tokens")
        refused([*words, "--nbest", "7"], capsys, "--nbest", "--length-beam", "7")
    wrong = ["--beam", "2"] if abnet else ["--iterations", "2"]
    refused([*words, *wrong], capsys, wrong[0], "search.name=")
    export = ["export", "--run", str(run), "--format", "huggingface", "--out", str(tmp_path / "out")]
    assert "/checkpoints/" not in refused(export, capsys), "the weights are not loaded"


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("bert_parallel_frozen", ["engine.ds_config=zero3", "engine.recompute_decoder=1"]),
        ("bert_parallel", ["engine.name=plain", "engine.tensor_parallel=2"]),
    ],
    ids=["zero3, frozen, recomputed", "tensor parallel"],
)
def test_every_engine_gives_the_same_losses(
    recipe: str, settings: list[str], prepared: Path, berts: list[Path], tmp_path: Path
) -> None:
    off = ["model.dropout=0", "model.attention_dropout=0", "validation.metrics=[]", "training.log_every=1"]
    off.append("model.fusion_scale=learned")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(train(recipe, prepared, alone, berts, *off, "engine.name=plain")) == 0
    words = train(recipe, prepared, run, berts, *off, *settings)
    run_ranks(["-m", "deepspeed_nmt", *words], 2, tmp_path)

    def curve(path: Path) -> list[float]:
        return [entry[key] for entry in log_of(path) for key in ("train/loss", "valid/loss") if key in entry]

    assert len(curve(run)) == 10
    assert curve(run) == pytest.approx(curve(alone), abs=2e-5)


def test_mismatched_data_and_berts_are_refused(
    data: Path, prepared: Path, berts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, text = tmp_path / "run", data.parent / "text"
    other = make_bert(tmp_path / "other", ["q w e r t y"] * 9, 7, layers=2)
    lines = (berts[1] / "vocab.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (other / "vocab.txt").write_text("".join(lines[::-1]), encoding="utf-8")
    short = make_bert(tmp_path / "short", ["a b c"], 1, max_position_embeddings=12)
    bare = tmp_path / "bare"
    shutil.copytree(berts[1], bare, ignore=shutil.ignore_patterns("vocab.txt", "tokenizer*"))
    for recipe, directory, models, settings, expected in (
        ("bert_parallel", data, berts, [], ["source side"]),
        ("bert_serial", prepared, [berts[0], other], [], ["target side"]),
        ("bert_parallel", prepared, berts, ["model.target.layers=1"], ["model.target", "model.target_encoder"]),
        ("bert_scratch_transformer", prepared, [short, short], [], ["12"]),
    ):
        refused(train(recipe, directory, run, models, *settings), capsys, *expected)
    assert not list(run.glob("checkpoints/update*"))
    prepare = ["prepare", "--out", str(tmp_path / "data"), *pair_words(text, train="test", valid="test")]
    for tokenizer, options, expected in (
        (f"hf:{berts[0]}", ["--vocab-size", "500"], ["--vocab-size"]),
        (f"hf:{bare}", [], ["vocab.txt"]),
    ):
        refused([*prepare, "--tokenizer", tokenizer, *options], capsys, *expected)
    assert not (tmp_path / "data").exists()


def test_lines_too_long_for_the_bert_are_cut(
    prepared: Path, berts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, source, output = tmp_path / "run", tmp_path / "long.en", tmp_path / "long.de"
    assert main(train("bert_parallel", prepared, run, berts, "training.max_updates=2", "validation.metrics=[]")) == 0
    source.write_text("the river " * 200 + "\nthe river\n\n")
    words = ["translate", "--run", str(run), "--input", str(source), "--output", str(output), "--device", "cpu"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "line 1 has " in said and "127" in said
    assert len(output.read_text(encoding="utf-8").splitlines()) == 3


def test_a_fine_tuned_run_has_the_network_of_its_origin(
    prepared: Path, berts: list[Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = tmp_path / "first", ["training.max_updates=1", "validation.metrics=[]"]
    assert main(train("bert_parallel", prepared, first, berts, *last)) == 0
    capsys.readouterr()
    onto = ["--init-from", str(first)]
    assert main([*train("bert_parallel_frozen", prepared, tmp_path / "tuned", berts, *last), *onto]) == 0
    assert "trained in a different network" not in capsys.readouterr().err
    lines = (data.parent / "text/train.de").read_text(encoding="utf-8").splitlines()
    deeper = make_bert(tmp_path / "deeper", lines, 1, 350, layers=4)
    shutil.copy(berts[1] / "vocab.txt", deeper)  # a newly learned vocabulary may have another order
    words = train("bert_parallel_frozen", prepared, tmp_path / "deep", [berts[0], deeper], *last)
    refused([*words, *onto], capsys, "model.target is", "'layers': 4")
    heads = make_bert(tmp_path / "heads", lines, 1, 350, num_attention_heads=8)
    shutil.copy(berts[1] / "vocab.txt", heads)
    words = train("bert_parallel", prepared, tmp_path / "other", [berts[0], heads], *last)
    refused([*words, *onto], capsys, "model.target is", "'heads': 8")
