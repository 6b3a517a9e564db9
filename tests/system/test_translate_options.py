"""Searches, their inputs and outputs, and scores of pairs, by the commands."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import threading
from itertools import chain
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate.nbest import read_nbest
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.methods.transformer import Transformer
from deepspeed_nmt.native import library as native
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.translation import Pieces
from deepspeed_nmt.text import TextForm
from tests import commands
from tests.filtered import PairStream
from tests.system.conftest import SMALL


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four exits."""
    path = tmp_path_factory.mktemp("exits") / "run"
    settings = [*SMALL, "objective.label_smoothed=null", "objective.multi_softmax.exits=all"]
    settings += ["training.max_updates=6", "training.validate_every=6", "collapse.every=0", "optimizer.lr=1e-2"]
    assert main(["train", "--data", str(data), "--run", str(path), *settings]) == 0
    return path


@pytest.fixture(scope="module")
def source(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first ten lines of the test text."""
    lines = (data.parent / "text" / "test.en").read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path_factory.mktemp("source") / "source.en"
    path.write_text("".join(lines[:10]), encoding="utf-8")
    return path


def translate(run: Path, source: Path, out: Path, *options: str) -> list[str]:
    return commands.translate(run, source, out, "--max-length", "15", *options)


def test_searches_and_their_rules(run: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    beam = translate(run, source, out)
    sampling = ("--search", "sampling", "--top-p", "0.9")
    sampled = translate(run, source, out, *sampling, "--seed", "3")
    assert translate(run, source, out, *sampling, "--seed", "3", "--max-tokens", "9") == sampled
    assert translate(run, source, out, *sampling, "--seed", "4") != sampled != beam
    translate(run, source, out, "--search", "mbr", "--samples", "6", "--nbest", "6")
    assert all(sum(one.features["samples"] for one in best) == 6 for best in read_nbest(str(out)))
    diverse = ("--search", "diverse_beam", "--beam", "4", "--groups", "2", "--nbest", "2", "--token-scores")
    translate(run, source, out, *diverse)
    for best in read_nbest(str(out)):
        assert len(best) == 2
        for one in best:
            assert math.fsum(one.token_log_probs) == pytest.approx(one.features["log_prob"], abs=1e-3)
    words = [word for line in (*beam, *sampled) for word in line.split()]
    tokenizer = Translator.open(run, device="cpu").tokenizer
    token = tokenizer.encode_batch([max(set(words), key=words.count)], "target")[0][0]
    piece = tokenizer.pieces([token])[0]
    translate(run, source, out, "--suppress", piece, "--suppress-unknown", "--nbest", "2", "--no-repeat-ngram", "1")
    translator = Translator.open(run, device="cpu", suppress=[piece], suppress_unknown=True, no_repeat_ngram=1)
    for one in translator.translate(source.read_text(encoding="utf-8").splitlines()):
        assert token not in one.tokens and len(set(one.tokens)) == len(one.tokens)
    both = Translator.open(run, device="cpu", suppress=[piece], suppress_tokens=(9,)).search
    assert both.suppress_tokens == (9, token), "those of the run's search stay forbidden"  # type: ignore[attr-defined]


def test_texts_beside_the_source_are_translated_in_pieces(
    run: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, constraints = tmp_path / "prefix", tmp_path / "constraints"
    prefix.write_text("\ufeffDer Hund\n" + "\n" * 8 + "Heute\n", encoding="utf-8")
    constraints.write_text("\n" * 8 + "Katze\tnicht wahr\n\n", encoding="utf-8")
    options = ["--prefix", str(prefix), "--constraints", str(constraints), "--alignment-layer", "2"]

    def outputs(name: str, *more: str) -> list[str]:
        out, links = tmp_path / name, tmp_path / f"{name}.links"
        translate(run, source, out, *options, "--alignment", str(links), "--device", "cpu", *more)
        return [each.read_text(encoding="utf-8") for each in (out, links)]

    whole = outputs("whole")
    lines = whole[0].splitlines()
    assert lines[0].startswith("Der Hund") and lines[9].startswith("Heute") and whole[1].count("\n") == 10
    assert "Katze" in lines[8] and "nicht wahr" in lines[8]
    advance, before = SharedWork.advance, 0

    def stop(self: SharedWork, count: int) -> None:
        nonlocal before
        before += 1
        if before == 6:
            raise Interrupted(signal.SIGUSR1)
        advance(self, count)

    command = ["translate", "--run", str(run), "--input", str(source), "--max-length", "15", "--device", "cpu"]
    command += [*options, "--output", str(tmp_path / "out"), "--alignment", str(tmp_path / "out.links")]
    with monkeypatch.context() as patch:
        patch.setattr(SharedWork, "advance", stop)
        assert main([*command, "--max-tokens", "8"]) == 75
    assert "pieces are finished, in" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert outputs("out", "--max-tokens", "8") == whole
    assert "resumes: " in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "remove", lambda self: None)
        assert outputs("out", "--max-tokens", "8") == whole
    prefix.write_text("Die Katze\n" + "\n" * 9, encoding="utf-8")
    assert main([*command, "--max-tokens", "8"]) == 2
    assert "the text of --prefix was another one" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_precisions_of_a_cpu(precision: str, run: Path, source: Path, tmp_path: Path) -> None:
    if (why := native.obstacle() if precision == "int8" else onednn_ops.obstacle(precision)) is not None:
        pytest.skip(why)
    out, cpu = tmp_path / "out", ("--device", "cpu", "--token-scores", "--precision")
    translate(run, source, out, *cpu, "fp32")
    exact = [found[0] for found in read_nbest(str(out))]
    translate(run, source, out, *cpu, precision)
    rounded = [found[0] for found in read_nbest(str(out))]
    assert [each.token_log_probs for each in rounded] != [each.token_log_probs for each in exact]
    # Forced on the same words, both precisions agree up to rounding.
    lines = source.read_text(encoding="utf-8").splitlines()
    scores = [
        [each.log_probs for each in Translator.open(run, device="cpu", precision=name).score(lines, words)]
        for words in [[each.text for each in exact]]
        for name in ("fp32", precision)
    ]
    worst = max(abs(a - b) for one, two in zip(*scores, strict=True) for a, b in zip(one, two, strict=True))
    assert 0.0 < worst < 0.1
    same = sum(one.text == two.text for one, two in zip(exact, rounded, strict=True))
    assert same >= 5, "most translations of a model of little certainty are the same"


def test_default_tensors_of_a_program_round_no_weights(run: Path) -> None:
    expected = Run.open(run).model("best").state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        weights = Run.open(run).model("best").state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_native_code_finds_the_translations_of_torch(run: Path, source: Path, tmp_path: Path) -> None:
    if (why := native.obstacle()) is not None:
        pytest.skip(why)
    lines = source.read_text(encoding="utf-8").splitlines()
    opened = {choice: Translator.open(run, device="cpu", native=choice) for choice in ("on", "off")}
    ours, theirs = (one.translate(lines, nbest=2) for one in opened.values())
    assert [[each.tokens for each in best] for best in ours] == [[each.tokens for each in best] for best in theirs]
    for one, other in zip(chain.from_iterable(ours), chain.from_iterable(theirs), strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5 * (len(one.tokens) + 1)), "1e-5 a token"
    assert [one.natively for one in opened.values()] == [True, False]
    assert {one.identity()["--native"] for one in opened.values()} == {"on", "off"}
    with pytest.raises(ConfigError, match="bf16"):
        Translator.open(run, device="cpu", native="on", precision="bf16")


def test_alignments(
    run: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    out, links = tmp_path / "out", tmp_path / "links"
    text = translate(copy, source, out, "--alignment", str(links))
    (layer,) = re.findall(r"decoder layer (\d) aligns best .* the worst of 2 has", capsys.readouterr().err)
    found = links.read_text()
    sources = source.read_text(encoding="utf-8").splitlines()
    for line, translation, pairs in zip(sources, text, found.splitlines(), strict=True):
        for pair in pairs.split():
            first, second = map(int, pair.split("-"))
            assert first < len(line.split()) and second < len(translation.split())
    assert found.split(), "no link shows nothing"
    chosen = ("--alignment", str(links), "--alignment-layer", layer)
    translate(copy, source, out, *chosen, "--max-tokens", "30")
    assert links.read_text() == found and "aligns best" not in capsys.readouterr().err
    command = ["translate", "--run", str(copy), "--input", str(source), "--output", str(out), "--alignment"]
    assert main([*command, str(out)]) == 2
    assert "--alignment and --output are the same file" in capsys.readouterr().err
    assert main([*command, str(links), "--detokenise"]) == 2
    assert "--detokenise" in capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_nmt.data.data_directory.DataDirectory.vocabulary", {"vocabulary.model": "another"})
        assert main([*command, str(links)]) == 2
        assert "which cannot be read (" in (said := capsys.readouterr().err) and "has another vocabulary than" in said

    def fail(path: Path) -> None:
        raise DataError("the data is gone")

    monkeypatch.setattr("deepspeed_nmt.run.opening.DataDirectory.open", fail)
    assert main([*command, str(links)]) == 2
    assert "which cannot be read (the data is gone); give --alignment-layer" in capsys.readouterr().err


def test_reliance_is_a_score_for_filters(run: Path, source: Path, tmp_path: Path) -> None:
    doubt, tokenizer = tmp_path / "doubt", Translator.open(run, device="cpu").tokenizer
    text = translate(run, source, tmp_path / "out", "--reliance", str(doubt), "--precision", "fp32")
    rows = [line.split("\t") for line in doubt.read_text(encoding="utf-8").splitlines()]
    assert [row[0] for row in rows] == [str(number) for number in range(10)] and {len(row) for row in rows} == {11}
    for line, row in zip(text, rows, strict=True):
        assert tokenizer.decode([tokenizer.number(piece) or 0 for piece in row[8].split()]) == line
        by_token = [float(value) for value in row[10].split()]
        assert sum(by_token) / len(by_token) == pytest.approx(float(row[1]), abs=1e-6)
    scores = [float(row[2]) for row in rows]
    pairs = list(zip(text, source.read_text(encoding="utf-8").splitlines(), strict=True))
    kept = PairStream(f"score={sorted(scores)[3]!r}", TextForm()).keep(pairs, scores)
    assert kept.sum() == 7 and kept.tolist() == [score >= sorted(scores)[3] for score in scores]


def test_pairs_are_scored_at_every_exit(
    run: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, scores = tmp_path / "out", tmp_path / "scores"
    translate(run, source, out, "--token-scores")
    candidates = [found[0] for found in read_nbest(str(out))]
    out.write_text("".join(f"{each.text}\n" for each in candidates), encoding="utf-8")
    command = ["score-pairs", "--run", str(run), "--source", str(source), "--target", str(out)]
    assert main([*command, "--output", str(scores), "--all-exits", "--tokens", "--json"]) == 0
    lines = [json.loads(line) for line in scores.read_text(encoding="utf-8").splitlines()]
    assert [each["exit"] for each in lines] == ["1-1", "1-2", "2-1", "top"] * 10
    assert [each["line"] for each in lines] == [number for number in range(10) for _ in range(4)]
    for number, candidate in enumerate(candidates):
        top = lines[4 * number + 3]
        if top["tokens"] == candidate.features["tokens"]:  # the text can be encoded by other tokens
            assert top["log_prob"] == pytest.approx(candidate.features["log_prob"], abs=1e-3)
            assert top["token_log_probs"] == pytest.approx(candidate.token_log_probs, abs=1e-3)
        assert len(top["pieces"]) == top["tokens"]
    capsys.readouterr()
    assert main([*command, "--exit", "1-2"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(int(row[0]), row[1]) for row in rows] == [(number, "1-2") for number in range(10)]
    assert [float(row[2]) for row in rows] == pytest.approx([each["log_prob"] for each in lines[1::4]], abs=1e-3)
    assert main([*command, "--exit", "1-2", "--reliance", "--tokens"]) == 0
    relying = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[:5] for row in relying] == rows
    for row in relying:
        by_token = list(map(float, row[8].split()))
        assert len(by_token) == int(row[4]) + 1 and float(row[5]) == pytest.approx(sum(by_token) / len(by_token))
    found = [list(each.log_probs) for each in Translator.open(run, device="cpu", precision="fp32").score(
        source.read_text(encoding="utf-8").splitlines(), [each.text for each in candidates]
    )]  # fmt: skip
    assert main([*command, "--tokens", "--device", "cpu"]) == 0, "in fp32, unless another precision is asked for"
    printed = [line.split("\t")[6].split() for line in capsys.readouterr().out.splitlines()]
    assert [[f"{value:.9g}" for value in each] for each in found] == printed
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "longest_target", property(lambda self: max(map(len, found)) - 1, lambda *_: None))
        patch.setattr("deepspeed_nmt.search.forced.token_log_probs", None)  # nothing is scored
        number = max(range(10), key=lambda n: len(found[n])) + 1
        assert main(command) == 2
        assert f"line {number} of the translations has" in capsys.readouterr().err
    out.write_text("one\n", encoding="utf-8")
    assert main(command) == 2
    assert "--target has 1 lines, and the source has 10" in capsys.readouterr().err


def test_a_prefix_of_another_length_loses_nothing(
    run: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, prefix, pipe = (tmp_path / name for name in ("out", "prefix", "pipe"))
    expected = translate(run, source, out)
    prefix.write_text("\n" * 4)
    command = ["translate", "--run", str(run), "--input", str(source), "--output", str(out), "--max-length", "15"]
    before = out.read_text(encoding="utf-8")
    assert main([*command, "--prefix", str(prefix)]) == 2
    assert "--prefix has 4 lines, and the source has 10" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == before, "nothing is translated"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("\n" * 4,))
    writer.start()
    assert main([*command, "--prefix", str(pipe)]) == 2
    writer.join()
    said = capsys.readouterr().err
    assert "--prefix has 4 lines, and the source has more" in said and "lines translated: 4" in said
    assert out.read_text(encoding="utf-8").splitlines() == expected[:4]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--search sampling --rerank deep-shallow", "--search --rerank sampling"),
        ("--search bean", "--search 'bean' 'beam'?"),
        ("--precision fp16 --device cpu", "--precision fp32"),
        ("--temperature 2", "--temperature sampling mbr"),
        ("--min-length 5 --max-length 4", "--min-length --max-length 4 5"),
        ("--weights 1,2", "--weights 2 1"),
        ("--suppress nosuch", "--suppress 'nosuch'"),
        ("--prefix - --constraints -", "standard input"),
    ],
)
def test_wrong_options_are_refused(
    options: str, named: str, run: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", "--run", str(run), "--input", str(source), "--output", "-", *options.split()]) == 2
    captured = capsys.readouterr()
    assert all(word in captured.err for word in named.split()) and captured.out == ""
