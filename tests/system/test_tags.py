"""A run on tagged data: validation, translation and scores put the tags where the corpus has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import EXIT_USER_ERROR
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.export.runtime import ExportedTranslator
from deepspeed_nmt.reports.text_scores import ParallelText, common_scorer, score_text
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.exporting import ExportRequest, export_text
from deepspeed_nmt.sample import write_sample
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm
from tests.commands import logged, refused, translate
from tests.support import ROOT, prepare_sample
from tests.system.conftest import SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a vocabulary for each side, on data with a tag in front of sources and targets."""
    scratch = tmp_path_factory.mktemp("tagged")
    options = ["--separate-vocabularies", "--symbols", "<2de>", "<bt>", "<go>"]
    options += ["--tag-source", "<2de>", "--tag-target", "<go>", "--segmentations", "2"]
    data = prepare_sample(scratch, 400, options, train=300, valid=12, test=10)
    settings = [*SMALL, "engine.name=plain", "validation.metrics=[chrf]", "validation.max_sentences=99"]
    settings += ["training.validate_every=12", "collapse.every=0", "optimizer.lr=1e-2"]
    words = ["train", "--recipe", "transformer_base", "--data", str(data), "--run", str(scratch / "run"), *settings]
    assert main(words) == 0
    return scratch / "run"


def test_tags_of_the_data_are_those_of_translations(run: Path, tmp_path: Path) -> None:
    source = run.parent / "text" / "test.en"
    found = translate(run, source, tmp_path / "a", "--nbest", "2", "--alignment", str(tmp_path / "links"))
    plain = translate(run, source, tmp_path / "a")

    opened = Translator.open(run, device="cpu", precision="fp32")
    sources = source.read_text(encoding="utf-8").splitlines()
    relying = opened.translate(sources, reliance=True)
    for one, scored in zip(relying, opened.score(sources, [one.text for one in relying], reliance=True), strict=True):
        assert one.reliance is not None
        if one.reliance.tokens == scored.tokens:  # the text can be encoded by other tokens
            assert one.reliance.token_reliance == pytest.approx(scored.token_reliance, abs=1e-4)
    assert all(one.reliance is not None and one.tokens[1:] == one.reliance.tokens for one in relying), "no tag"

    # Tags by hand: in front of each line, and as the beginning of each translation.
    typed, begun = tmp_path / "typed", tmp_path / "begun"
    typed.write_text("".join(f"<2de> {line}\n" for line in source.read_text(encoding="utf-8").splitlines()))
    begun.write_text("<go>\n" * len(plain))
    # A typed tag counts in the bound of the length, which is 10 above that of the ratio otherwise.
    bare = ("--tag", "none", "--tag-target", "none", "--max-length-extra", "11")
    by_hand = translate(run, typed, tmp_path / "b", *bare, "--prefix", str(begun), "--nbest", "2", "--alignment",
                        str(tmp_path / "typed_links"))  # fmt: skip
    assert all("||| <go>" in line for line in by_hand)
    assert [line.replace("<go>", "", 1).split() for line in by_hand] == [line.split() for line in found]
    # Links count the words of the text, which has no tags.
    moved = [
        " ".join(f"{int(s) - 1}-{int(t) - 1}" for s, t in (link.split("-") for link in line.split()) if s != "0" != t)
        for line in (tmp_path / "typed_links").read_text().splitlines()
    ]
    assert moved == (tmp_path / "links").read_text().splitlines() and any(moved)

    # Another tag of the vocabulary; pieces put it there, too.
    other = translate(run, source, tmp_path / "c", "--tag", "<bt>")
    assert other != plain
    assert translate(run, source, tmp_path / "d", "--tag", "<bt>", "--max-tokens", "16") == other


def test_another_tag_is_no_other_corpus_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = run.parent / "data", ["train", "--run", str(run), "training.max_updates=13"]
    refused(
        [*words, "--data", f"{data}@<bt>"],
        capsys,
        f"{run} was trained with no tag",
        "the tag <bt> in front of sources",
    )


def test_validation_is_tagged_and_scored_without_tags(run: Path) -> None:
    data = DataDirectory.open(run.parent / "data")
    sources, references = (
        data.text("valid", side).read_text(encoding="utf-8").splitlines() for side in ("source", "target")
    )
    translator = Translator.open(run, checkpoint="last", device="cpu", precision="fp32")
    assert translator.tags == Tags("<2de>", "<go>")
    hypotheses = [each.text for each in translator.translate(sources)]
    from deepspeed_nmt.evaluate.metrics import Scorer
    from deepspeed_nmt.train.configuration import ValidationConfig

    metrics, _ = ValidationConfig(metrics=("chrf",), best_by="chrf").chosen(data.text_form)
    expected = Scorer(metrics, data.text_form, references)(hypotheses)["chrf"]
    (value,) = logged(run, "valid/chrf").values()
    assert value == pytest.approx(expected, abs=1e-6) and value > 0.0

    # Scores of translations leave out the tag, which is given.
    best = translator.translate(sources[:3], token_scores=True)
    scored = list(translator.score(sources[:3], [each.text for each in best]))
    bare = Translator.open(run, checkpoint="last", device="cpu", precision="fp32", tag="", tag_target="")
    assert bare.tags == NO_TAGS
    relying = list(translator.score(sources[:3], [each.text for each in best], reliance=True))
    unseen = list(bare.score(["<2de>"] * 3, [f"<go> {each.text}" for each in best]))
    for pair, without, before in zip(relying, unseen, scored, strict=True):
        assert pair.blind_log_probs == pytest.approx(without.log_probs[1:], abs=1e-5), "the tag alone is the source"
        assert pair.log_probs == pytest.approx(before.log_probs, abs=1e-5)
    by_hand = list(bare.score([f"<2de> {each}" for each in sources[:3]], [f"<go> {each.text}" for each in best]))
    for ours, whole in zip(scored, by_hand, strict=True):
        assert ours.tokens == whole.tokens[1:]
        assert ours.log_probs == pytest.approx(whole.log_probs[1:], abs=1e-5)


