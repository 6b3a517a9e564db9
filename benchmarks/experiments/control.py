"""Experiment: cross-attention drop that adapts to source reliance, against fixed drop depths and none.

    python benchmarks/run.py control --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is that of `collapse`, and so are the settings: a pre-norm encoder of 6 and a post-norm decoder of 15 layers,
D=64, 3,000 updates. With the text as it is, in the arms `real_...`, this decoder loses its prefix. No decoder in the
records ignored its source for its own depth, so that failure is constructed: in the arms `shuffled_...` two of three
training pairs have the source of another pair.

    none                none drops its cross-attention
    fixed40, fixed78    the lowest 6 or 12 layers drop it with a probability of 0.5
    adapted             the lowest 12 layers begin at 0.5, and adapt to a reliance of 1 nat a token on both inputs

An arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arms import sh
from collapse import CAD, add_options, layers, prepare, results, train
from collapse import COLUMNS as MEASURED
from records import Results

RESUMES = True
"""A record that exists has the arms that have ended."""
KINDS = {
    "none": [],
    "fixed40": [CAD, "layer.drop_depth=6", "layer.drop_ratio=0.5"],
    "fixed78": [CAD, "layer.drop_depth=12", "layer.drop_ratio=0.5"],
    "adapted": [CAD, "layer.drop_depth=12", "layer.drop_ratio=0.5", "layer.target_reliance=1"],
}
ARMS = {
    f"{text}_{kind}": [*layers(6, 15), "model.decoder_norm=post", *own]
    for text in ("shuffled", "real")
    for kind, own in KINDS.items()
}
COLUMNS = {title: key for title, key in MEASURED.items() if "text" not in title} | {
    "drop ratio at the end": "collapse/drop_ratio"
}


def shuffled(text: Path, out: Path, vocabulary: Path) -> Path:
    """Prepare the training text with the sources of two of three pairs permuted, and the same vocabulary."""
    data = out / "shuffled"
    if not data.exists():
        lines = (text / "train.en").read_bytes().splitlines(keepends=True)
        moved = [number for number in range(len(lines)) if number % 3]
        sources = [lines[number] for number in moved]
        random.Random(1).shuffle(sources)
        for number, source in zip(moved, sources, strict=True):
            lines[number] = source
        (out / "shuffled.en").write_bytes(b"".join(lines))
        files = ["--train-source", str(out / "shuffled.en"), "--train-target", str(text / "train.de")]
        files += ["--valid-source", str(text / "val.en"), "--valid-target", str(text / "val.de")]
        sh("prepare", "--out", str(data), *files, "--vocab-from", str(vocabulary))
    return data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:{seed}" for name in ARMS for seed in (1, 2)])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    real = prepare(arguments.text, arguments.out)["data"]
    data = {"real": real, "shuffled": shuffled(arguments.text, arguments.out, real)}

    def row(name: str, seed: str) -> dict[str, Any]:
        of_arm = {"data": data[name.partition("_")[0]]}
        return train(name, seed, ARMS[name], arguments.updates or 3000, of_arm, arguments)

    yield from results(arguments, COLUMNS, row)
