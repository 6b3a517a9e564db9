"""Experiment: does reliance on the source find the hallucinations that translators have marked?

    python benchmarks/run.py annotated --text TEXT --corpus annotated_corpus.csv --out OUT [--jobs ARM:SEED ...]
        [--updates N] [--set K=V ...]

The corpus is that of Guerreiro et al. 2023 (github.com/deep-spin/hallucinations-in-nmt): 3,415 translations, German
to English, by a model of WMT18, with marks of translators. TEXT has folders of raw text in .en and .de: `multi30k`
(train), `tatoeba_ende` (train) and `newstest_ende` (newstest2012 and newstest2013; newstest2014 validates). On all of
it a model of 3+3 layers with D=128 is trained, German to English, for 4,000 updates of some 2,050 target tokens, and
scores the translations of the corpus with their sources. In `shuffled` every other source of the training text is
that of another pair.

Lines with a mark are compared with those that have none; hallucinations, which are repetitions and unsupported
translations, with all others. AUROC and intervals are those of `doubt`. An arm that has a row in the record is not
run again.
"""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from arms import sh
from collapse import COLUMNS as MEASURED
from collapse import add_options, results, train
from doubt import Judge, compared, values_of
from records import Results, Table

from deepspeed_nmt import Translator

RESUMES = True
"""A record that exists has the arms that have ended."""
UPDATES = 4000
MODEL = [
    *("model.encoder_layers=3", "model.decoder_layers=3", "model.dim=128", "model.ffn_dim=512", "model.dropout=0.1"),
    "collapse.every=500",
]
ARMS = {"sound": MODEL, "shuffled": MODEL}
TRAINING = ("multi30k/train", "tatoeba_ende/train", "newstest_ende/newstest2012", "newstest_ende/newstest2013")
MARKS = {
    "full-unsupport": "fully unsupported",
    "strong-unsupport": "strongly unsupported",
    "repetitions": "repetitions",
    "omission": "omissions",
    "named-entities": "named entities",
}
HALLUCINATIONS = ("full-unsupport", "strong-unsupport", "repetitions")
COLUMNS = {
    title: MEASURED[title]
    for title in ("arm", "seed", "at update", "train ppl", "valid ppl", "valid BLEU", "source reliance")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])
    parser.add_argument("--corpus", type=Path, required=True, help="the annotated corpus")


def prepare(text: Path, out: Path) -> dict[str, Path]:
    """Prepare the training text as it is, and with every other source moved to another pair."""
    out.mkdir(parents=True, exist_ok=True)
    sides = {
        language: [
            line for name in TRAINING for line in (text / f"{name}.{language}").read_bytes().splitlines(keepends=True)
        ]
        for language in ("de", "en")
    }
    shuffled = list(sides["de"])
    moved = shuffled[::2]
    random.Random(1).shuffle(moved)
    shuffled[::2] = moved
    valid = text / "newstest_ende/newstest2014"
    data = {name: out / name for name in ARMS}
    for name, sources in (("sound", sides["de"]), ("shuffled", shuffled)):
        if not data[name].exists():
            (out / f"{name}.de").write_bytes(b"".join(sources))
            (out / f"{name}.en").write_bytes(b"".join(sides["en"]))
            files = ["--train-source", str(out / f"{name}.de"), "--train-target", str(out / f"{name}.en")]
            files += ["--valid-source", f"{valid}.de", "--valid-target", f"{valid}.en"]
            same = ["--vocab-size", "8000"] if name == "sound" else ["--vocab-from", str(data["sound"])]
            sh("prepare", "--out", str(data[name]), *files, *same)
    return data


def marked(corpus: Path) -> list[dict[str, str]]:
    """Return the lines of the corpus whose marks are all 0 or 1; a comma without quotes has moved those of one."""
    with corpus.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if all(row[mark] in ("0", "1") for mark in MARKS)]


def found(run: Path, corpus: list[dict[str, str]], seed: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Score the corpus, and return rows with the AUROC of each mark, and shares that the flag `detached` is on."""
    judge = Judge(Translator.open(run, checkpoint="last", precision="fp32"))
    scored = judge.score([row["src"] for row in corpus], [row["mt"] for row in corpus])
    values, flagged = values_of(scored), np.array(["detached" in one.flags for one in scored])
    marks = {mark: np.array([row[mark] == "1" for row in corpus]) for mark in MARKS}
    none = ~np.logical_or.reduce(list(marks.values()))
    wrong = np.logical_or.reduce([marks[mark] for mark in HALLUCINATIONS])
    rows = [compared("hallucinations", values, wrong, seed) | {"lines": int(wrong.sum())}]
    for mark, title in MARKS.items():
        chosen = none | marks[mark]
        own = {name: value[chosen] for name, value in values.items()}
        rows.append(compared(title, own, marks[mark][chosen], seed) | {"lines": int(marks[mark].sum())})
    flags = {"no mark": none, **{title: marks[mark] for mark, title in MARKS.items()}}
    return rows, {title: float(flagged[chosen].mean()) for title, chosen in flags.items()}


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data, corpus = prepare(arguments.text, arguments.out), marked(arguments.corpus)

    def row(name: str, seed: str) -> dict[str, Any]:
        trained = train(name, seed, ARMS[name], arguments.updates or UPDATES, {"data": data[name]}, arguments)
        areas, flagged = found(arguments.out / f"{name}-seed{seed}", corpus, int(seed))
        return {**trained, "auroc": areas, "detached": flagged}

    for each in results(arguments, COLUMNS, row):
        rows = [{"arm": one["arm"], "seed": one["seed"], **area} for one in each.rounds for area in one["auroc"]]
        each.tables["auroc"] = Table.of(rows)
        rows = [{"arm": one["arm"], "seed": one["seed"], **one["detached"]} for one in each.rounds]
        each.tables["detached"] = Table.of(rows, dict.fromkeys(("no mark", *MARKS.values()), "{:.1%}"))
        yield each