def test_a_test_set_is_scored_with_its_own_tags_in_its_own_language(run: Path) -> None:
    sides = [(run.parent / "text" / f"test.{code}").read_text(encoding="utf-8").splitlines() for code in ("en", "de")]
    opened = Run.open(run)
    assert opened.data.common_text == opened.data.text == TextForm("raw")
    data = SimpleNamespace(tags=Tags("<bt>"), text_form=TextForm("raw", target_lang="zh"), vocabulary={}, path=run)
    text = ParallelText("test", *sides, data=cast(Any, data))
    scorer = common_scorer([opened], text)
    (score,) = score_text(opened, "last", text, scorer, 4096)
    assert "tok:zh" in score.signature
    translator = Translator.open(run, checkpoint="last", device="cpu", precision="fp32", tag="<bt>")
    assert score.value == scorer([one.text for one in translator.translate(sides[0])])["bleu"]
    assert score.key.search["tag"] == "<bt>" and "tag_target" not in score.key.search


def test_exports_know_the_tags(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = Run.open(run)
    text = export_text(opened, ExportRequest(run, "ctranslate2", "fp32"), 60, 60)
    assert text.references is not None and len(text.lines) == 60 > 12 + 10
    assert all(line.startswith("<2de> ") and line.count("<2de>") == 1 for line in text.lines)
    assert not any("<" in reference for reference in text.references)
    pytest.importorskip("ctranslate2")
    words = ["translate", "--run", str(run), "--input", str(run.parent / "text" / "test.en"), "--output"]
    words += [str(tmp_path / "out"), "--runtime", "ctranslate2"]
    for options, tag in (([], "<go> in the data of the run"), (["--tag-target", "<bt>"], "<bt>")):
        assert main([*words, *options]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert f"--tag-target is {tag}" in error and "--tag-target none" in error
    assert not (run / "exports").exists()
    out = tmp_path / "export"
    assert main(["export", "--run", str(run), "--format", "ctranslate2", "--out", str(out), "--sentences", "9"]) < 2
    # The model has learnt too little for a certificate that is passed, which the command needs.
    there = ExportedTranslator(out, Certificate.read(out), DecodeOptions(device="cpu", tag_target=""))
    here = Translator.open(run, device="cpu", precision="fp32", tag_target="")
    lines = (run.parent / "text" / "test.en").read_text(encoding="utf-8").splitlines()
    assert [best[0].tokens for best in there.stream(lines)] == [each.tokens for each in here.translate(lines)]


def test_the_script_of_a_multilingual_model(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    write_sample(text, train=200, valid=8, test=8, seed=3)
    for part, name in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        for language in ("en", "de"):
            (text / f"{part}.{language}").replace(text / f"{name}.{language}")
        german = (text / f"{name}.de").read_text(encoding="utf-8")
        (text / f"{name}.fr").write_text(german.replace("e", "é"), encoding="utf-8")
    script = [str(ROOT / "launch/data/multi30k_multilingual.sh"), "--out", str(out)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VENV": str(tmp_path)}
    environment["PYTHONPATH"] = str(ROOT)

    def go(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*script, *words], capture_output=True, text=True, env=environment)

    done = go("--from", str(text), "--vocab-size", "300", "--max-length", "90")
    assert done.returncode == 0, done.stderr
    data = {language: DataDirectory.open(out / f"en_{language}") for language in ("de", "fr")}
    assert len({each.tokenizer().digest for each in data.values()}) == 1
    for language, each in data.items():
        tokenizer, tag = each.tokenizer(), f"<2{language}>"
        assert each.tags == Tags(source=tag) and "test.source" in each.meta.files
        for split in ("train", "valid"):
            assert each.corpus(split).source(3)[0] == tokenizer.symbol("source", tag)
        assert each.meta.options["cleaning"]["max_length"] == 90
    again = go("--from", str(text), "--vocab-size", "300", "--max-length", "90")
    assert again.returncode == 0 and again.stderr.count("nothing to do") == 3
    for words, name in (([], "--from"), (["--from", str(out)], "train.en")):
        wrong = go(*words)
        assert wrong.returncode == 2 and name in wrong.stderr
