"""Experiment: exits that are added to a trained model, beside exits trained with it and models of their depths.

    python benchmarks/run.py added --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). All arms have 4 encoder layers, D=64, lr 2e-3
after a warm-up of 400, no clipping, and updates of some 2,050 target tokens, 1,500 of them.

    alone1, ... alone4    models of so many decoder layers
    joint                 N x M exits of 4+4 layers, drawn 2x2
    norms, maps           exits after 1, 2 and 3 decoder layers of alone4, trained for 500 updates with a warm-up of
                          100: a LayerNorm each, or one with a map of rank 16

Each translates the validation text from its last checkpoint at its exits with the whole encoder. Differences from the
models alone, which come first, have intervals by a paired bootstrap test; `accepted` is the share of the tokens that
the exit drafts which the whole decoder accepts. An arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import compared, difference
from collapse import COLUMNS as MEASURED
from collapse import add_options, layers, prepare, results, train
from records import Results, Table

from deepspeed_nmt.api import Translator
from deepspeed_nmt.core.model import TOP, exit_name
from deepspeed_nmt.reports.text_scores import ParallelText, common_scorer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.lines import SourceCounts

RESUMES = True
"""A record that exists has the arms that have ended."""
DEPTH, UPDATES, ADDED = 4, 1500, 500
JOINT = ["objective.label_smoothed=null", "objective.multi_softmax.exits=2x2"]
ARMS = {
    **{f"alone{m}": layers(DEPTH, m) for m in range(1, DEPTH + 1)},
    "joint": [*layers(DEPTH, DEPTH), *JOINT],
    "norms": ["schedule.warmup_updates=100"],
    "maps": ["schedule.warmup_updates=100", "objective.added_exits.rank=16"],
}
COLUMNS = {title: MEASURED[title] for title in ("arm", "seed", "at update", "train ppl", "valid ppl", "hours")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def translated(run: Path, m: int) -> Path:
    """Return the file of a run's translations after so many decoder layers."""
    return run / f"layers_{m}.hyp"


def measured(name: str, seed: str, out: Path, text: Path) -> list[dict[str, Any]]:
    """Translate the validation text at each exit, and return BLEU, its difference from a model alone, and drafts."""
    run, files = out / f"{name}-seed{seed}", [text / "val.en", text / "val.de"]
    pair = ParallelText.read(*files)
    whole, scorer = Translator.open(run, checkpoint="last"), common_scorer([Run.open(run)], pair)
    depth, found = whole.model.stages[1], []
    for m in range(1, depth + 1):
        exit = TOP if m == depth else exit_name(DEPTH, m)
        if exit in whole.exits:
            lines = [one.text for one in whole.at_exit(exit).translate(pair.sources)]
            translated(run, m).write_text("".join(f"{line}\n" for line in lines))
            found.append({"layers": m, "BLEU": scorer.first(lines)})
    if name.startswith("alone"):
        return found[-1:]
    for row in found:
        m = row["layers"]
        alone = translated(out / f"alone{m}-seed{seed}", m)
        row["against alone"] = difference(compared(alone, translated(run, m), files[1]))
        if m < depth:
            drafts = {"name": "speculative", "draft_layers": m, "draft_tokens": 4, "draft_confidence": 1.0}
            drafting, counts = Translator.open(run, checkpoint="last", **drafts), SourceCounts()
            for _ in drafting.stream(pair.sources, max_tokens=1, counts=counts):
                pass
            if drafted := counts.drafts.get("drafted", 0):  # none if they would not pay
                row["accepted"] = counts.drafts.get("accepted", 0) / drafted
    return found


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data = prepare(arguments.text, arguments.out)

    def row(name: str, seed: str) -> dict[str, Any]:
        updates, begin = arguments.updates or UPDATES, []
        if name in ("norms", "maps"):
            origin = arguments.out / f"alone{DEPTH}-seed{seed}"
            begin = ["--add-exits", "1,2,3", "--init-from", str(origin), "--from-checkpoint", "last"]
            updates = updates * ADDED // UPDATES
        trained = train(name, seed, ARMS[name], updates, data, arguments, begin)
        return {**trained, "exits": measured(name, seed, arguments.out, arguments.text)}

    for found in results(arguments, COLUMNS, row):
        rows = [
            {"arm": row["arm"], "seed": row["seed"], **of_exit} for row in found.rounds for of_exit in row["exits"]
        ]
        found.tables["exits"] = Table.of(rows, {"BLEU": "{:.2f}", "accepted": "{:.1%}"})
        yield found
