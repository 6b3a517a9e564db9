"""Experiment: does reliance on the source find the translations that are wrong better than their probability does?

    python benchmarks/run.py doubt --run RUN --source test.en --reference test.de [--lines 1000] [--seed 1]

RUN is a trained run. It translates the source as it is, and three times damaged: a word is left out, a word is put in
at a random place, or the words are shuffled. A translation is wrong if its chrF against the reference is among the
lowest tenth of its group. A *detached* one is scored with the source of the next line; a likely one is, of the
translations of --others random lines, that to which the source gives the highest log-probability. AUROC is the
probability that a wrong translation has a lower value than another one; 50% is chance. Intervals are 95% of a
bootstrap over lines.

Flags are also counted of translations that lack their last third, and of those whose last two words stand there four
times. Bounds are those below which 1% and 5% of the translations as they are lie. The cost is the time of translating
with and without `reliance`, by turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from records import Results, Table
from sacrebleu.metrics import CHRF

from deepspeed_nmt import Translator
from deepspeed_nmt.search.reliance import Reliance

Values = Mapping[str, NDArray[np.float64]]
MEASURES: Mapping[str, Callable[[Reliance], float]] = {
    "log-probability": lambda one: one.mean_log_prob,
    "share of the source": lambda one: one.source_share or 0.0,
    "reliance": lambda one: one.reliance or 0.0,
}
"""The second one is reliance by the surprisal without the source, -log p(translation | empty source)."""
FLAGS = ("detached", "repeating", "truncated")
_ROUNDS = 1000
_TIMED = 5


def left_out(words: list[str], dice: random.Random) -> list[str]:
    place = dice.randrange(len(words))
    return words[:place] + words[place + 1 :]


def put_in(words: list[str], dice: random.Random, others: Sequence[str]) -> list[str]:
    place = dice.randrange(len(words) + 1)
    return [*words[:place], dice.choice(others), *words[place:]]


def auroc(values: NDArray[np.float64], wrong: NDArray[np.bool_]) -> float:
    """Return the probability that a wrong one has a lower value than another one; ties count half."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]  # ties share their mean rank
    positive, negative = int(wrong.sum()), int((~wrong).sum())
    lower = ranks[~wrong].sum() - negative * (negative + 1) / 2
    return float(lower / (positive * negative))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="trained run")
    parser.add_argument("--source", type=Path, required=True, help="source text")
    parser.add_argument("--reference", type=Path, required=True, help="its translation")
    parser.add_argument("--lines", type=int, default=1000, help="lines of the texts (default: %(default)s)")
    parser.add_argument("--others", type=int, default=20, help="lines of a likely one (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the damage (default: %(default)s)")


class Judge:
    """A run, which scores texts as translations of lines."""

    def __init__(self, translator: Translator) -> None:
        self.translator = translator

    def score(self, lines: Sequence[str], texts: Sequence[str]) -> list[Reliance]:
        scored = self.translator.score(lines, texts, reliance=True)
        tokens = self.translator.tokenizer.encode_batch(list(lines), "source")
        return [Reliance.of(*each, None) for each in zip(scored, texts, zip(lines, tokens, strict=True), strict=True)]

    def likely(self, lines: Sequence[str], texts: Sequence[str], others: int, dice: random.Random) -> list[Reliance]:
        """Score for each line the likeliest of the translations of other lines."""
        numbers = [dice.choices([n for n in range(len(lines)) if n != own], k=others) for own in range(len(lines))]
        scored = self.score(
            [line for line in lines for _ in range(others)], [texts[n] for row in numbers for n in row]
        )
        rows = (scored[start : start + others] for start in range(0, len(scored), others))
        return [max(row, key=lambda one: one.mean_log_prob) for row in rows]


def values_of(scored: Sequence[Reliance]) -> dict[str, NDArray[np.float64]]:
    return {title: np.array([measure(one) for one in scored]) for title, measure in MEASURES.items()}


def rounded(values: Values) -> dict[str, list[float]]:
    """Return values for the record."""
    return {title: value.round(4).tolist() for title, value in values.items()}


