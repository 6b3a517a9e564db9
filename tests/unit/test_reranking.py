"""N-best lists, and the choice of alpha and exponent from them."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.evaluate.nbest import (
    ALPHAS,
    EXPONENTS,
    Candidate,
    RerankLists,
    read_nbest,
    tune,
)
from deepspeed_nmt.evaluate.scoring import corpus_score

REFERENCES = ["the cat sat on the mat today", "a dog ran through the park", "", "we saw the old house there"]
TEXTS = [
    ["the cat sat on the mat", "a cat sat on the mat today", "the cat"],
    ["a dog ran through park", "a dog ran through the park", "dog"],
    [""],
    ["we saw the house", "we saw the old house there now", "we saw an old house there"],
]


def lists() -> list[list[Candidate]]:
    draws = np.random.default_rng(3)
    found = []
    for line, texts in enumerate(TEXTS):
        each = []
        for place, text in enumerate(texts):
            by = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))[place]
            deep, shallow = draws.uniform(-2, -0.2, 2)
            features = {"deep": deep, "shallow": shallow, "by_deep": by[0], "by_shallow": by[1]}
            length = {"log_prob": 0.0, "tokens": float(len(text.split()))}
            each.append(Candidate(line, text, features | length if text else length, -float(place)))
        found.append(each)
    return found


def files(directory: Path, found: list[list[Candidate]]) -> tuple[str, str]:
    nbest, reference = directory / "nbest", directory / "reference"
    nbest.write_text("".join(f"{each}\n" for candidates in found for each in candidates), encoding="utf-8")
    reference.write_text("".join(f"{line}\n" for line in REFERENCES), encoding="utf-8")
    return str(nbest), str(reference)


def chosen(alpha: float, exponent: float) -> list[str]:
    best = []
    for candidates in lists():
        totals = {}
        for each in candidates:
            f = each.features
            length = f["tokens"] + 1
            if "deep" not in f:
                totals[each.text] = [0.0]
                continue
            own_other = {"deep": (f["deep"], f["shallow"]), "shallow": (f["shallow"], f["deep"])}
            totals[each.text] = [
                (alpha * own + (1 - alpha) * other) * length**exponent
                for net, (own, other) in own_other.items()
                if f[f"by_{net}"]
            ]
        best.append(max(totals, key=lambda text: max(totals[text])))
    return best


def test_a_line_is_written_and_read() -> None:
    candidate = Candidate(7, "a ||| b= 3 |||", {"deep": -0.123456789, "tokens": 5.0}, -1.5)
    assert str(candidate) == "7 ||| a ||| b= 3 ||| ||| deep= -0.123456789 tokens= 5 ||| -1.5"
    assert Candidate.parse(str(candidate)) == candidate
    empty = Candidate(0, "", {}, 0.0)
    assert str(empty) == "0 |||  |||  ||| 0" and Candidate.parse(str(empty)) == empty
    exact = np.float32(-0.87654321)
    assert np.float32(Candidate.parse(str(Candidate(0, "x", {"a": float(exact)}, 0.0))).features["a"]) == exact


@pytest.mark.parametrize(
    "lines", [["0 ||| a ||| b= 1"], ["0\t-1.2\ttext"], ["1 ||| a |||  ||| 1"], ["0 ||| a |||  ||| 1"] * 2 + [""]]
)
def test_other_lines_and_gaps_are_refused(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "nbest"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with pytest.raises(Exception, match=rf"line {len(lines)} of|candidates of line \d in the place of"):
        read_nbest(str(path))


@pytest.mark.parametrize("tokenised", [False, True])
def test_every_pair_has_the_bleu_of_its_choice(tokenised: bool, tmp_path: Path) -> None:
    nbest, reference = files(tmp_path, lists())
    found, reranked = tune(nbest, [reference], tokenised=tokenised), RerankLists(read_nbest(nbest))
    assert len(found.grid) == len(ALPHAS) * len(EXPONENTS) and (found.lines, found.candidates) == (4, 10)
    metric = METRICS["bleu_tokenised" if tokenised else "bleu"]
    for alpha, exponent in found.grid:
        texts = chosen(alpha, exponent)
        places = reranked.choose(alpha, exponent)
        assert [candidates[place].text for candidates, place in zip(reranked.lists, places, strict=True)] == texts
        assert found.grid[alpha, exponent] == pytest.approx(corpus_score(metric, texts, [REFERENCES]).value, abs=1e-9)
    assert found.signature == metric.signature()
    assert found.grid[found.best] == max(found.grid.values()) > min(found.grid.values())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nbest, reference = files(tmp_path, lists())
    words = ["score", "--tune-rerank", nbest, "--reference", reference]
    assert main([*words, "--json", "--grid"]) == 0
    values = json.loads(capsys.readouterr().out)
    best = values["best"]
    assert best["bleu"] >= values["default"]["bleu"] and len(values["grid"]) == len(ALPHAS) * len(EXPONENTS)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "default  --alpha 0.5 --exponent 0.4  sacreBLEU = " in text and "nrefs:1" in text
    assert f"best     --alpha {best['alpha']:g} --exponent {best['exponent']:g}" in text


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        ([[0, 1, 2], [0, 1, 2], [0], [0, 1]], 4),
        ([[0, 1], [1, 2], [0], [0, 1]], 1),
        ([[0, 1], [0], [0], [0, 1]], 2),
        ([[0], [1], [0], [0]], 1),
    ],
)
def test_lists_that_are_cut_off_are_refused(
    kept: list[list[int]], line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = [[candidates[place] for place in places] for candidates, places in zip(lists(), kept, strict=True)]
    nbest, reference = files(tmp_path, cut)
    assert main(["score", "--tune-rerank", nbest, "--reference", reference]) == 2
    said = capsys.readouterr().err
    assert f"lacks candidates of line {line} that" in said
    assert "--nbest TWICE_THE_BEAM" in said


@pytest.mark.parametrize("fields", ["deep= nan ||| 0", "deep= 1 ||| inf", "tokens= -1 ||| 0", "deep= 1_0 ||| 0"])
def test_a_candidate_whose_numbers_are_none_is_refused(fields: str) -> None:
    with pytest.raises(ValueError):
        Candidate.parse(f"0 ||| text ||| {fields}")
