"""Exports of a trained run: certificates, translation by CTranslate2, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.core.plain import PlainTransformer
from deepspeed_nmt.export import ctranslate2_weights, formats
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.run import exporting
from tests.system.test_imports import modules_of

pytest.importorskip("ctranslate2")

LEARN = [
    *("model.dim=32", "model.ffn_dim=64", "model.heads=4", "model.encoder_layers=2", "model.dropout=0"),
    *("batch.update_tokens=600", "batch.micro_tokens=1200", "schedule.warmup_updates=20", "optimizer.lr=6e-3"),
    *("training.max_updates=160", "training.validate_every=80", "training.keep_last=9", "collapse.every=0"),
    *("validation.metrics=[]", "engine.device=cpu"),
]
DEEP = ["model.norm=deepnorm", "model.decoder_layers=3", "layer.name=cross_attention_drop", "layer.drop_depth=1"]
EXITS = ["model.norm=pre", "model.decoder_layers=2", "objective.label_smoothed=null"]
EXITS += ["objective.multi_softmax.exits=all"]


@pytest.fixture(autouse=True)
def _few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare few sentences, also in the exports that `translate` makes."""
    monkeypatch.setattr(exporting, "SENTENCES", 120)


def export(run: Path, out: Path, *options: str, format: str = "ctranslate2") -> int:
    """Run `export` in this process, on few sentences."""
    words = ["export", "--run", str(run), "--format", format, "--out", str(out), "--sentences", "120", *options]
    return main(words)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deep decoder with DeepNorm and cross-attention drop, with weights that have learnt something."""
    path = tmp_path_factory.mktemp("exports") / "run"
    assert main(["train", "--data", str(data), "--run", str(path), *LEARN, *DEEP]) == 0
    return path


@pytest.fixture(scope="module")
def with_exits(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 2 x 2 trained exits."""
    path = tmp_path_factory.mktemp("exits") / "run"
    assert main(["train", "--data", str(data), "--run", str(path), *LEARN, *EXITS]) == 0
    return path


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run for CTranslate2, by a certificate of 120 sentences."""
    out = tmp_path_factory.mktemp("exported") / "out"
    assert export(run, out) == 0
    return out


def test_an_export_has_a_certificate(exported: Path, run: Path) -> None:
    certificate = Certificate.read(exported)
    assert certificate.passed and certificate.exporter == "ctranslate2" and certificate.update == 160
    assert [each.beam for each in certificate.comparisons] == [1, 5]
    for each in certificate.comparisons:
        assert each.sentences == 120 and each.share >= 0.99 and each.unexplained == 0
        assert each.bleu_here is not None and each.bleu_there is not None
        assert each.bleu_here == pytest.approx(each.bleu_there, abs=0.5)
        assert each.score_difference is not None and each.score_difference < 1e-4
    assert certificate.logit_difference is not None and certificate.logit_difference < 1e-3
    assert set(certificate.hashes) == {"config.yaml", "vocabulary", "weights", "text"}
    assert "nrefs:1" in certificate.signature and certificate.metric == "bleu"
    assert {"model.bin", "vocabulary.model", "deepspeed_nmt.json"} <= set(certificate.files)
    table = (exported / "certificate.txt").read_text()
    assert "120 sentences: test+valid+train of" in table and "passed" in table and "100.00%" in table


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("ctranslate2", ["--exit", "1-2"]),
        ("ctranslate2", ["--precision", "int8", "--exit", "2-1"]),
        ("huggingface", ["--exit", "2-1"]),
        ("safetensors", ["--exit", "1-1"]),
    ],
)
def test_exits_and_formats_are_certified(format: str, options: list[str], with_exits: Path, tmp_path: Path) -> None:
    if format == "huggingface":
        pytest.importorskip("transformers")
    status = export(with_exits, tmp_path / "out", *options, format=format)
    certificate = Certificate.read(tmp_path / "out")
    assert status == (0 if certificate.passed else 1)
    # The model has learnt little: in int8 it can lose BLEU, and translations that reach the length limit can differ.
    expected = "must lose at most" if "int8" in options else "identical at beam 5"
    assert all(expected in each for each in certificate.problems), certificate.problems
    for each in certificate.comparisons:
        kinds = {one.kind for one in each.differences if one.margin > each.tolerance}
        assert kinds <= {"hypotheses at the length limit"} and each.unexplained == 0
    if "int8" not in options:
        assert certificate.logit_difference is not None and certificate.logit_difference < 1e-4
    assert certificate.exit in options
    if format == "safetensors":
        assert all(each.identical == each.sentences for each in certificate.comparisons)


def test_a_wrong_export_is_not_passed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_alpha(model: PlainTransformer) -> PlainTransformer:
        return replace(model, norm="post")

    monkeypatch.setattr(ctranslate2_weights, "fold_deepnorm", without_alpha)
    assert export(run, tmp_path / "out") == 1
    problems = Certificate.read(tmp_path / "out").problems
    assert any("at least 99% of translations must be identical at beam 1" in each for each in problems)
    assert any("log-probabilities of tokens must differ by at most" in each for each in problems)
    assert any("must be near-ties" in each for each in problems)


def translate(run: Path, source: Path, output: Path, *options: str) -> int:
    """Run `translate` in this process."""
    words = ["translate", "--run", str(run), "--device", "cpu", "--input", str(source), "--output", str(output)]
    return main([*words, *options])


def test_ctranslate2_translates_as_the_run_and_exports_it_once(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    source = tmp_path / "source"
    source.write_text("\n" + (data.parent / "text" / "test.en").read_text() + "\n")
    here, there = tmp_path / "here", tmp_path / "there"
    for options in ([], ["--beam", "3", "--nbest", "2", "--length-penalty", "mean"]):
        assert translate(run, source, here, *options) == 0
        assert translate(run, source, there, "--runtime", "ctranslate2", *options) == 0
        if not options:
            assert here.read_text() == there.read_text()
            assert "is exported for CTranslate2, once" in capsys.readouterr().err
    lists = [[line.split(" ||| ")[:2] for line in path.read_text().splitlines()] for path in (here, there)]
    assert [line[0] for line in lists[0]] == [line[0] for line in lists[1]]
    same = sum(one == other for one, other in zip(*lists, strict=True))
    assert same > 0.9 * len(lists[0])  # the last ones of a list may be others
    assert "exported" not in capsys.readouterr().err
    words = ["translate", "--run", str(run), "--runtime", "ctranslate2", "--input", str(source), "--output", "-"]
    found = modules_of(*words)
    assert "ctranslate2" in found and not found & {"torch", "transformers", "safetensors"}
    (export_of,) = (run / "exports").glob("ctranslate2-*/")
    (export_of / "model.bin").write_bytes(b"damaged")
    assert translate(run, source, there, "--runtime", "ctranslate2") == 0
    assert "must be as it was exported, but has 7 bytes" in capsys.readouterr().err
    assert there.read_text() != "" and Certificate.read(export_of).passed


def test_another_best_checkpoint_is_exported_again(run: Path, data: Path, tmp_path: Path) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    source, output = data.parent / "text" / "test.en", tmp_path / "output"
    assert main(["average", "--run", str(run), "--last", "1"]) == 0
    assert translate(run, source, output, "--checkpoint", "average", "--runtime", "ctranslate2") == 0
    (export_of,) = (run / "exports").glob("ctranslate2-*/")
    before = Certificate.read(export_of).hashes["weights"]
    assert main(["average", "--run", str(run), "--last", "2"]) == 0
    expected = tmp_path / "expected"
    assert translate(run, source, expected, "--checkpoint", "average") == 0
    assert translate(run, source, output, "--checkpoint", "average", "--runtime", "ctranslate2") == 0
    assert Certificate.read(export_of).hashes["weights"] != before
    assert output.read_text() == expected.read_text()


def test_a_run_whose_export_is_not_passed_is_not_translated(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    output = tmp_path / "output"
    output.write_text("kept")
    monkeypatch.setattr(ctranslate2_weights, "fold_deepnorm", lambda model: replace(model, norm="post"))
    for _ in range(2):  # the second time, it is not exported again
        assert translate(run, data.parent / "text" / "test.en", output, "--runtime", "ctranslate2") == 2
        assert "must translate as the run does, but at least 99%" in capsys.readouterr().err
        monkeypatch.undo()
    assert output.read_text() == "kept"


REFUSED = [
    (["--runtime", "ctranslate2", "--precision", "bf16"], "must be fp32 or int8 with --runtime ctranslate2"),
    (["--runtime", "ctranslate2", "--workers", "2"], "translates in one process"),
    (["--runtime", "ctranslate2", "--search", "sampling"], "decodes by beam search, but --search is sampling"),
    (["--runtime", "ctranslate2", "--token-scores"], "--token-scores is not for --runtime ctranslate2"),
    (["--runtime", "ctranslate2", "--min-length", "3"], "--min-length is no option of the beam search"),
    (["--runtime", "ctranslate2", "--rerank", "deep-shallow"], "decodes with one net, --rerank with two"),
    (
        ["--runtime", "ctranslate2", "--iterations", "3"],
        "--iterations is no option of the beam search of CTranslate2",
    ),
    (["--runtime", "ctranslate2", "--encoder-layers", "1"], "needs both --encoder-layers and --decoder-layers"),
    (["--runtime", "ctranslate2", "--nbest", "9"], "--nbest must be at most --beam, which is 5, but is 9"),
    (["--runtime", "ctranslate2", "--nbest", "9", "--beam", "3"], "--nbest must be at most --beam, which is 3, but"),
    (["--runtime", "ctranslate2", "--beam", "1001"], "--beam must be less than or equal to 1000, but is 1001"),
    (["--runtime", "ctranslate2", "--beam", "0"], "--beam must be greater than or equal to 1, but is 0"),
    (["--runtime", "ctranslate2", "--length-penalty", "x"], "--length-penalty must be gnmt:A"),
]


def test_options_that_ctranslate2_does_not_have_are_refused(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    for options, message in REFUSED:
        assert translate(run, data.parent / "text" / "test.en", tmp_path / "output", *options) == 2, options
        assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists() and not (run / "exports").exists(), "nothing is exported"


def test_bad_exports_are_refused(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    source = str(data.parent / "text" / "test.en")
    cases = [
        (run, exported, [], "has an export; add --overwrite to replace it"),
        (run, tmp_path / "mine", ["--overwrite"], "must be a new directory or an older export"),
        (tmp_path / "mine", tmp_path / "out", [], "--run must be a directory made by `train`"),
        (run, tmp_path / "out", ["--exit", "3-1"], "the exit must be n-m with n from 1 to 2"),
        (run, tmp_path / "out", ["--reference", source], "--reference needs --source"),
        (run, tmp_path / "out", ["--precision", "int8", "--source", source], "is judged by BLEU; add --reference"),
        (run, tmp_path / "out", ["--source", str(tmp_path / "none")], "must be a text file, but does not exist"),
        (run, tmp_path / "out", ["--source", os.devnull], "must hold one sentence a line, but is empty"),
    ]
    for directory, out, options, message in cases:
        assert export(directory, out, *options) == 2, message
        assert message in capsys.readouterr().err
    assert export(run, tmp_path / "out", "--precision", "int8", format="huggingface") == 2
    assert "needs --format ctranslate2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing is left"


def test_a_full_disk_leaves_the_older_export(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(exported, tmp_path / "out")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(formats, "write_ctranslate2", full)
    assert export(run, out, "--overwrite") == 1
    assert "No space left on device; free some space and start again" in capsys.readouterr().err
    assert Certificate.read(out).passed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_recurrent_run_is_refused_with_the_reason(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.name=recurrent", "model.dim=16", "model.heads=2", "model.ffn_dim=16", "model.encoder_layers=1"]
    settings += ["model.decoder_layers=1", "training.max_updates=1", "batch.update_tokens=200", "engine.device=cpu"]
    settings += ["validation.metrics=[]", "collapse.every=0"]
    assert main(["train", "--data", str(data), "--run", str(tmp_path / "run"), *settings]) == 0
    capsys.readouterr()
    assert export(tmp_path / "run", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "its encoder adds the embedded tokens to the state again before layer 2" in said
    assert "/checkpoints/" not in said, "the weights are not loaded"
    assert not (tmp_path / "out").exists()
    assert export(tmp_path / "run", tmp_path / "out", "--exit", "1-1", "--checkpoint", "last") in (0, 1)
    assert json.loads((tmp_path / "out" / "deepspeed_nmt.json").read_text())["model"]["exit"] == "1-1"