def run(arguments: argparse.Namespace) -> Results:
    """Translate, score and compare."""
    sources, references = (
        path.read_text(encoding="utf-8").splitlines()[: arguments.lines]
        for path in (arguments.source, arguments.reference)
    )
    dice, translator = random.Random(arguments.seed), Translator.open(arguments.run, precision="fp32")
    judge, chrf = Judge(translator), CHRF()
    words = [line.split() for line in sources]
    everything = [word for line in words for word in line]
    groups: dict[str, list[str]] = {
        "as it is": sources,
        "a word left out": [" ".join(left_out(line, dice)) for line in words],
        "a word put in": [" ".join(put_in(line, dice, everything)) for line in words],
        "words shuffled": [" ".join(dice.sample(line, len(line))) for line in words],
    }
    rounds: dict[str, Any] = {}
    rows = []
    translated: dict[str, list[Any]] = {}
    for name, given in groups.items():
        translated[name] = translator.translate(given, reliance=True)
        quality = np.array(
            [
                chrf.sentence_score(one.text, [line]).score
                for one, line in zip(translated[name], references, strict=True)
            ]
        )
        values = values_of([one.reliance for one in translated[name]])
        rounds[name] = rounded({**values, "chrF": quality})
        rows.append(
            compared(f"{name}: lowest tenth by chrF", values, quality <= np.quantile(quality, 0.1), arguments.seed)
        )
    as_is = [one.reliance for one in translated["as it is"]]
    texts = [one.text for one in translated["as it is"]]
    split = [text.split() for text in texts]
    planted = {
        "detached": judge.score([*sources[1:], sources[0]], texts),
        "detached, likely": judge.likely(sources, texts, arguments.others, dice),
        "last third missing": judge.score(sources, [" ".join(line[: 2 * len(line) // 3]) for line in split]),
        "last two words four times": judge.score(sources, [" ".join(line + line[-2:] * 3) for line in split]),
    }
    for name in ("detached", "detached, likely"):
        values = values_of(planted[name])
        rounds[name] = rounded(values)
        both = {title: np.concatenate([own, values[title]]) for title, own in values_of(as_is).items()}
        rows.append(compared(name, both, np.repeat([False, True], len(texts)), arguments.seed))
    flagged = [
        {"translations": name}
        | {flag: 100 * np.mean([flag in one.flags for one in scored]).item() for flag in FLAGS}
        | {"any": 100 * np.mean([bool(one.flags) for one in scored]).item()}
        for name, scored in {"as they are": as_is, **planted}.items()
    ]
    tables = {
        "auroc": Table.of(rows),
        "flags": Table.of(flagged, dict.fromkeys((*FLAGS, "any"), "{:.1f}%")),
        "bounds": Table.of(bounds(as_is, planted), {"bound": "{:.2f}", "found": "{:.1f}%"}),
        "cost": Table.of([timed(arguments.run, sources, beam, rounds) for beam in (1, 5)]),
    }
    return Results(tables=tables, rounds=rounds)


def bounds(as_is: Sequence[Reliance], planted: Mapping[str, Sequence[Reliance]]) -> list[dict[str, Any]]:
    """Return rows with the bounds of measures, and the share of planted translations that lie below them."""
    measures: dict[str, tuple[str, Callable[[Reliance], float]]] = {
        "reliance": ("detached", MEASURES["reliance"]),
        "reliance ": ("detached, likely", MEASURES["reliance"]),
        "log-probability of EOS": ("last third missing", lambda one: one.log_probs[-1]),
        "minus repetition": ("last two words four times", lambda one: -one.repetition),
    }
    rows = []
    for name, (planted_name, measure) in measures.items():
        for share in (0.01, 0.05):
            bound = float(np.quantile([measure(one) for one in as_is], share))
            found = 100 * np.mean([measure(one) < bound for one in planted[planted_name]]).item()
            rows.append(
                {"measure": name.strip(), "as they are, below": f"{share:.0%}", "bound": bound}
                | {"planted": planted_name, "found": found}
            )
    return rows


def timed(run: Path, sources: Sequence[str], beam: int, rounds: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the seconds of a translation with and without reliance, medians of rounds by turns."""
    translator = Translator.open(run, precision="fp32", beam=beam)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * _TIMED):
        begin = time.perf_counter()
        translator.translate(sources, reliance=bool(number % 2))
        seconds[bool(number % 2)].append(time.perf_counter() - begin)
    rounds[f"seconds, beam {beam}"] = [seconds[False], seconds[True]]
    without, with_it = (float(np.median(seconds[which])) for which in (False, True))
    row = {"beam": beam, "without, s": without, "with --reliance, s": with_it}
    return {**row, "slower": f"{100 * (with_it / without - 1):+.1f}%"}


def compared(name: str, values: Values, wrong: NDArray[np.bool_], seed: int) -> dict[str, Any]:
    """Return a row with the AUROC of each measure, and of the differences of the others to the first."""
    generator = np.random.default_rng(seed)
    first, *others = values
    rounds: list[dict[str, float]] = []
    for _ in range(_ROUNDS):
        chosen = generator.integers(len(wrong), size=len(wrong))
        if 0 < wrong[chosen].sum() < len(chosen):
            rounds.append({title: auroc(value[chosen], wrong[chosen]) for title, value in values.items()})
    areas = {title: auroc(value, wrong) for title, value in values.items()}
    row: dict[str, Any] = {
        "wrong": name,
        "lines": len(wrong),
        **{title: f"{area:.1%}" for title, area in areas.items()},
    }
    for title in others:
        low, high = np.quantile([100 * (each[title] - each[first]) for each in rounds], [0.025, 0.975])
        row[f"{title} - {first}"] = f"{100 * (areas[title] - areas[first]):+.1f} [{low:+.1f}, {high:+.1f}]"
    return row
