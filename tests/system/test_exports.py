"""Exports of a trained run: certificates, translation by CTranslate2, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.export import certificate as records
from deepspeed_nmt.export import ctranslate2_weights, formats
from deepspeed_nmt.export.certificate import AT_LIMIT, LEFT_OUT, Certificate, KeptExport
from deepspeed_nmt.export.ctranslate2_search import RULES, ExportBeamSettings
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.manifest import FileRecord, write_record
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.run import exporting
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.left_to_right import LeftToRightSettings
from tests.docs.pages import blocks
from tests.support import ROOT, change_settings
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


def test_the_example_of_the_page_translates_as_the_program(
    exported: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = blocks((ROOT / "docs" / "export.md").read_text(encoding="utf-8"), "python")
    exec(example.replace("exports/sample", str(exported)), {})
    found = capsys.readouterr().out
    source, output = tmp_path / "source", tmp_path / "output"
    source.write_text("The dog sleeps.\n")
    words = ["translate", "--run", str(run), "--input", str(source), "--output", str(output)]
    assert main([*words, "--beam", "5", "--length-penalty", "power:0.6"]) == 0
    assert found == output.read_text() and found.strip()


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("ctranslate2", ["--exit", "1-2"]),
        ("ctranslate2", ["--precision", "int8", "--exit", "2-1"]),
        ("huggingface", ["--exit", "2-1"]),
    ],
)
def test_exits_and_formats_are_certified(format: str, options: list[str], with_exits: Path, tmp_path: Path) -> None:
    if format == "huggingface":
        pytest.importorskip("transformers")
    status = export(with_exits, tmp_path / "out", *options, format=format)
    certificate = Certificate.read(tmp_path / "out")
    assert status == (0 if certificate.passed else 1)
    # The model has learnt little: in int8 it can lose BLEU, and translations that reach the length limit can differ.
    expected = "BLEU at beam" if "int8" in options else "are identical"
    assert all(expected in each for each in certificate.problems), certificate.problems
    for each in certificate.comparisons:
        kinds = {one.kind for one in each.differences if one.margin is None or one.margin > each.tolerance}
        assert kinds <= {AT_LIMIT, LEFT_OUT} and each.unexplained == 0
    if "int8" not in options:
        assert certificate.logit_difference is not None and certificate.logit_difference < 1e-4
    assert certificate.exit in options


def test_a_wrong_export_is_not_passed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "fold_deepnorm", lambda model: replace(model, norm="post"))
    assert export(run, tmp_path / "out") == 1
    problems = Certificate.read(tmp_path / "out").problems
    assert any("at beam 1" in problem and "identical" in problem for problem in problems)
    assert any("log-probabilities of tokens differ by" in problem for problem in problems)
    assert any("no near-ties" in problem for problem in problems)


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
    assert "has 7 bytes instead of" in capsys.readouterr().err
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
    monkeypatch.setattr(formats, "fold_deepnorm", lambda model: replace(model, norm="post"))
    for _ in range(2):  # the second time, it is not exported again
        assert translate(run, data.parent / "text" / "test.en", output, "--runtime", "ctranslate2") == 2
        assert "does not translate as the run" in capsys.readouterr().err
        monkeypatch.undo()
    assert output.read_text() == "kept"


REFUSED = [
    (["--precision", "bf16"], "give fp32 or int8"),
    (["--workers", "2"], "translates in one process"),
    (["--search", "sampling"], "--search is sampling"),
    (["--token-scores"], "--token-scores is not for CTranslate2; leave it out"),
    (["--min-length", "3"], "--min-length is no option of the beam search"),
    (["--encoder-layers", "1"], "needs both --encoder-layers and --decoder-layers"),
    (["--nbest", "9", "--beam", "3"], "--nbest is 9, more than --beam, which is 3"),
    (["--beam", "1001"], "--beam is 1001"),
]


def test_options_that_ctranslate2_does_not_have_are_refused(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    source, runtime = data.parent / "text" / "test.en", ("--runtime", "ctranslate2")
    for options, message in REFUSED:
        assert translate(run, source, tmp_path / "output", *runtime, *options) == 2, options
        assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists() and not (run / "exports").exists(), "nothing is exported"


SEARCHES = [
    ({"min_length": 9}, [], "give --min-length 1, or translate by the run with torch"),
    ({"suppress_tokens": [5]}, [], "has search.suppress_tokens=(5,), and --runtime ctranslate2 has no rules"),
    ({"no_repeat_ngram": 2}, ["--no-repeat-ngram", "3"], "--no-repeat-ngram is no option of the beam search"),
    ({"name": "sampling"}, [], "give --search beam, or translate by"),
]


def test_the_search_of_the_run_is_respected_or_refused(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = data.parent / "text" / "test.en", tmp_path / "output"
    config = yaml.safe_load((run / "config.yaml").read_text())
    for settings, options, message in SEARCHES:
        copy = shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        search = {"name": "sampling"} if "name" in settings else {**config["search"], **settings}
        change_settings(copy, {**config, "search": search})
        assert translate(copy, source, output, "--runtime", "ctranslate2", *options) == 2
        assert message in capsys.readouterr().err
    assert not (copy / "exports").exists() and not output.exists(), "nothing is exported"
    # Length bounds are no such rules. An export without a run has the settings of the run.
    bounded = {**config["search"], "max_length": 4, "beam": 2}
    change_settings(copy, {**config, "search": bounded})
    expected = {name: bounded[name] for name in ExportBeamSettings.model_fields}
    assert exporting.settings_of(Run.open(copy)).model_dump() == expected and expected["max_length"] == 4
    assert exporting.rules_of(Run.open(copy)) == {}
    assert set(LeftToRightSettings.model_fields) - {"name"} == {*RULES, *ExportBeamSettings.model_fields} - {
        *("name", "beam", "length_penalty"),
    }, "a new rule must be respected or refused, too"


def test_an_export_is_translated_with_in_place_of_a_run(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, here, there = data.parent / "text" / "test.en", tmp_path / "here", tmp_path / "there"
    words = ["translate", "--export", str(exported), "--device", "cpu", "--input", str(source)]
    bounds = ["--max-length-ratio", "0.5", "--max-length-extra", "3", "--max-length", "7"]
    for options in ([], bounds):
        assert translate(run, source, here, *options) == 0
        assert main([*words, "--output", str(there), *options]) == 0
        assert here.read_text() == there.read_text()
    copy = shutil.copytree(exported, tmp_path / "copy")
    for options, message in (
        (["--run", str(run)], "--run and --export are both given"),
        (["--runtime", "torch"], "--runtime is torch"),
        (["--precision", "int8"], "in fp32, not in int8"),
        (["--exit", "1-1"], "--exit is decided when a run is exported; leave it out, or give --run"),
        (["--min-length", "3"], "--min-length is no option of the beam search of CTranslate2"),
        (["--export", str(tmp_path / "none")], "give --export one that"),
        (["--export", str(run)], "certificate.json is missing; export again"),
    ):
        assert main([*words, "--output", str(there), *options]) == 2
        assert message in capsys.readouterr().err
    (copy / "model.bin").write_bytes(b"damaged")
    assert main([*words, "--export", str(copy), "--output", str(there)]) == 2
    assert "has 7 bytes instead of" in capsys.readouterr().err
    assert here.read_text() == there.read_text()
    assert main([*words[:1], *words[3:], "--output", "-"]) == 2
    assert "neither --run nor --export is given" in capsys.readouterr().err


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    *(("deepspeed_nmt.json", {"longest": value}) for value in (0, 10**12, "64")),
    *(("deepspeed_nmt.json", {name: {"more": 1}}) for name in ("text", "rules", "tags", "more")),
    ("deepspeed_nmt.json", {"search": {"name": "beam", "beam": 0}}),
    *(("certificate.json", {"hashes": value}) for value in ({}, {"weights": "x"})),
    *(("certificate.json", {"files": value}) for value in ({}, {"../a": {"bytes": 0, "sha256": "0" * 64}})),
    ("certificate.json", {"format": 99}),
]


def test_each_hostile_export_is_refused_in_one_sentence(
    exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its certificate fits, and its hash."""
    words = ["translate", "--device", "cpu", "--input", str(data.parent / "text" / "test.en")]
    words += ["--output", str(tmp_path / "output"), "--export", str(tmp_path / "copy")]

    def refusal() -> str:
        assert main(words) == 2
        said = capsys.readouterr().err.strip()
        assert 0 < len(said) < 2000 and said.count("\n") == 0
        return said

    def copied() -> Path:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        return shutil.copytree(exported, tmp_path / "copy")

    for name, changes in HOSTILE:
        copy = copied()
        certificate = json.loads((copy / "certificate.json").read_text())
        if name == "certificate.json":
            certificate |= changes
        else:
            (copy / name).write_text(json.dumps(json.loads((copy / name).read_text()) | changes))
            certificate["files"][name] = FileRecord.of(copy / name).model_dump()
        write_record(copy / "certificate.json", json.dumps(certificate).encode())
        assert "export again" in refusal(), (name, changes)
    for name in ("model.bin", "vocabulary.model"):
        copy = copied()
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        assert f"{name} is a link out of the export" in refusal()
    copy = copied()
    (copy / "deepspeed_nmt.json").unlink()
    os.mkfifo(copy / "deepspeed_nmt.json")
    assert "deepspeed_nmt.json" in refusal()
    assert not (tmp_path / "output").exists()


