"""Experiment: does reliance on the source find the translations that are wrong better than their probability does?

    python benchmarks/run.py doubt --run RUN --source test.de --reference test.en [--lines 1000] [--seed 1]

RUN is a trained run. It translates the source as it is, and three times damaged: a word is left out, a word is put in
at a random place, or the words are shuffled. A translation is wrong if its chrF against the reference is among the
lowest tenth of its group. A *detached* one is scored with the source of another line. AUROC is the probability that a
wrong translation has a lower value than another one; 50% is chance. Intervals are 95% of a bootstrap over lines.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import Results, Table
from sacrebleu.metrics import CHRF

from deepspeed_nmt import Translator

MEASURES = {"log-probability": "mean_log_prob", "reliance": "reliance"}
_ROUNDS = 1000


def left_out(words: list[str], dice: random.Random) -> list[str]:
    place = dice.randrange(len(words))
    return words[:place] + words[place + 1 :]


def put_in(words: list[str], dice: random.Random, others: Sequence[str]) -> list[str]:
    place = dice.randrange(len(words) + 1)
    return [*words[:place], dice.choice(others), *words[place:]]


def auroc(values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """Return the probability that a wrong one has a lower value than another one; ties count half."""
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):  # ties share their mean rank
        same = values == value
        ranks[same] = ranks[same].mean()
    positive, negative = int(wrong.sum()), int((~wrong).sum())
    lower = ranks[~wrong].sum() - negative * (negative + 1) / 2
    return float(lower / (positive * negative))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="trained run")
    parser.add_argument("--source", type=Path, required=True, help="source text")
    parser.add_argument("--reference", type=Path, required=True, help="its translation")
    parser.add_argument("--lines", type=int, default=1000, help="lines of the texts (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the damage (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Translate, score and compare."""
    sources, references = (
        path.read_text(encoding="utf-8").splitlines()[: arguments.lines]
        for path in (arguments.source, arguments.reference)
    )
    dice, translator = random.Random(arguments.seed), Translator.open(arguments.run, precision="fp32")
    words = [line.split() for line in sources]
    everything = [word for line in words for word in line]
    groups: dict[str, list[str]] = {
        "as it is": sources,
        "a word left out": [" ".join(left_out(line, dice)) for line in words],
        "a word put in": [" ".join(put_in(line, dice, everything)) for line in words],
        "words shuffled": [" ".join(dice.sample(line, len(line))) for line in words],
    }
    chrf = CHRF()
    rounds: dict[str, Any] = {}
    rows = []
    for name, given in groups.items():
        texts = [translation.text for translation in translator.translate(given)]
        scored = list(translator.score(given, texts, reliance=True))
        quality = np.array(
            [chrf.sentence_score(text, [line]).score for text, line in zip(texts, references, strict=True)]
        )
        values = {title: np.array([getattr(pair, field) for pair in scored]) for title, field in MEASURES.items()}
        wrong = quality <= np.quantile(quality, 0.1)
        rounds[name] = {title: value.tolist() for title, value in values.items()} | {"chrF": quality.tolist()}
        rows.append(compared(f"{name}: lowest tenth by chrF", values, wrong, arguments.seed))
        if name == "as it is":  # each translation also against the source of its neighbour
            detached = list(translator.score([*given[1:], given[0]], texts, reliance=True))
            both = {
                title: np.concatenate([values[title], [getattr(pair, field) for pair in detached]])
                for title, field in MEASURES.items()
            }
            rows.append(compared("detached", both, np.repeat([False, True], len(texts)), arguments.seed))
    return Results(tables={"auroc": Table.of(rows)}, rounds=rounds)


def compared(
    name: str, values: dict[str, NDArray[np.float64]], wrong: NDArray[np.bool_], seed: int
) -> dict[str, Any]:
    """Return a row with the AUROC of each measure, and of the difference of the last to the first."""
    generator = np.random.default_rng(seed)
    differences = []
    for _ in range(_ROUNDS):
        chosen = generator.integers(len(wrong), size=len(wrong))
        if 0 < wrong[chosen].sum() < len(chosen):
            first, *_, last = (auroc(value[chosen], wrong[chosen]) for value in values.values())
            differences.append(last - first)
    low, high = np.quantile(differences, [0.025, 0.975])
    areas = {title: f"{auroc(value, wrong):.1%}" for title, value in values.items()}
    first, *_, last = (auroc(value, wrong) for value in values.values())
    return {
        "wrong": name,
        "lines": len(wrong),
        **areas,
        "difference": f"{100 * (last - first):+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
    }
