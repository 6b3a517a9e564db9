"""Differences between the losses and gradients of this CPU, with this torch, and the recorded ones of each family.

    python benchmarks/run.py golden [--family NAME ...]

Each family trains for 100 updates in float64, as in tests/golden, whose values were recorded once, on one CPU.
Differences are relative to the recorded value.
"""

from __future__ import annotations

import argparse
import json
import time

from records import Results, Table

from tests.golden.test_golden_losses import FAMILIES, TOLERANCE, UPDATES, corpus_directory, recorded, train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--family", action="append", choices=FAMILIES, help="families (default: all)")


def run(arguments: argparse.Namespace) -> Results:
    """Train the families, and compare."""
    rows = []
    with corpus_directory() as directory:
        for family in arguments.family or FAMILIES:
            began, before = time.process_time(), json.loads(recorded(family).read_text())
            values = train(family, directory)
            parts = {
                f"largest difference of {name}": max(
                    abs(one - other) / abs(other) for one, other in zip(values[name], before[name], strict=True)
                )
                for name in ("losses", "norms")
            }
            first, last = values["losses"][0], values["losses"][-1]
            row = {"family": family, "updates": UPDATES, "loss, first and last": [first, last], **parts}
            rows.append({**row, "allowed": TOLERANCE, "CPU seconds": round(time.process_time() - began, 1)})
    formats = {"loss, first and last": "{:.3f} and {:.3f}"}
    formats |= dict.fromkeys([name for name in rows[0] if name.startswith("largest")] + ["allowed"], "{:.1e}")
    return Results(tables={"families": Table.of(rows, formats)})
