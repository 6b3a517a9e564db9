"""Experiment: recurrent stacks of any number of loops, and exits that the deepest one teaches.

    python benchmarks/run.py loops --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). All arms have D=64, lr 2e-3 after a warm-up of
400, no clipping, and updates of some 2,050 target tokens, 3,000 of them.

    loops1, ... loops8   2+2 layers, applied 1, 2, 4 or 8 times on both sides
    loops_any            a random number of 1 to 8 loops of each side in every update
    loops_rank           the same, with a map of rank 8 after each loop
    loops_taught         a random number beside all 8 loops (exits=2x2), which teach it with weight 1
    exits, exits_taught, exits_symmetric     4+4 layers, exits=2x2, without a teacher, and with either divergence

Each model translates the validation text at equal depths of both sides that it was trained for, from its last
checkpoint, on which that text had no influence. If OUT has the model of equally many loops alone with the same seed,
or of `exits` for the taught ones, differences of BLEU from it have intervals by a paired bootstrap test. An arm that
has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import compared, difference
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
    "loops_rank": [*looped(8), *ANY, "model.loop_rank=8"],
    "loops_taught": [*looped(8), *TWO, TAUGHT],
    "exits": [*layers(4, 4), *TWO],
    "exits_taught": [*layers(4, 4), *TWO, TAUGHT],
    "exits_symmetric": [*layers(4, 4), *TWO, TAUGHT, "objective.multi_softmax.divergence=symmetric"],
}
COLUMNS = {title: MEASURED[title] for title in ("arm", "seed", "at update", "train ppl", "valid ppl", "hours")}


def hypotheses(run: Path, depth: int) -> Path:
    """Return the file of a run's translations at a depth."""
    return run / f"depth_{depth}.hyp"


def base_of(name: str, depth: int) -> str:
    """Return the arm that a model of several depths is compared with at one of them."""
    return f"loops{depth}" if name.startswith("loops_") else "exits"


def measured(name: str, seed: str, out: Path, text: ParallelText, reference: Path) -> list[dict[str, Any]]:
    """Translate a text at the trained depths, and return BLEU and seconds of each."""
    run = out / f"{name}-seed{seed}"
    whole, found = Translator.open(run, checkpoint="last"), []
    scorer, top = common_scorer([Run.open(run)], text), whole.model.stages
    for depth in DEPTHS:
        exit = f"{depth}-{depth}"
        if exit not in whole.exits and (depth, depth) != top:
            continue
        started = time.monotonic()
        lines = [one.text for one in whole.at_exit(exit).translate(text.sources)]
        row = {"depth": depth, "BLEU": scorer.first(lines), "seconds": time.monotonic() - started}
        hypotheses(run, depth).write_text("".join(f"{line}\n" for line in lines))
        base = hypotheses(out / f"{base_of(name, depth)}-seed{seed}", depth)
        if base.exists() and "_" in name:
            row |= compared(base, hypotheses(run, depth), reference)
        found.append(row)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data = prepare(arguments.text, arguments.out)
    text = ParallelText.read(arguments.text / "val.en", arguments.text / "val.de")

    def row(name: str, seed: str) -> dict[str, Any]:
        trained = train(name, seed, ARMS[name], arguments.updates or 3000, data, arguments)
        return {**trained, "depths": measured(name, seed, arguments.out, text, arguments.text / "val.de")}

    for found in results(arguments, COLUMNS, row):
        names = [{"arm": row["arm"], "seed": row["seed"]} for row in found.rounds]
        bleu = [{f"at {one['depth']}": one["BLEU"] for one in row["depths"]} for row in found.rounds]
        intervals = [
            {f"at {one['depth']}": difference(one) for one in row["depths"] if "interval" in one}
            for row in found.rounds
        ]
        rows = [name | own for name, own in zip(names, bleu, strict=True)]
        found.tables["bleu"] = Table.of(rows, {f"at {depth}": "{:.2f}" for depth in DEPTHS})
        rows = [name | own for name, own in zip(names, intervals, strict=True) if own]
        found.tables["against"] = Table.of(rows)
        yield found
