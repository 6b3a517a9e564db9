"""Experiment: recurrent stacks of any number of loops, and exits that the deepest one teaches.

    python benchmarks/run.py loops --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). All arms have D=64, lr 2e-3 after a warm-up of
400, no clipping, and updates of some 2,050 target tokens, 3,000 of them.

    loops1, ... loops8   2+2 layers, applied 1, 2, 4 or 8 times on both sides
    loops_any            a random number of 1 to 8 loops of each side in every update
    loops_taught         a random number beside all 8 loops (exits=2x2), which teach it with weight 1
    exits, exits_taught, exits_symmetric     4+4 layers, exits=2x2, without a teacher, and with either divergence

Each model translates the validation text at equal depths of both sides that it was trained for, from its last
checkpoint, on which that text had no influence. An arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collapse import COLUMNS as MEASURED
from collapse import add_options, layers, prepare, results, train
from records import Results, Table

from deepspeed_nmt.api import Translator
from deepspeed_nmt.reports.text_scores import ParallelText, common_scorer
from deepspeed_nmt.run.directory import Run

RESUMES = True
"""A record that exists has the arms that have ended."""
DEPTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of loops or layers of both sides that are measured."""
MANY = "objective.label_smoothed=null"
ANY = [MANY, "objective.multi_softmax.exits=1x1", "objective.multi_softmax.full_depth=false"]
TWO, TAUGHT = [MANY, "objective.multi_softmax.exits=2x2"], "objective.multi_softmax.teacher=1"


def looped(loops: int) -> list[str]:
    """Return the settings of a model of two layers on each side that are applied so many times."""
    return [*layers(2, 2), "model.name=recurrent", f"model.encoder_loops={loops}", f"model.decoder_loops={loops}"]


ARMS = {
    **{f"loops{loops}": looped(loops) for loops in (1, 2, 4, 8)},
    "loops_any": [*looped(8), *ANY],
    "loops_taught": [*looped(8), *TWO, TAUGHT],
    "exits": [*layers(4, 4), *TWO],
    "exits_taught": [*layers(4, 4), *TWO, TAUGHT],
    "exits_symmetric": [*layers(4, 4), *TWO, TAUGHT, "objective.multi_softmax.divergence=symmetric"],
}
COLUMNS = {title: MEASURED[title] for title in ("arm", "seed", "at update", "train ppl", "valid ppl", "hours")}


def measured(run: Path, text: ParallelText) -> list[dict[str, float]]:
    """Translate a text at the trained depths, and return BLEU and seconds of each."""
    whole, found = Translator.open(run, checkpoint="last"), []
    scorer, top = common_scorer([Run.open(run)], text), whole.model.stages
    for depth in DEPTHS:
        name = f"{depth}-{depth}"
        if name in whole.exits or (depth, depth) == top:
            started = time.monotonic()
            lines = [one.text for one in whole.at_exit(name).translate(text.sources)]
            found.append({"depth": depth, "BLEU": scorer.first(lines), "seconds": time.monotonic() - started})
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data = prepare(arguments.text, arguments.out)
    text = ParallelText.read(arguments.text / "val.en", arguments.text / "val.de")

    def row(name: str, seed: str) -> dict[str, Any]:
        trained = train(name, seed, ARMS[name], arguments.updates or 3000, data, arguments)
        return {**trained, "depths": measured(arguments.out / f"{name}-seed{seed}", text)}

    for found in results(arguments, COLUMNS, row):
        by_depth = [
            {"arm": row["arm"], "seed": row["seed"], **{f"at {one['depth']}": one["BLEU"] for one in row["depths"]}}
            for row in found.rounds
        ]
        found.tables["bleu"] = Table.of(by_depth, {f"at {depth}": "{:.2f}" for depth in DEPTHS})
        yield found
