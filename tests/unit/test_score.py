"""`score`: published scores to the last decimal, correct labels, and refusal of bad files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sacrebleu.metrics.bleu import BLEU

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import EXIT_USER_ERROR
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.evaluate.scoring import LABELS, Score, corpus_score, paired_bootstrap
from deepspeed_nmt.text import tokenise

# System -> published sacreBLEU (13a) against reference A, reference B, and both; chrF2 against reference A.
WMT22_ENDE = {
    "Online-B": ("38.3685", "38.2999", "52.3153", "64.6401"),
    "OpenNMT": ("35.6851", "35.7015", "48.3994", "62.1349"),
    "PROMT": ("36.1167", "36.0087", "48.9722", "62.8456"),
    "Lan-Bridge": ("36.1344", "36.4659", "49.3654", "64.1149"),
}

REFERENCE = [
    "Der Hund läuft schnell durch den Park.",
    "Das Haus ist sehr alt.",
    "Wir sehen den Mann mit dem Hut.",
]
HYPOTHESIS = [
    "Der Hund läuft schnell durch den Wald.",
    "Das Haus ist sehr alt.",
    "Wir sehen den Mann mit Hut.",
]
SOURCE = ["The dog runs quickly through the park.", "The house is very old.", "We see the man with the hat."]


def of(metric: str, hypotheses: list[str], *references: list[str], lowercase: bool = False) -> Score:
    return corpus_score(METRICS[metric], hypotheses, references, lowercase=lowercase)


def write(path: Path, lines: list[str]) -> str:
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "--hypothesis": write(tmp_path / "hyp.de", HYPOTHESIS),
        "--reference": write(tmp_path / "ref.de", REFERENCE),
        "--source": write(tmp_path / "src.en", SOURCE),
    }


def score(files: dict[str, str], *options: str) -> int:
    return main(["score", *(word for pair in files.items() for word in pair), *options])


def scored(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["score", *words, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the message with which ``score`` refuses its input."""
    assert main(["score", *words]) == EXIT_USER_ERROR
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.long
@pytest.mark.parametrize("system", WMT22_ENDE)
def test_published_scores(system: str, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shared_data / "wmt22_ende"
    first, second = str(folder / "ref.A.de"), str(folder / "ref.B.de")
    hypothesis = ["--hypothesis", str(folder / f"hyp.{system}.de")]
    against = [
        scored(capsys, *hypothesis, "--reference", *references) for references in ([first], [second], [first, second])
    ]
    found = (*(f"{values['bleu']['score']:.4f}" for values in against), f"{against[0]['chrf']['score']:.4f}")
    assert found == WMT22_ENDE[system]
    assert [values["lines"] for values in against] == [2037] * 3
    assert against[2]["bleu"]["signature"].startswith("nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:")


def test_scores_as_text_and_as_json(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    bleu, chrf = (of(metric, HYPOTHESIS, REFERENCE) for metric in ("bleu", "chrf"))
    assert score(files) == 0
    out, err = capsys.readouterr()
    assert f"sacreBLEU = {bleu.value:.2f} (" in out and f"chrF2 = {chrf.value:.2f}\n" in out and err == ""
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in out and "tokenised" not in out
    values = scored(capsys, *(word for pair in files.items() for word in pair))
    assert values["bleu"]["score"] == bleu.value and bleu.detail is not None
    assert values["bleu"]["precisions"] == list(bleu.detail.precisions)
    assert values["bleu"]["brevity_penalty"] == pytest.approx(2.718281828 ** (1 - 22 / 21))
    assert values["chrf"] == {"score": chrf.value, "signature": chrf.signature}
    assert (values["lines"], values["empty_lines"], values["source_copies"]) == (3, 0, 0)
    assert score(files, "--tokenised") == 0
    out = capsys.readouterr().out
    assert out.startswith("tokenised BLEU (not comparable with sacreBLEU) = ") and "tok:none|smooth:none" in out
    assert "sacreBLEU = " not in out and "chrF" not in out


def test_tokenised_bleu_does_not_tokenise() -> None:
    # By hand: 5 + 5 of 6 + 5 tokens match, and one 4-gram of the first and both of the second sentence.
    score = of("bleu_tokenised", ["the cat sat on a mat", "a b c d e"], ["the cat sat on the mat", "a b c d e"])
    assert score.detail is not None
    assert score.detail.precisions == pytest.approx((1000 / 11, 700 / 9, 500 / 7, 300 / 5))
    assert (score.detail.sys_len, score.detail.ref_len) == (11, 11)
    assert score.value == pytest.approx(100 * (10 / 11 * 7 / 9 * 5 / 7 * 3 / 5) ** 0.25)


def test_segmented_joins_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hypothesis = write(tmp_path / "hyp", ["der h@@ und läuft sch@@ nell durch den wald ."])
    reference = write(tmp_path / "ref", ["der hu@@ nd läuft schnell durch den wald ."])
    values = scored(capsys, "--hypothesis", hypothesis, "--reference", reference, "--segmented")
    assert values["tokenised_bleu"]["score"] == pytest.approx(100.0)
    assert values["tokenised_bleu"]["label"] == LABELS["bleu_tokenised"]
    assert "bleu" not in values
    assert main(["score", "--hypothesis", hypothesis, "--reference", reference, "--tokenised"]) == 0
    assert "hyp: 1 of 1 lines hold `@@ `; --segmented joins them" in capsys.readouterr().err


def test_doubtful_lines_are_counted_and_warned_of(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files["--hypothesis"] = write(tmp_path / "copied.de", [SOURCE[0], HYPOTHESIS[1], SOURCE[2]])
    assert score(files) == 0
    out, err = capsys.readouterr()
    assert "copies of the source: 2 of 3 lines" in out
    assert "copied.de: 2 of 3 lines are copies of the source" in err
    # The last line is empty too: it is a sentence, not the end of the file.
    files["--hypothesis"] = write(tmp_path / "gaps.de", [HYPOTHESIS[0], "", ""])
    assert score(files, "--json") == 0
    out, err = capsys.readouterr()
    values = json.loads(out)
    assert (values["lines"], values["empty_lines"], values["source_copies"]) == (3, 2, 0)
    assert "gaps.de: 2 of 3 lines are empty" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"gut", mtime=0), "compressed with gzip; run `gunzip"),
        ("gut\nschön\nalt\n".encode("latin-1"), "is not UTF-8: line 2 holds the byte 0xf6"),
        ("gut\n".encode("utf-16"), "UTF-16; run `iconv -f UTF-16 -t UTF-8"),
        (b"\n \n\n", "is empty"),
        (b"gut\nalt\n", "different numbers of lines"),
        (None, "does not exist"),
    ],
)
def test_files_that_cannot_be_scored_are_named(
    content: bytes | None, message: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.de"
    if content is not None:
        path.write_bytes(content)
    for option in files:
        said = refusal(capsys, *(word for pair in {**files, option: str(path)}.items() for word in pair))
        assert str(path) in said and message in said


def test_paired_bootstrap_distinguishes_a_difference_from_noise() -> None:
    reference = [f"das ist der {number} Satz von vielen Sätzen im Text" for number in range(60)]
    wrong = [sentence.replace("von vielen", "aus allen") for sentence in reference]
    # One better and one worse sentence: no significant difference.
    shuffled = [reference[0], *wrong[1:30], *reference[30:59], wrong[59]]
    mixed = [*wrong[:30], *reference[30:]]
    worse, same = paired_bootstrap([mixed, wrong, shuffled], [reference], BLEU())
    difference = of("bleu", wrong, reference).value - of("bleu", mixed, reference).value
    assert worse.difference == pytest.approx(difference)
    assert difference < -10
    assert worse.p_value < 0.01
    assert worse.interval[0] < difference < worse.interval[1] < 0.0
    assert same.interval[0] < 0.0 < same.interval[1]
    assert same.p_value > 0.2
    assert "bs:1000|seed:" in worse.signature


@pytest.mark.parametrize(("metrics", "tested"), [("bleu_intl,chrf", "bleu_intl"), ("ter", "ter")])
def test_several_hypotheses_are_compared_by_the_first_metric(
    metrics: str, tested: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files["--reference"] = write(tmp_path / "ref", REFERENCE)
    words = ["score", "--hypothesis", write(tmp_path / "b", SOURCE), files["--hypothesis"]]
    words += ["--reference", files["--reference"], "--metrics", *metrics.split(",")]
    assert main(words) == 0
    assert f"{tested} against {tmp_path}/b: " in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    difference = second["metrics"][tested]["score"] - first["metrics"][tested]["score"]
    assert second["comparison"]["metric"] == tested and "comparison" not in first
    assert second["comparison"]["difference"] == pytest.approx(difference)


def test_text_like_that_of_a_moses_directory_is_detokenised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hypothesis = [*HYPOTHESIS, '"Das ist gut", sagte Max\' Frau (30 %) & lachte.']
    reference = [*REFERENCE, '"Das ist schön", sagte Max\' Frau (30 %) & lachte.']
    texts = {"hyp": hypothesis, "ref": reference}
    tokens = {name: write(tmp_path / f"{name}.tok", list(tokenise(lines, "de"))) for name, lines in texts.items()}
    words = [word for side in ("source", "target") for word in (f"--train-{side}", tokens["ref"])]
    words += [word for side in ("source", "target") for word in (f"--valid-{side}", tokens["ref"])]
    words = ["prepare", *words, "--vocab-size", "48", "--keep-duplicates", "--out", str(tmp_path / "data")]
    assert main([*words, "--text", "moses", "--target-lang", "de", "--source-lang", "fr"]) == 0
    capsys.readouterr()
    like = ["--hypothesis", tokens["hyp"], "--reference", tokens["ref"], "--like", str(tmp_path / "data")]
    bleu, chrf = (of(metric, hypothesis, reference).value for metric in ("bleu", "chrf"))
    values = scored(capsys, *like, "--source", tokens["hyp"])
    assert values["bleu"]["score"] == pytest.approx(bleu, abs=1e-9)
    assert values["bleu"]["score"] < scored(capsys, *like[:4])["bleu"]["score"] - 0.5, "13a over tokens overstates"
    assert values["chrf"]["score"] == pytest.approx(chrf, abs=1e-9)
    assert values["source_copies"] == len(hypothesis)
    french, count = write(tmp_path / "fr.tok", list(tokenise(["L'homme s'enfuit."] * 4, "fr"))), tmp_path / "count"
    count.write_text('#!/bin/sh\ngrep -cx "L\'homme s\'enfuit." "$3"\n')
    count.chmod(0o755)
    values = scored(capsys, *like, "--source", french, "--metrics", f"command:{count}")
    assert values["metrics"]["count"]["score"] == 4, "a program reads the source by the rules of its language"
    assert main([*words, "--text", "tokenised", "--overwrite"]) == 0
    capsys.readouterr()
    said = refusal(capsys, *like)
    assert "cannot give plain text, because the text is tokenised by unknown rules; give --tokenised" in said
