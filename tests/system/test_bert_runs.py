"""Runs on two BERTs, from prepare to score, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from tests.berts import make_bert
from tests.support import assert_same, run_ranks

RECIPES = [
    "bert_parallel", "bert_parallel_frozen", "bert_serial", "bert_init_transformer", "bert_scratch_transformer",
    "bert_coordinator", "abnet_original_serial", "abnet_parallel",
]  # fmt: skip
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
    for split in ("train", "valid", "test"):
        words += [f"--{split}-source", str(text / f"{split}.en"), f"--{split}-target", str(text / f"{split}.de")]
    assert main(words) == 0
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
    assert ("of them trained" in said) == (recipe not in ("bert_scratch_transformer", "bert_coordinator"))
    # Resumed without its BERTs.
    copies = [Path(shutil.copytree(bert, tmp_path / bert.name)) for bert in berts]
    assert main(train(recipe, prepared, run, copies, "training.max_updates=4")) == 0
    for copy in copies:
        shutil.rmtree(copy)
    assert main(train(recipe, prepared, run, copies)) == 0
    assert "resuming after update 4" in capsys.readouterr().err
    assert_same(run, whole, 8)
    text, hypothesis = prepared.parent.parent, tmp_path / "hyp"
    source, target = prepared / "test.source", prepared / "test.target"
    options = ["--iterations", "3", "--length-beam", "2"] if recipe.startswith("abnet") else ["--beam", "2"]
    words = ["translate", "--run", str(run), "--input", str(source), "--output", str(hypothesis), "--device", "cpu"]
    assert text.exists() and main([*words, *options, "--nbest", "2"]) == 0
    assert len(hypothesis.read_text(encoding="utf-8").splitlines()) == 40
    assert main([*words, *options]) == 0
    scores, like = [], ["--like", str(prepared)]
    for option in ([], ["--lowercase"], like):
        capsys.readouterr()
        assert main(["score", "--hypothesis", str(target), "--reference", str(target), "--json", *option]) == 0
        scores.append(json.loads(capsys.readouterr().out)["bleu"]["score"])
    assert scores[:2] == pytest.approx([100.0, 100.0]) and scores[2] < 90, "references in lower case"
    assert main(["score", "--hypothesis", str(hypothesis), "--reference", str(target), *like]) == 0
    capsys.readouterr()
    if recipe.startswith("abnet"):
        assert main([*words, "--exit", "top"]) == 0
        assert main([*words, "--run", str(run)]) == 2
        assert "predicts masked tokens; give it alone" in capsys.readouterr().err
        assert main([*words, "--nbest", "7"]) == 2
        assert "raise --length-beam to 7" in capsys.readouterr().err
    wrong = ["--beam", "2"] if recipe.startswith("abnet") else ["--iterations", "2"]
    assert main([*words, *wrong]) == 2
    said = capsys.readouterr().err
    assert f"{wrong[0]} is no option of search.name=" in said and "which decodes here; leave it out\n" in said
    assert main(["export", "--run", str(run), "--format", "huggingface", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    what = "translate from left to right" if recipe.startswith("abnet") else "be a plain Transformer"
    assert f"must {what} to be exported" in said and "/checkpoints/" not in said, "the weights are not loaded"


@pytest.mark.parametrize(
    ("recipe", "ranks", "settings"),
    [
        ("bert_parallel_frozen", 2, ["engine.name=deepspeed", "engine.ds_config=zero3"]),
        ("bert_coordinator", 2, ["engine.name=deepspeed", "engine.ds_config=zero2"]),
        (
            "abnet_original_parallel",
            2,
            ["engine.name=deepspeed", "engine.ds_config=zero3", "engine.recompute_decoder=1"],
        ),
        ("bert_parallel", 2, ["engine.name=plain", "engine.tensor_parallel=2"]),
    ],
    ids=["zero3, frozen", "zero2, untied", "zero3, recomputed, masked tokens", "tensor parallel"],
)
def test_every_engine_gives_the_same_losses(
    recipe: str, ranks: int, settings: list[str], prepared: Path, berts: list[Path], tmp_path: Path
) -> None:
    off = ["model.dropout=0", "model.attention_dropout=0", "validation.metrics=[]", "training.log_every=1"]
    if recipe.startswith("bert_parallel"):
        off.append("model.fusion_scale=learned")
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert main(train(recipe, prepared, alone, berts, *off, "engine.name=plain")) == 0
    words = train(recipe, prepared, run, berts, *off, *settings)
    run_ranks(["-m", "deepspeed_nmt", *words], ranks, tmp_path, timeout=150)

    def curve(path: Path) -> list[float]:
        entries = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [entry[key] for entry in entries for key in ("train/loss", "valid/loss") if key in entry]

    assert len(curve(run)) == 10
    assert curve(run) == pytest.approx(curve(alone), abs=2e-5)


def test_plan_counts_the_tokens_of_the_berts(berts: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    named = [f"model.{side}_encoder={path}" for side, path in zip(("source", "target"), berts, strict=True)]
    assert main(["plan", "--recipe", "bert_serial", *named]) == 0
    assert "with a vocabulary of 300 and 350: " in capsys.readouterr().out
    assert main(["plan", "--recipe", "bert_serial", *named, "--vocab-size", "500,600"]) == 0
    assert "with a vocabulary of 500 and 600: " in capsys.readouterr().out


def test_mismatched_data_and_berts_are_refused(
    data: Path, prepared: Path, berts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(words: list[str]) -> str:
        assert main(words) == 2
        return capsys.readouterr().err

    run = tmp_path / "run"
    wrong = "must have the vocabulary of the data's source side, but"
    assert wrong in refused(train("bert_parallel", data, run, berts))
    assert wrong in refused(train("abnet_serial", prepared, run, berts[::-1]))
    other = make_bert(tmp_path / "other", ["q w e r t y"] * 9, 7, layers=2)
    words = (berts[1] / "vocab.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (other / "vocab.txt").write_text("".join(words[::-1]), encoding="utf-8")
    assert "the data's target side, but" in refused(train("bert_serial", prepared, run, [berts[0], other]))
    message = refused(train("bert_parallel", prepared, run, berts, "model.target.layers=1"))
    assert "model.target must be the shape of model.target_encoder" in message
    bare = tmp_path / "bare"
    shutil.copytree(berts[1], bare, ignore=shutil.ignore_patterns("vocab.txt", "tokenizer*"))
    assert not list(run.glob("checkpoints/update*"))
    missing = [Path("/nowhere/bert"), berts[1]]
    assert "there is no folder /nowhere/bert" in refused(train("bert_parallel", prepared, run, missing))
    short = make_bert(tmp_path / "short", ["a b c"], 1, max_position_embeddings=12)
    words = train("bert_scratch_transformer", prepared, run, [short, short])
    assert "sentences must have 12 source tokens at most, which is what the model reads" in refused(words)
    prepare = ["prepare", "--out", str(tmp_path / "data"), "--tokenizer", f"hf:{berts[0]}"]
    for split in ("train", "valid"):
        for side in ("source", "target"):
            prepare += [f"--{split}-{side}", str(data.parent / "text" / "test.en")]
    assert "leave out --vocab-size" in refused([*prepare, "--vocab-size", "500"])
    prepare[4] = f"hf:{bare}"
    assert "lacks a vocabulary (vocab.txt or tokenizer.json)" in refused(prepare)
    prepare[4] = "bert-base-uncased"
    assert "--tokenizer must be hf:BERT or hf:BERT,BERT, but is 'bert-base-uncased'" in refused(prepare)
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
    assert "line 1 has " in said and ", more than 127 (all that the model reads): its end is not translated" in said
    assert len(output.read_text(encoding="utf-8").splitlines()) == 3


def test_a_model_that_cannot_be_sliced_is_refused(prepared: Path, berts: list[Path], tmp_path: Path) -> None:
    words = train("abnet_serial", prepared, tmp_path / "run", berts, "engine.name=plain", "engine.tensor_parallel=2")
    outputs = run_ranks(["-m", "deepspeed_nmt", *words], 2, tmp_path, timeout=60, status=2)
    assert "this model's length cannot be sliced" in "".join(outputs)


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
    assert main([*words, *onto]) == 2
    assert "must have all layers that are frozen here, but lacks decoder.layers.2" in capsys.readouterr().err
    heads = make_bert(tmp_path / "heads", lines, 1, 350, num_attention_heads=8)
    shutil.copy(berts[1] / "vocab.txt", heads)
    words = train("bert_parallel", prepared, tmp_path / "other", [berts[0], heads], *last)
    assert main([*words, *onto]) == 2
    assert "model.target.heads is 4 there and 8 here" in capsys.readouterr().err


def test_unknown_tokens_are_counted(data: Path, berts: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\u65e5\u672c the river\nthe river is old\n", encoding="utf-8")
    words = ["prepare", "--out", str(tmp_path / "data"), "--tokenizer", f"hf:{berts[0]}", "--keep-duplicates"]
    for split in ("train", "valid"):
        words += [f"--{split}-source", str(text), f"--{split}-target", str(text)]
    assert main(words) == 0
    stats = json.loads((tmp_path / "data/meta.json").read_text())["splits"]["train"]
    assert stats["source"]["unknown"] == stats["target"]["unknown"] > 0
