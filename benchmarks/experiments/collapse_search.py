"""Experiment: search for a decoder that turns into a language model, with the papers' settings at a small width.

    python benchmarks/run.py collapse_search --data DATA --out OUT [--jobs ARM:SEED ...] [--at-once 1]

DATA is a directory made by `deepspeed-nmt prepare`; the figures in benchmarks/RESULTS.md are of raw Multi30k, English
to German, and a vocabulary of 2,000. The paper sees the collapse with 15 layers on both sides. Here they have D=64,
FFN 256 and 4 heads, Glorot initialisation, no clipping, dropout 0.1, label smoothing 0.1 and Adam(0.9, 0.98). The
schedule is scaled: a peak of 7e-4 at D=512 becomes 2e-3 at D=64 (lr ~ D^-0.5), with a tenth of the warm-up (400
updates); arms named `noam` have the peak that Vaswani et al. (2017) compute for that warm-up, D^-0.5 400^-0.5.

A run stops as soon as the collapse monitor is sure (three measurements in a row after update 800), and as soon as it
is sure of the opposite (a source reliance above 1.5 in three in a row). Each result is a row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from arms import COLUMNS, PROGRAM
from records import Results, Table

COMMON = [
    *("model.dim=64", "model.ffn_dim=256", "model.heads=4", "model.dropout=0.1", "model.init=xavier"),
    *("optimizer.clip_norm=0", "schedule.name=inverse_sqrt", "schedule.warmup_updates=400"),
    *("engine.name=plain", "engine.device=cpu", "training.validate_every=500", "training.log_every=50"),
    *("training.keep_last=2", "validation.max_sentences=200", "validation.best_by=loss", "search.beam=1"),
    *("collapse.every=100", "collapse.grace=800", "collapse.patience=3", "collapse.action=stop"),
]
NOAM = 64**-0.5 * 400**-0.5
SOUND, IN_A_ROW = 1.5, 3
"""Source reliance of a decoder that translates, and measurements in a row that show it."""


def arm(norm: str, encoder: int, decoder: int, lr: float = 2e-3) -> list[str]:
    """Return the settings of an arm."""
    layers = [f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}"]
    return [f"model.norm={norm}", *layers, f"optimizer.lr={lr:.6g}"]


CAD = ["layer.name=cross_attention_drop", "layer.drop_depth=6", "layer.drop_ratio=1.0"]
HALF = "layer.drop_depth=3"
CRT = ["objective.ddr.weight=1", "objective.ald.weight=1"]
POST = arm("post", 15, 15)
DEEP_ENCODER = arm("post", 15, 6)
ARMS = {
    # The search: both norms, two learning rates, and depth on one side or both.
    "pre15-15": arm("pre", 15, 15),
    "post15-15": POST,
    "pre15-15_noam": arm("pre", 15, 15, NOAM),
    "post6-15": arm("post", 6, 15),
    "post15-6": DEEP_ENCODER,
    "post6-6": arm("post", 6, 6),
    # Remedies in the settings that collapse; a decoder of 6 layers drops the cross-attention of its lower half.
    "post15-15_cad": [*POST, *CAD],
    "post15-15_full": [*POST, *CAD, *CRT],
    "post15-15_scaled": [*POST, "model.init=depth_scaled"],
    "post15-6_cad": [*DEEP_ENCODER, *CAD, HALF],
    "post15-6_full": [*DEEP_ENCODER, *CAD, HALF, *CRT],
    "post15-6_scaled": [*DEEP_ENCODER, "model.init=depth_scaled"],
}


def search(job: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Train an arm until the monitor stops it, or to its end, and return what became of it."""
    name, seed = job.split(":")
    run = arguments.out / f"{name}-seed{seed}"
    settings = [*COMMON, *ARMS[name], f"training.max_updates={arguments.updates}", f"training.seed={seed}"]
    train = ["train", "--recipe", "multi30k_cpu", "--data", str(arguments.data), "--run", str(run), *settings]
    with run.with_suffix(".log").open("a") as stream:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*PROGRAM, *train], env=environment, stderr=stream) as process:
            while process.poll() is None:
                time.sleep(20)
                if is_sound(run):
                    process.terminate()  # it saves, and can be resumed
                    process.wait()
    last = {key: value for entry in entries_of(run) for key, value in entry.items() if "/layer_" not in key}
    return {
        "arm": name,
        "seed": int(seed),
        "sound": "yes" if is_sound(run) else "no",
        "status": process.returncode,
        **last,
    }


def is_sound(run: Path) -> bool:
    """Return True if the last measurements of a run are far from a collapse."""
    found = [entry["collapse/source_reliance"] for entry in entries_of(run) if "collapse/source_reliance" in entry]
    return len(found) >= IN_A_ROW and all(value > SOUND for value in found[-IN_A_ROW:])


def entries_of(run: Path) -> list[dict[str, float]]:
    """Return the complete lines of a run's log."""
    log = run / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="data directory")
    parser.add_argument("--out", type=Path, required=True, help="directory for runs and results")
    parser.add_argument(
        "--jobs", nargs="+", default=["pre15-15:1", "post15-15:1"], help=f"runs to make; arms: {', '.join(ARMS)}"
    )
    parser.add_argument("--updates", type=int, default=2500, help="longest run (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs at a time (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs in order; each is a row more."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, object]] = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for result in pool.map(lambda job: search(job, arguments), arguments.jobs):
            rounds.append(result)
            columns = {**COLUMNS, "at update": "update", "translates": "sound", "status": "status"}
            rows = [{title: row[key] for title, key in columns.items() if key in row} for row in rounds]
            yield Results(tables={"runs": Table.of(rows)}, rounds=rounds)
