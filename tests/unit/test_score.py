"""`score`: published scores to the last decimal, correct labels, and refusal of bad files."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import EXIT_USER_ERROR, ConfigError, DataError
from deepspeed_nmt.evaluate.bleu import (
    TokenisedBleu,
    corpus_scores,
    join_segments,
    paired_bootstrap,
    tokenised_bleu,
)
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


def test_text_output_has_label_detail_and_signature(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(files) == 0
    captured = capsys.readouterr()
    expected = corpus_scores(HYPOTHESIS, [REFERENCE])
    assert f"sacreBLEU = {expected.bleu:.2f} (" in captured.out
    assert "hypothesis 21, reference 22 tokens)" in captured.out
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in captured.out
    assert f"chrF2 = {expected.chrf:.2f}\n  nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:" in captured.out
    assert "copies of the source: 0 of 3 lines" in captured.out
    assert "tokenised" not in captured.out
    assert captured.err == ""


def test_tokenised_bleu_is_labelled_and_the_only_score(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(files, "--tokenised") == 0
    out = capsys.readouterr().out
    assert out.startswith("tokenised BLEU (not comparable with sacreBLEU) = ")
    assert "tok:none|smooth:none" in out
    assert "sacreBLEU = " not in out
    assert "chrF" not in out


def test_tokenised_bleu_does_not_tokenise() -> None:
    # By hand: 5 + 5 of 6 + 5 tokens match, and one 4-gram of the first and both of the second sentence.
    score = tokenised_bleu(["the cat sat on a mat", "a b c d e"], [["the cat sat on the mat", "a b c d e"]])
    assert score.detail.precisions == pytest.approx((1000 / 11, 700 / 9, 500 / 7, 300 / 5))
    assert (score.detail.hypothesis_tokens, score.detail.reference_tokens) == (11, 11)
    assert score.bleu == pytest.approx(100 * (10 / 11 * 7 / 9 * 5 / 7 * 3 / 5) ** 0.25)


def test_tokenised_bleu_is_not_smoothed() -> None:
    hypothesis, reference = ["a b c x e f"], [["a b c d e f"]]
    assert tokenised_bleu(hypothesis, reference).bleu == 0.0
    assert corpus_scores(hypothesis, reference).bleu > 0.0


def test_lowercase_is_in_the_signatures() -> None:
    hypothesis, reference = ["DER HUND LÄUFT SCHNELL"], [["der hund läuft schnell"]]
    scores = corpus_scores(hypothesis, reference, lowercase=True)
    assert (scores.bleu, scores.chrf) == pytest.approx((100.0, 100.0))
    assert "case:lc" in scores.bleu_signature
    assert "case:lc" in scores.chrf_signature
    assert tokenised_bleu(hypothesis, reference, lowercase=True).bleu == pytest.approx(100.0)
    assert corpus_scores(hypothesis, reference).bleu == 0.0


def test_segmented_joins_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hypothesis = write(tmp_path / "hyp", ["der h@@ und läuft sch@@ nell durch den wald ."])
    reference = write(tmp_path / "ref", ["der hu@@ nd läuft schnell durch den wald ."])
    values = scored(capsys, "--hypothesis", hypothesis, "--reference", reference, "--segmented")
    assert values["tokenised_bleu"]["score"] == pytest.approx(100.0)
    assert values["tokenised_bleu"]["label"] == TokenisedBleu.label
    assert "bleu" not in values
    assert main(["score", "--hypothesis", hypothesis, "--reference", reference, "--tokenised"]) == 0
    assert "hyp: 1 of 1 lines hold `@@ `; --segmented joins them" in capsys.readouterr().err


def test_published_reference_length(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = str(shared_data / "multi30k_bpe_ende" / "test.2016.de")
    values = scored(capsys, "--hypothesis", reference, "--reference", reference, "--segmented", "--lowercase")
    assert values["tokenised_bleu"]["reference_tokens"] == 12103
    assert values["tokenised_bleu"]["score"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("line", "joined"),
    [("er sch@@ lä@@ ft", "er schläft"), ("er sch@@", "er sch"), ("a@@b @ b", "a@@b @ b"), ("", "")],
)
def test_join_segments(line: str, joined: str) -> None:
    assert join_segments(line) == joined


def test_json_of_every_score(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    values = scored(capsys, *(word for pair in files.items() for word in pair))
    expected = corpus_scores(HYPOTHESIS, [REFERENCE])
    assert values["bleu"]["score"] == expected.bleu
    assert values["bleu"]["precisions"] == list(expected.bleu_detail.precisions)
    assert values["bleu"]["brevity_penalty"] == pytest.approx(2.718281828 ** (1 - 22 / 21))
    assert values["chrf"] == {"score": expected.chrf, "signature": expected.chrf_signature}
    assert (values["lines"], values["empty_lines"], values["source_copies"]) == (3, 0, 0)
    assert (values["hypothesis"], values["references"]) == (files["--hypothesis"], [files["--reference"]])


def test_copies_of_the_source_are_counted_and_warned_of(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files["--hypothesis"] = write(tmp_path / "copied.de", [SOURCE[0], HYPOTHESIS[1], SOURCE[2]])
    assert score(files) == 0
    captured = capsys.readouterr()
    assert "copies of the source: 2 of 3 lines" in captured.out
    assert "copied.de: 2 of 3 lines are copies of the source" in captured.err


def test_empty_hypothesis_lines_are_counted_not_dropped(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The last line is empty too: it is a sentence, not the end of the file.
    files["--hypothesis"] = write(tmp_path / "gaps.de", [HYPOTHESIS[0], "", ""])
    assert score(files, "--json") == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert (values["lines"], values["empty_lines"], values["source_copies"]) == (3, 2, 0)
    assert "gaps.de: 2 of 3 lines are empty" in captured.err


def test_tokenised_text_without_the_option_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hypothesis = write(tmp_path / "hyp.tok.de", ["das haus ist alt .", "das ist gut"])
    reference = write(tmp_path / "ref.de", ["das haus ist alt.", "das ist gut"])
    words = ["score", "--hypothesis", hypothesis, "--reference", reference]
    assert main(words) == 0
    assert "hyp.tok.de: 1 of 2 lines end in ' .' and look tokenised" in capsys.readouterr().err
    write(Path(reference), ["das haus ist alt .", "das ist gut"])
    assert main([*words, "--tokenised"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("option", ["--tokenised", "--segmented"])
def test_plain_text_next_to_tokens_is_warned_of(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write(tmp_path / "ref.de", REFERENCE)
    hypothesis = write(tmp_path / "hyp.tok.de", list(tokenise(REFERENCE, "de")))
    words = ["score", "--hypothesis", hypothesis, "--reference", reference]
    assert main([*words, option]) == 0
    said = capsys.readouterr().err
    assert "ref.de: 3 of 3 lines end in a word with its stop and look like plain text, but multi-bleu" in said
    assert "hyp.tok.de" not in said


def test_lower_case_against_upper_case_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hypothesis = write(tmp_path / "hyp.de", [line.lower() for line in HYPOTHESIS])
    reference = write(tmp_path / "ref.de", REFERENCE)
    words = ["score", "--hypothesis", hypothesis, "--reference", reference]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert f"{hypothesis} is in lower case, but 3 of 3 lines of {reference} have upper case; give --like RUN" in said
    assert main([*words, "--lowercase"]) == 0
    write(Path(reference), [*(line.lower() for line in REFERENCE[:-1]), ""])
    write(Path(hypothesis), REFERENCE)
    assert "upper case" not in capsys.readouterr().err
    assert main(words) == 0 and "upper case" not in capsys.readouterr().err


def test_only_a_line_feed_ends_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "ein\u2028zwei\x0bdrei\x85vier\x1cfünf\rsechs"
    hypothesis = write(tmp_path / "hyp", [odd, "sieben acht neun zehn\r"])
    reference = tmp_path / "ref"
    reference.write_bytes(f"{odd}\nsieben acht neun zehn".encode())
    values = scored(capsys, "--hypothesis", hypothesis, "--reference", str(reference), "--source", str(reference))
    assert values["lines"] == 2
    assert values["source_copies"] == 2
    assert values["chrf"]["score"] == pytest.approx(100.0)


def test_standard_input(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = Path(files["--hypothesis"]).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(piped))))  # type: ignore[type-var]
    values = scored(capsys, "--hypothesis", "-", "--reference", files["--reference"])
    assert values["bleu"]["score"] == corpus_scores(HYPOTHESIS, [REFERENCE]).bleu
    assert "must be given at most once" in refusal(capsys, "--hypothesis", "-", "--reference", "-")


def test_pipes_are_read_once(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = scored(capsys, *(word for pair in files.items() for word in pair))
    pipes = dict(files)
    for option, path in files.items():
        pipes[option] = f"{path}.pipe"
        os.mkfifo(pipes[option])
        content = Path(path).read_bytes()
        threading.Thread(target=Path(pipes[option]).write_bytes, args=[content], daemon=True).start()
    piped = scored(capsys, *(word for pair in pipes.items() for word in pair))
    assert piped["bleu"] == whole["bleu"] and piped["source_copies"] == whole["source_copies"]


def test_compressed_text_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hyp.de.gz").write_bytes(gzip.compress(Path(files["--hypothesis"]).read_bytes()))
    message = refusal(capsys, "--hypothesis", str(tmp_path / "hyp.de.gz"), "--reference", files["--reference"])
    assert "hyp.de.gz must be plain text, but is compressed with gzip; run `gunzip -k" in message


def test_unaligned_files_are_named_with_their_counts(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = write(tmp_path / "short.de", HYPOTHESIS[:2])
    message = refusal(capsys, "--hypothesis", short, "--reference", files["--reference"])
    assert f"2  {short}" in message
    assert f"3  {files['--reference']}" in message
    assert "aligned line by line" in message
    message = refusal(
        capsys, "--hypothesis", files["--hypothesis"], "--reference", files["--reference"], "--source", short
    )
    assert f"2  {short}" in message


def test_bad_utf8_names_file_and_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latin = tmp_path / "latin1.de"
    latin.write_bytes("gut\nschön\nalt\n".encode("latin-1"))
    message = refusal(capsys, "--hypothesis", str(latin), "--reference", files["--reference"])
    assert f"{latin} must be UTF-8, but line 2 holds the invalid byte 0xf6" in message


def test_a_byte_order_mark_is_no_text(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    hypothesis, reference, source = (Path(files[name]) for name in ("--hypothesis", "--reference", "--source"))
    hypothesis.write_bytes(reference.read_bytes())
    for marked in (reference, hypothesis, source):
        marked.write_bytes(codecs.BOM_UTF8 + marked.read_bytes())
        assert score(files) == 0
        captured = capsys.readouterr()
        assert "sacreBLEU = 100.00" in captured.out
        assert f"{marked}: the byte order mark at its beginning is not read as text" in captured.err


def test_utf16_is_refused(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = tmp_path / "ref.utf16"
    wide.write_text("\n".join(REFERENCE), encoding="utf-16")
    message = refusal(capsys, "--hypothesis", files["--hypothesis"], "--reference", str(wide))
    assert f"{wide} must be plain text, but is UTF-16; run `iconv -f UTF-16 -t UTF-8 {wide}` first" in message


@pytest.mark.parametrize("content", [b"", b"\n", b"\n \n\n"])
def test_empty_files(
    content: bytes, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.de"
    empty.write_bytes(content)
    message = refusal(capsys, "--hypothesis", files["--hypothesis"], "--reference", str(empty))
    assert f"{empty} must hold one sentence a line, but is empty" in message


@pytest.mark.parametrize(("name", "reason"), [("missing.de", "does not exist"), ("", "is a directory")])
def test_unreadable_files(
    name: str, reason: str, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    message = refusal(capsys, "--hypothesis", str(path), "--reference", files["--reference"])
    assert f"{path} must be a text file, but {reason}" in message


def test_unequal_numbers_of_lines_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 hypotheses and 2 lines in reference 2"):
        corpus_scores(HYPOTHESIS, [REFERENCE, REFERENCE[:2]])
    with pytest.raises(DataError, match=r"at least one hypothesis"):
        tokenised_bleu([], [[]])
    with pytest.raises(DataError, match=r"0 references"):
        corpus_scores(HYPOTHESIS, [])
    with pytest.raises(ConfigError, match=r"did you mean '13a'"):
        corpus_scores(HYPOTHESIS, [REFERENCE], tokenize="13b")


def test_paired_bootstrap_distinguishes_a_difference_from_noise() -> None:
    reference = [f"das ist der {number} Satz von vielen Sätzen im Text" for number in range(60)]
    wrong = [sentence.replace("von vielen", "aus allen") for sentence in reference]
    # One better and one worse sentence: no significant difference.
    shuffled = [reference[0], *wrong[1:30], *reference[30:59], wrong[59]]
    mixed = [*wrong[:30], *reference[30:]]
    worse, same = paired_bootstrap([mixed, wrong, shuffled], [reference])
    difference = corpus_scores(wrong, [reference]).bleu - corpus_scores(mixed, [reference]).bleu
    assert worse.difference == pytest.approx(difference)
    assert difference < -10
    assert worse.p_value < 0.01
    assert worse.interval[0] < difference < worse.interval[1] < 0.0
    assert same.interval[0] < 0.0 < same.interval[1]
    assert same.p_value > 0.2
    assert "bs:1000|seed:" in worse.signature


def test_several_hypotheses_are_compared_with_the_first(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "score",
        "--hypothesis",
        files["--hypothesis"],
        files["--reference"],
        "--reference",
        files["--reference"],
    ]
    assert main([*words, "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert "comparison" not in first
    assert second["bleu"]["score"] == pytest.approx(100.0)
    assert second["comparison"]["baseline"] == files["--hypothesis"]
    assert second["comparison"]["difference"] == pytest.approx(100.0 - first["bleu"]["score"])
    assert main(words) == 0
    assert f"BLEU against {files['--hypothesis']}: +" in capsys.readouterr().out


def test_a_hypothesis_given_twice_is_scored_twice(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    name = files["--hypothesis"]
    assert main(["score", "--hypothesis", name, name, "--reference", files["--reference"], "--json"]) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second["hypothesis"] == name and second["bleu"] == first["bleu"]
    assert second["comparison"]["difference"] == 0.0


def test_text_like_that_of_a_moses_directory_is_detokenised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hypothesis = [*HYPOTHESIS, '"Das ist gut", sagte Max\' Frau (30 %) & lachte.']
    reference = [*REFERENCE, '"Das ist schön", sagte Max\' Frau (30 %) & lachte.']
    texts = {"hyp": hypothesis, "ref": reference}
    plain = {name: write(tmp_path / name, lines) for name, lines in texts.items()}
    tokens = {name: write(tmp_path / f"{name}.tok", list(tokenise(lines, "de"))) for name, lines in texts.items()}
    words = [word for side in ("source", "target") for word in (f"--train-{side}", tokens["ref"])]
    words += [word for side in ("source", "target") for word in (f"--valid-{side}", tokens["ref"])]
    words = ["prepare", *words, "--vocab-size", "48", "--keep-duplicates", "--out", str(tmp_path / "data")]
    assert main([*words, "--text", "moses", "--target-lang", "de"]) == 0
    capsys.readouterr()
    like = ["--hypothesis", tokens["hyp"], "--reference", tokens["ref"], "--like", str(tmp_path / "data")]
    expected = corpus_scores(hypothesis, [reference])
    values = scored(capsys, *like, "--source", tokens["hyp"])
    assert values["bleu"]["score"] == pytest.approx(expected.bleu, abs=1e-9)
    assert values["bleu"]["score"] < scored(capsys, *like[:4])["bleu"]["score"] - 0.5, "13a over tokens overstates"
    assert values["chrf"]["score"] == pytest.approx(expected.chrf, abs=1e-9)
    assert values["source_copies"] == len(hypothesis)
    multi = scored(capsys, *like, "--tokenised")["tokenised_bleu"]["score"]
    assert multi == scored(capsys, *like[:4], "--tokenised")["tokenised_bleu"]["score"]
    assert main([*words, "--text", "raw", "--target-lang", "de", "--overwrite"]) == 0
    capsys.readouterr()
    raw = ["--hypothesis", plain["hyp"], "--reference", plain["ref"], "--like", str(tmp_path / "data")]
    assert scored(capsys, *raw, "--tokenised")["tokenised_bleu"]["score"] == multi
    assert main([*words, "--text", "tokenised", "--overwrite"]) == 0
    capsys.readouterr()
    said = refusal(capsys, *like)
    assert "cannot give plain text, because the text is tokenised by unknown rules; give --tokenised" in said
