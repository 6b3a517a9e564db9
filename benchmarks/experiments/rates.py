"""Experiment: the best learning rate by depth and width, of Adam with three kinds of pre-norm layers, and of Muon.

    python benchmarks/run.py rates --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). An arm is `pre`, `scaled` (pre-norm with
depth-scaled initialisation), `completep` or `muon` (pre-norm), the layers of encoder and of decoder, the width, and a
learning rate. All but `muon` have Adam. CompleteP has the rules of 6 layers and D=64. Heads are 16 wide, the
feed-forward network is four times as wide as the state, updates have some 2,050 target tokens, and the rate falls
with the root of the update after a warm-up of 100; 250 updates. A rate is the best one of its model if the validation
loss at the end is the lowest. An arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from collapse import add_options, prepare, results, train
from records import Results, Table

RESUMES = True
"""A record that exists has the arms that have ended."""
STYLES = {
    "pre": ["model.norm=pre"],
    "scaled": ["model.norm=pre", "model.init=depth_scaled"],
    "completep": ["model.norm=completep", "model.base_dim=64"],
    "muon": ["model.norm=pre", "optimizer.name=muon"],
}
SIZES = ((6, 64), (24, 64), (6, 256), (50, 64), (100, 64))
"""Layers of each side, and widths."""
RATES = ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2", "3.2e-2")
SHORT = [
    *("schedule.warmup_updates=100", "validation.metrics=[]", "collapse.every=0", "training.log_every=25"),
    "model.dropout=0.1",
]


def arm(style: str, layers: int, dim: int, rate: str) -> list[str]:
    """Return the settings of an arm."""
    sizes = {"encoder_layers": layers, "decoder_layers": layers, "dim": dim, "ffn_dim": 4 * dim, "heads": dim // 16}
    own = [f"model.{name}={size}" for name, size in sizes.items()]
    return [*SHORT, *own, *STYLES[style], f"optimizer.lr={rate}"]


ARMS = {
    f"{style}_{layers}x{dim}_{rate}": arm(style, layers, dim, rate)
    for layers, dim in SIZES
    for rate in RATES
    for style in STYLES
}
COLUMNS = {"arm": "arm", "seed": "seed", "at update": "update", "valid ppl": "valid/ppl", "hours": "hours"}


def best(rounds: list[dict[str, Any]]) -> Table:
    """Return the perplexities by rate of each model, and the best rate if a lower and a higher one were tried."""
    rows = []
    for layers, dim in SIZES:
        for style in STYLES:
            found = {
                rate: fmean(seeds)
                for rate in RATES
                if (
                    seeds := [
                        row.get("valid/ppl") or math.inf
                        for row in rounds
                        if row["arm"] == f"{style}_{layers}x{dim}_{rate}"
                    ]
                )
            }
            if found:
                shown = {rate: found.get(rate) for rate in RATES}
                lowest, inner = min(found, key=found.__getitem__), list(found)[1:-1]
                known = lowest if lowest in inner else None
                rows.append({"arms": style, "layers": layers, "D": dim, **shown, "best": known})
    return Table.of(rows, dict.fromkeys(RATES, "{:.2f}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data = prepare(arguments.text, arguments.out)

    def row(name: str, seed: str) -> dict[str, Any]:
        updates = arguments.updates or 250
        own = [*ARMS[name], f"training.validate_every={updates}"]
        return train(name, seed, own, updates, data, arguments)

    for found in results(arguments, COLUMNS, row):
        found.tables["best"] = best(found.rounds)
        yield found