def test_a_translation_by_ctranslate2_is_resumed_at_its_pieces(
    exported: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, whole, pieces = data.parent / "text" / "test.en", tmp_path / "whole", tmp_path / "pieces"
    words = ["translate", "--export", str(exported), "--device", "cpu", "--input", str(source), "--nbest", "2"]
    assert main([*words, "--output", str(whole)]) == 0
    advance, before = SharedWork.advance, 0

    def stop(self: SharedWork, count: int) -> None:
        nonlocal before
        before += 1
        if before == 15:
            raise Interrupted(signal.SIGUSR1)
        advance(self, count)

    with monkeypatch.context() as patch:
        patch.setattr(SharedWork, "advance", stop)
        assert main([*words, "--output", str(pieces), "--max-tokens", "32"]) == 75
    assert "stopped by SIGUSR1; " in capsys.readouterr().err and not pieces.exists()
    found = modules_of(*words, "--output", str(pieces), "--max-tokens", "32")
    assert not found & {"torch", "transformers", "safetensors"}
    lists = [[line.rsplit(" ||| ", 2)[0] for line in path.read_text().splitlines()] for path in (whole, pieces)]
    assert lists[0] == lists[1] and not list(tmp_path.glob("*.pieces"))


def test_two_first_uses_make_one_export(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = KeptExport(tmp_path, "best", None, "fp32"), []

    def make(out: Path) -> Certificate:
        made.append(out)
        time.sleep(1.0)  # the other one waits
        kept.check_writable()
        shutil.copytree(exported, out)
        return Certificate.read(out)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(kept.ensure, make, lambda certificate: True) for _ in range(2)]:
            assert future.result(60).passed
    assert made == [kept.place]
    shutil.rmtree(kept.place)

    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    monkeypatch.setattr(records, "TemporaryFile", Mock(side_effect=read_only))
    with pytest.raises(ConfigError, match=r"cannot be written.*Read-only .*--export DIR"):
        kept.check_writable()


def test_a_run_without_its_data_names_a_way_out(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    monkeypatch.setattr(exporting, "recorded_data", Mock(side_effect=DataError("the data is gone")))
    assert translate(copy, data.parent / "text" / "test.en", tmp_path / "output", "--runtime", "ctranslate2") == 2
    assert "give that export by `translate --export DIR`" in capsys.readouterr().err


def test_bad_exports_are_refused(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    source = str(data.parent / "text" / "test.en")
    cases = [
        (run, exported, [], "has an export; add --overwrite to replace it"),
        (run, tmp_path / "mine", ["--overwrite"], "mine has file, which this program did not write"),
        (tmp_path / "mine", tmp_path / "out", [], str(tmp_path / "mine")),
        (run, tmp_path / "out", ["--exit", "3-1"], "the exit is '3-1'; use n-m with n from 1 to 2"),
        (run, tmp_path / "out", ["--reference", source], "--reference is given without --source"),
        (run, tmp_path / "out", ["--precision", "int8", "--source", source], "no --reference"),
    ]
    for directory, out, options, message in cases:
        assert export(directory, out, *options) == 2, message
        assert message in capsys.readouterr().err
    assert export(run, tmp_path / "out", "--precision", "int8", format="huggingface") == 2
    assert "--format huggingface has no --precision int8" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing is left"


def test_a_full_disk_leaves_the_older_export(
    run: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(exported, tmp_path / "out")

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(ctranslate2_weights, "write_ctranslate2", Mock(side_effect=full))
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
