"""Exports of a trained run: certificates, translation by CTranslate2, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from deepspeed_nmt.cli import main
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.export import formats
from deepspeed_nmt.export.certificate import AT_LIMIT, INFO_FILE, LEFT_OUT, Certificate, ExportInfo, KeptExport
from deepspeed_nmt.export.ctranslate2_search import RULES, ExportBeamSettings
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.manifest import FileRecord, write_record
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.run import exporting
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.left_to_right import LeftToRightSettings
from deepspeed_nmt.text import NO_TAGS
from tests.support import change_settings
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
EXITS += ["objective.multi_softmax.exits=all", "training.max_updates=60", "training.validate_every=60"]


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


def test_an_export_is_of_the_checkpoint_that_was_the_best_when_it_began(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training of the run may save a better one meanwhile."""
    asked: list[str] = []

    def model(self: Run, which: str) -> None:
        asked.append(which)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "model", model)
    with pytest.raises(KeyboardInterrupt):
        exporting.export_run(exporting.ExportRequest(run, "ctranslate2", "fp32"), tmp_path / "out", False)
    assert [Path(which).name for which in asked] == ["update-0000160"]


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
    assert "passed" in (exported / "certificate.txt").read_text()
    info = ExportInfo.read(exported)
    assert info.left_out == {}
    other = info.model_copy(update={"search_name": "sampling", "rules": {"min_length": 3}})
    assert other.left_out == {"name": "sampling", "min_length": 3}


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("ctranslate2", ["--precision", "int8", "--exit", "1-2"]),
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
    monkeypatch.setattr(formats, "fold_deepnorm", lambda model: replace(model, norms=("post", "post")))
    assert export(run, tmp_path / "out") == 1
    problems = " ".join(Certificate.read(tmp_path / "out").problems)
    assert all(text in problems for text in ("at beam 1", "log-probabilities of tokens differ by", "no near-ties"))


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


def test_a_run_whose_export_is_not_passed_is_not_translated(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(run, tmp_path / "run")
    output = tmp_path / "output"
    output.write_text("kept")
    monkeypatch.setattr(formats, "fold_deepnorm", lambda model: replace(model, norms=("post", "post")))
    for _ in range(2):  # the second time, it is not exported again
        assert translate(run, data.parent / "text" / "test.en", output, "--runtime", "ctranslate2") == 2
        assert "does not translate as the run" in capsys.readouterr().err
        monkeypatch.undo()
    assert output.read_text() == "kept"


REFUSED = [
    (["--precision", "bf16"], "fp32 or int8"),
    (["--workers", "2"], "one process"),
    (["--search", "sampling"], "--search is sampling"),
    (["--token-scores"], "--token-scores"),
    (["--reliance", "doubt"], "--reliance"),
    (["--min-length", "3"], "--min-length"),
    (["--nbest", "9", "--beam", "3"], "--nbest is 9"),
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
    ({"min_length": 9}, "--min-length 1"),
    ({"suppress_tokens": [5]}, "search.suppress_tokens=(5,)"),
    ({"name": "sampling"}, "--search beam"),
]


def test_the_search_of_the_run_is_respected_or_refused(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = data.parent / "text" / "test.en", tmp_path / "output"
    config = yaml.safe_load((run / "config.yaml").read_text())
    for settings, message in SEARCHES:
        copy = shutil.copytree(run, tmp_path / "run", dirs_exist_ok=True)
        search = {"name": "sampling"} if "name" in settings else {**config["search"], **settings}
        change_settings(copy, {**config, "search": search})
        assert translate(copy, source, output, "--runtime", "ctranslate2") == 2
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
        (["--run", str(run)], "--run and --export"),
        (["--precision", "int8"], "in fp32, not in int8"),
        (["--exit", "1-1"], "--exit"),
        (["--export", str(run)], "certificate.json is missing"),
    ):
        assert main([*words, "--output", str(there), *options]) == 2
        assert message in capsys.readouterr().err
    (copy / "model.bin").write_bytes(b"damaged")
    assert main([*words, "--export", str(copy), "--output", str(there)]) == 2
    assert "has 7 bytes instead of" in capsys.readouterr().err
    assert here.read_text() == there.read_text()


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    *(("deepspeed_nmt.json", {"longest": value}) for value in (0, 10**12, "64")),
    *(("deepspeed_nmt.json", {name: {"more": 1}}) for name in ("text", "tags", "more")),
    ("certificate.json", {"hashes": {}}),
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


def test_two_first_uses_make_one_export(exported: Path, tmp_path: Path) -> None:
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
    # `choose-best` makes another checkpoint the best one.
    (tmp_path / "checkpoints").mkdir()
    assert kept.ensure(make, lambda certificate: False).passed and made == [kept.place], "nothing has changed"
    (tmp_path / "checkpoints/chosen.json").write_text("{}")
    compared: list[Certificate] = []
    assert kept.ensure(make, lambda certificate: not compared.append(certificate)).passed
    assert len(compared) == 1 and made == [kept.place]
    # A whole export of another version is set aside.
    (kept.place / INFO_FILE).write_text('{"format": 2}')
    certificate = Certificate.read(exported)
    files = {**certificate.files, INFO_FILE: FileRecord.of(kept.place / INFO_FILE)}
    certificate.model_copy(update={"files": files}).write(kept.place)
    assert kept.ensure(make, lambda certificate: True).passed
    assert made == [kept.place] * 2 and len(list(kept.place.parent.glob("*.aside"))) == 1


def test_segmented_training_text_is_that_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, lines in (("train", ["d@@ er Hu@@ nd", "die Kat@@ ze"] * 9), ("valid", ["die Hu@@ nd"])):
        for side in ("source", "target"):
            (tmp_path / f"{name}.{side}").write_text("".join(f"{line}\n" for line in lines))
    words = [
        word for name in ("train", "valid") for side in ("source", "target")
        for word in (f"--{name}-{side}", str(tmp_path / f"{name}.{side}"))
    ]  # fmt: skip
    assert main(["prepare", *words, "--out", str(tmp_path / "data"), "--segmented", "--keep-duplicates"]) == 0
    data = DataDirectory.open(tmp_path / "data")
    monkeypatch.setattr(exporting, "recorded_data", lambda path: SimpleNamespace(main=data))
    monkeypatch.setattr(Run, "data", SimpleNamespace(tags=NO_TAGS))
    run = Run(tmp_path, None, data.tokenizer(), data.vocabulary)  # type: ignore[arg-type]
    text = exporting.export_text(run, exporting.ExportRequest(tmp_path, "ctranslate2", "fp32"), 60, 19)
    assert text.lines[1:3] == ["d@@ er Hu@@ nd", "die Kat@@ ze"] and len(text.lines) == 19
    assert text.references is not None
    scored = [run.tokenizer.reference(line) for line in text.references[:3]]  # as Run.scorer has them
    assert scored == ["die Hund", "der Hund", "die Katze"]


def test_bad_exports_are_refused(
    run: Path, exported: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    source = str(data.parent / "text" / "test.en")
    cases = [
        (run, exported, [], "--overwrite"),
        (run, tmp_path / "mine", ["--overwrite"], "mine has file, which this program did not write"),
        (run, tmp_path / "out", ["--exit", "3-1"], "'3-1'"),
        (run, tmp_path / "out", ["--precision", "int8", "--source", source], "no --reference"),
    ]
    for directory, out, options, message in cases:
        assert export(directory, out, *options) == 2, message
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"], "nothing is left"


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
