"""Experiment: collapse of deep decoders, and remedies. Arms share data, seed and number of updates.

    python benchmarks/run.py collapse --data DATA --out OUT [--jobs J ...] [--at-once 2] [--set K=V ...]

DATA is a directory made by `deepspeed-nmt prepare`, with a test set; the figures in benchmarks/RESULTS.md are of raw
Multi30k, English to German, and a vocabulary of 2,000. Each arm trains in a run directory OUT/<arm>-seed<n>, on one
thread of the CPU; it is resumed if the script is started again. Then the last checkpoints are averaged, and the test
set is translated and scored. `deepspeed-nmt report collapse
OUT/*-seed?` draws the curves.

`--set` changes settings of all arms. With these, 15 layers collapsed but 6 did not:

    ... --set model.norm=post optimizer.lr=5e-3 schedule.warmup_updates=200 optimizer.clip_norm=0
"""

from __future__ import annotations

import argparse

from arms import Arm, Experiment, add_options
from records import Results

WATCHED = ["model.encoder_layers=4", "collapse.every=100", "collapse.grace=600"]
DEEP = [*WATCHED, "model.decoder_layers=15"]
CAD = ["layer.name=cross_attention_drop", "layer.drop_depth=6", "layer.drop_ratio=1.0"]
CRT = ["objective.ddr.weight=1", "objective.ald.weight=1"]
ARMS = {
    "control6": Arm([*WATCHED, "model.decoder_layers=6"]),
    "plain15": Arm(DEEP),
    "cad15": Arm([*DEEP, *CAD]),
    "full15": Arm([*DEEP, *CAD, *CRT]),
}
# Longest first; the most important arms, plain15 and cad15, have two seeds.
JOBS = ["full15:1", "plain15:1", "control6:1", "cad15:1", "plain15:2", "cad15:2"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, JOBS)


def run(arguments: argparse.Namespace) -> Results:
    """Run the arms."""
    return Experiment(ARMS, arguments).run(arguments.jobs)
