"""Does a deep decoder collapse, and what keeps it from collapsing? Arms that share data, seed and updates.

    python benchmarks/experiments/collapse.py --data DATA --out OUT [--jobs ARM:SEED ...] [--at-once 2] [key=value]

DATA is a directory made by `deepspeed-nmt prepare`, with a test set; the figures in benchmarks/RESULTS.md are of raw
Multi30k, English to German, and a vocabulary of 2,000. Each arm trains in a run directory OUT/<arm>-seed<n>, on the
CPU with one thread, and goes on where it stopped when the script is started again. Then the last checkpoints are
averaged, the test set is translated and scored, and OUT/summary.json and a table say what came of it.
`deepspeed-nmt report collapse OUT/*-seed?` draws the curves.

Settings at the end go to all arms. The setting in which 15 layers collapsed and 6 did not:

    ... model.norm=post optimizer.lr=5e-3 schedule.warmup_updates=200 optimizer.clip_norm=0
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAM = [sys.executable, "-m", "deepspeed_nmt"]

# 4 encoder layers and a narrow model throughout, on a recipe of 2,048-token updates.
COMMON = [
    *("model.dim=64", "model.ffn_dim=128", "model.encoder_layers=4", "engine.name=plain", "engine.device=cpu"),
    *("training.keep_last=4", "training.validate_every=250", "training.log_every=50", "collapse.every=100"),
    *("collapse.grace=600", "validation.max_sentences=200", "search.beam=4", "model.dropout=0.1"),
    "optimizer.lr=3e-3",
]
DEEP = ["model.decoder_layers=15"]
CAD = ["layer.name=cross_attention_drop", "layer.drop_depth=6", "layer.drop_ratio=1.0"]
CRT = ["objective.ddr.weight=1", "objective.ald.weight=1"]
ARMS = {
    "control6": ["model.decoder_layers=6"],
    "plain15": DEEP,
    "cad15": [*DEEP, *CAD],
    "full15": [*DEEP, *CAD, *CRT],
}

# The longest first; the main pair, plain and CAD, with two seeds.
JOBS = ["full15:1", "plain15:1", "control6:1", "cad15:1", "plain15:2", "cad15:2"]


def sh(*words: str) -> str:
    """Run a command of the program on one thread and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PROGRAM, *words], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def one(arm: str, seed: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Train, average, translate and score an arm."""
    run = arguments.out / f"{arm}-seed{seed}"
    settings = [*COMMON, *ARMS[arm], *arguments.settings, f"training.seed={seed}"]
    settings.append(f"training.max_updates={arguments.updates}")
    train = ["train", "--recipe", "multi30k_cpu", "--data", str(arguments.data), "--run", str(run)]
    log = run.with_suffix(".log")
    with log.open("a") as stream:
        subprocess.run(
            [*PROGRAM, *train, *settings],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            stderr=stream,
        )
    sh("average", "--run", str(run), "--last", "4")
    hypothesis = run / "test.hyp"
    source = str(arguments.data / "test.source")
    sh("translate", "--run", str(run), "--checkpoint", "average", "--input", source, "--output", str(hypothesis))
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for entry in entries for key, value in entry.items() if "/layer_" not in key}
    spent = sum(entry.get("collapse/seconds", 0.0) for entry in entries)
    return {"arm": arm, "seed": seed, "hypothesis": str(hypothesis), "monitor_seconds": spent, **last}


def compare(results: list[dict[str, object]], arguments: argparse.Namespace) -> None:
    """Score all translations, each tested against the first (paired bootstrap resampling)."""
    reference = ["--reference", str(arguments.data / "test.target")]
    hypotheses = [str(result["hypothesis"]) for result in results]
    lines = sh("score", "--hypothesis", *hypotheses, *reference, "--json").splitlines()
    for result, line in zip(results, lines, strict=True):
        result["score"] = json.loads(line)
    sys.stdout.write(sh("score", "--hypothesis", *hypotheses, *reference))


def main() -> None:
    """Run the arms, a few at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", default=JOBS, metavar="ARM:SEED", help=f"arms: {', '.join(ARMS)}")
    parser.add_argument("--updates", type=int, default=1550, help="of some 1,950 target tokens each")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("settings", nargs="*", help="key=value for all arms")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        jobs = [pool.submit(one, *job.split(":"), arguments) for job in arguments.jobs]
        results = [job.result() for job in jobs]
    compare(results, arguments)
    (arguments.out / "summary.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
