"""Experiment: a race of deep and of other systems on real text, with equal numbers of updates.

    python benchmarks/run.py race --data DATA --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

DATA is a directory made by `deepspeed-nmt prepare`, with a test set: raw Multi30k, English to German, and a
vocabulary of 4,000. All arms have D=128, and the same data, seed, updates and schedule; their parameters differ, and
are a column. SDT's encoder grows from 6 to 12 and 18 layers after a third and two thirds of the updates. A run that
was stopped is resumed. Then the last checkpoints are averaged, and the test set is translated and scored; the others
are compared with the first arm, with 95% intervals. `--set engine.device=cuda` trains on a GPU. `--cost` trains none,
but measures the CPU time of 20 updates after the first, and the memory of the process.
`deepspeed-nmt report runs OUT/*-seed1` draws the curves.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from arms import PROGRAM, Arm, Experiment, add_options
from records import Results, Table
from typing_extensions import override

COMMON = [
    *("model.dim=128", "engine.name=plain", "engine.device=cpu", "training.keep_last=4", "training.log_every=50"),
    *("optimizer.lr=2e-3", "optimizer.clip_norm=1", "schedule.name=cosine", "schedule.warmup_updates=400"),
    *("batch.update_tokens=2048", "batch.micro_tokens=2048", "model.dropout=0.2", "training.validate_every=200"),
    *("validation.max_sentences=200", "search.beam=4", "collapse.every=200", "training.save_every=20"),
]
TRANSFORMER = ["model.ffn_dim=512", "model.heads=4"]


def transformer(encoder: int, decoder: int, *more: str) -> Arm:
    """Return an arm with the layers of a Transformer."""
    return Arm([*TRANSFORMER, f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}", *more])


CAD = ["layer.name=cross_attention_drop", "layer.drop_depth=12", "layer.drop_ratio=1.0"]
ARMS = {
    "plain6-6": transformer(6, 6),
    "pre6-18": transformer(6, 18),
    "post6-18": transformer(6, 18, "model.norm=post"),
    "mixed6-18": transformer(6, 18, "model.decoder_norm=post"),
    "dlcl18-6": transformer(18, 6, "model.name=dlcl"),
    "sdt18-6": transformer(
        *(18, 6, "model.name=sdt", "model.stack_layers=6"),
        *("growth.encoder_layers=[6,12]", "growth.decoder_layers=[6,6]"),
    ),
    "msc18-6": transformer(18, 6, "model.name=msc"),
    "coordination6": transformer(6, 6, "model.name=coordination"),
    "merged_attention18": transformer(
        18, 18, "model.norm=post", "model.init=depth_scaled", "layer.name=merged_attention"
    ),
    "relative6-6": transformer(6, 6, "model.name=relative_positions"),
    "gnmt": Arm(  # 0.04, the paper's bound, is one for D=1024
        ["model.name=gnmt", "model.encoder_layers=4", "model.decoder_layers=4", "model.init_range=0.11"],
        recipe="gnmt_wmt14_ende",
    ),
    "convs2s": Arm(
        ["model.name=convs2s", *(f"model.{side}_convolutions=[[6,128,3]]" for side in ("encoder", "decoder"))],
        recipe="convs2s_wmt14_ende",
    ),
    "recurrent6-6": transformer(6, 6, "model.name=recurrent", "model.encoder_loops=3", "model.decoder_loops=2"),
    "deep_decoder6-18": transformer(6, 18, *CAD, "objective.ddr.weight=1", "objective.ald.weight=1"),
}

TIMED = 20
COST = {"arm": "{}", "CPU s an update": "{:.2f}", "peak MiB": "{:,.0f}"}


class Race(Experiment):
    """An experiment with arms that may grow, each after a third and two thirds of its updates."""

    @override
    def settings_of(self, name: str, seed: str) -> list[str]:
        settings, updates = super().settings_of(name, seed), self.arguments.updates
        grows = any(setting.startswith("growth.") for setting in settings)
        return settings + ([f"growth.at=[{updates // 3},{2 * updates // 3}]"] if grows else [])

    def cost_of(self, name: str, seed: str) -> tuple[str, float, float]:
        """Return CPU seconds of an update of the whole model, and the peak of the process's memory in MiB."""
        settings = [setting for setting in self.settings_of(name, seed) if not setting.startswith("growth.")]
        settings += ["schedule.warmup_updates=1", "collapse.every=0"]
        settings += ["validation.max_sentences=1", "validation.metrics=[]"]
        seconds = []
        for updates in (1, 1 + TIMED):
            with tempfile.TemporaryDirectory() as directory:
                run = ["--data", str(self.arguments.data), "--run", str(Path(directory, "run"))]
                words = ["--recipe", self.arms[name].recipe, *run, *settings, f"training.max_updates={updates}"]
                process = subprocess.Popen(
                    [*PROGRAM, "train", *words],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stderr=subprocess.DEVNULL,
                )
                _, status, usage = os.wait4(process.pid, 0)
            assert status == 0, f"{name} ended with status {status}"
            seconds.append(usage.ru_utime + usage.ru_stime)
        return name, (seconds[1] - seconds[0]) / TIMED, usage.ru_maxrss / 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])
    parser.add_argument("--cost", action="store_true", help=f"train none, but measure {TIMED} updates of each")
    parser.set_defaults(updates=600)


def run(arguments: argparse.Namespace) -> Results:
    """Run the arms, or measure what they cost."""
    race = Race(ARMS, arguments, COMMON)
    if not arguments.cost:
        return race.run(arguments.jobs)
    return Results(
        tables={"cost": Table(columns=COST, rows=[[*race.cost_of(*job.split(":"))] for job in arguments.jobs])}
    )
