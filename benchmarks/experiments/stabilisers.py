"""Experiment: which ways to normalise and scale the layers train at which depths.

    python benchmarks/run.py stabilisers --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). An arm is a `model.norm`, or pre-norm or
post-norm with depth-scaled initialisation, and a depth of encoder and decoder; all have D=64, the same data, updates
of some 2,050 target tokens, lr 2e-3 after a warm-up of 400, no clipping, 600 updates. What `plan --probe` says of the
untrained model stands beside what became of it. An arm is a row when it ends, by its number of updates, or at
--hours; an arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from arms import sh
from collapse import COLUMNS as MEASURED
from collapse import COMMON, add_options, layers, prepare, results, train
from records import Results

from deepspeed_nmt.methods.stabilisers import Norm

RESUMES = True
"""A record that exists has the arms that have ended."""
STYLES = {norm: [f"model.norm={norm}"] for norm in get_args(Norm)}
STYLES |= {f"{norm}_scaled": [f"model.norm={norm}", "model.init=depth_scaled"] for norm in ("pre", "post")}
DEPTHS = ((6, 6), (24, 24), (6, 24), (24, 6), (50, 50), (100, 100))
ARMS = {f"{style}_{n}-{m}": [*layers(n, m), *STYLES[style]] for n, m in DEPTHS for style in STYLES}
COLUMNS = {
    **{title: key for title, key in MEASURED.items() if title not in ("hours", "valid BLEU") and "text" not in title},
    "untrained: source": "source",
    "prefix": "prefix",
    "likeness": "likeness",
    "gradient, lowest / highest decoder layer": "ratio",
    "hours": "hours",
}


def probed(name: str) -> dict[str, Any]:
    """Return what is measured of the untrained model of an arm."""
    words = ["plan", "--recipe", "multi30k_cpu", "--vocab-size", "2000", "--probe", "--json"]
    found = json.loads(sh(*words, *COMMON, *ARMS[name]))["probe"]
    return {**found, "ratio": found["decoder"][0] / max(found["decoder"][-1], 1e-30)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data: dict[str, Path] = prepare(arguments.text, arguments.out)

    def row(name: str, seed: str) -> dict[str, Any]:
        return {**probed(name), **train(name, seed, ARMS[name], arguments.updates or 600, data, arguments)}

    yield from results(arguments, COLUMNS, row)
