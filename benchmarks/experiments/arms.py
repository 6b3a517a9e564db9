"""Common code of the experiments: train arms on the CPU, one thread each, then translate and score."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from records import Results, Table

from deepspeed_nmt.data.data_directory import DataDirectory

PROGRAM = [sys.executable, "-m", "deepspeed_nmt"]

COMMON = [
    *("model.dim=64", "model.ffn_dim=128", "engine.name=plain", "engine.device=cpu"),
    *("training.keep_last=4", "training.validate_every=250", "training.log_every=50"),
    *("validation.max_sentences=200", "search.beam=4", "model.dropout=0.1", "optimizer.lr=3e-3"),
]
"""Settings of all arms: a narrow model, for a recipe with updates of 2,048 tokens."""

COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "parameters": "parameters",
    "trained": "trained",
    "train ppl": "train/ppl",
    "valid ppl": "valid/ppl",
    "valid BLEU": "valid/bleu",
    "source reliance": "collapse/source_reliance",
    "prefix reliance": "collapse/prefix_reliance",
}
"""Columns of the table, and the values of an arm that they show."""

Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Arm:
    """A configuration to train and to translate with.

    Attributes:
        settings: settings on top of the common ones.
        grow_from: arm that this one grows from.
        translations: options of `translate` by label; the test set is translated with each.
        recipe: recipe of the arm.
    """

    settings: list[str]
    grow_from: str | None = None
    translations: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    recipe: str = "multi30k_cpu"


def sh(*words: str) -> str:
    """Run a command of `deepspeed-nmt` on one thread and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PROGRAM, *words], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def compared(base: Path, hypothesis: Path, reference: Path) -> dict[str, Any]:
    """Compare translations with others by a paired bootstrap test of BLEU; see :func:`difference`."""
    files = ["--hypothesis", str(base), str(hypothesis), "--reference", str(reference)]
    comparison: dict[str, Any] = json.loads(sh("score", *files, "--json").splitlines()[1])["comparison"]
    return comparison


def difference(comparison: Mapping[str, Any]) -> str:
    """Return the difference of a comparison with its interval."""
    low, high = comparison["interval"]
    return f"{comparison['difference']:+.1f} [{low:+.1f}, {high:+.1f}]"


class Experiment:
    """Arms to train, a few at a time. Runs that were stopped are resumed.

    Args:
        arms: arms by name.
        arguments: of the command line.
        common: settings of all arms.
        reference: reference of the test set; None for the text in the data directory.
    """

    def __init__(
        self,
        arms: dict[str, Arm],
        arguments: argparse.Namespace,
        common: Sequence[str] = COMMON,
        reference: Path | None = None,
    ) -> None:
        self.arms = arms
        self.arguments = arguments
        self.common = common
        self.reference = reference or arguments.data / "test.target"
        self.futures: dict[tuple[str, str], Future[Rows]] = {}

    def run_of(self, name: str, seed: str) -> Path:
        """Return the run directory of an arm."""
        return Path(self.arguments.out, f"{name}-seed{seed}")

    def settings_of(self, name: str, seed: str) -> list[str]:
        """Return the settings of an arm, on top of its recipe."""
        arm = self.arms[name]
        settings = [*self.common, *arm.settings, *self.arguments.settings, f"training.seed={seed}"]
        return [*settings, f"training.max_updates={self.arguments.updates}"]

    def one(self, name: str, seed: str) -> Rows:
        """Train, average and translate an arm, and return a result for each translation."""
        arm, data, run = self.arms[name], self.arguments.data, self.run_of(name, seed)
        settings = self.settings_of(name, seed)
        train = ["train", "--recipe", arm.recipe, "--data", str(data), "--run", str(run)]
        if arm.grow_from:
            self.futures[arm.grow_from, seed].result()
            train += ["--grow-from", str(self.run_of(arm.grow_from, seed)), "--from-checkpoint", "average"]
        with run.with_name(f"{run.name}.log").open("a") as stream:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*PROGRAM, *train, *settings], env=environment, check=True, stderr=stream)
        sh("average", "--run", str(run), "--last", "4")
        vocabulary = DataDirectory.open(data).tokenizer().vocabulary
        sizes = [vocabulary.size] if vocabulary.own_source is None else [vocabulary.source.size, vocabulary.size]
        size = ["--recipe", arm.recipe, "--vocab-size", ",".join(map(str, sizes))]
        entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        last = {key: value for entry in entries for key, value in entry.items() if "/layer_" not in key}
        planned = json.loads(sh("plan", *size, *settings, "--json"))
        common = {
            "seed": seed,
            "parameters": planned["parameters"],
            "trained": planned.get("trained", planned["parameters"]),
            "monitor_seconds": sum(entry.get("collapse/seconds", 0.0) for entry in entries),
            **last,
        }
        results: Rows = []
        for label, options in arm.translations.items():
            hypothesis = run.with_name(f"{run.name}{label and '.' + label.replace(' ', '-')}.hyp")
            files = ["--input", str(data / "test.source"), "--output", str(hypothesis)]
            sh("translate", "--run", str(run), "--checkpoint", "average", *files, *options)
            results.append({"arm": f"{name} {label}".strip(), "hypothesis": str(hypothesis), **common})
        return results

    def run(self, jobs: list[str]) -> Results:
        """Run the jobs ARM:SEED in order, score them, and compare each with the first by a paired bootstrap test."""
        out = Path(self.arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.arguments.at_once) as pool:
            for job in jobs:
                name, seed = job.split(":")
                self.futures[name, seed] = pool.submit(self.one, name, seed)
            rows = [row for future in self.futures.values() for row in future.result()]
        reference = ["--reference", str(self.reference)]
        hypotheses = [str(row["hypothesis"]) for row in rows]
        lines = sh("score", "--hypothesis", *hypotheses, *reference, "--json").splitlines()
        scores = [json.loads(line) for line in lines]
        sys.stdout.write(sh("score", "--hypothesis", *hypotheses, *reference))
        rounds = [{**row, "score": score} for row, score in zip(rows, scores, strict=True)]
        shown = []
        for row, score in zip(rows, scores, strict=True):
            bleu: dict[str, object] = {"test BLEU": score["bleu"]["score"]}
            if (comparison := score.get("comparison")) is not None:
                bleu["against the first"] = difference(comparison)
            shown.append({title: row.get(key) for title, key in COLUMNS.items()} | bleu)
        formats = {"parameters": "{:,}", "trained": "{:,}"}
        formats |= dict.fromkeys(("train ppl", "valid ppl", "valid BLEU"), "{:,.1f}")
        formats |= dict.fromkeys(("source reliance", "prefix reliance", "test BLEU"), "{:.2f}")
        return Results(tables={"arms": Table.of(shown, formats)}, rounds=rounds)


def add_options(parser: argparse.ArgumentParser, arms: dict[str, Arm], jobs: list[str]) -> None:
    """Add the common options."""
    parser.add_argument("--data", type=Path, required=True, help="data directory with a test set")
    parser.add_argument("--out", type=Path, required=True, help="directory for runs and results")
    parser.add_argument(
        "--jobs",
        nargs="+",
        default=jobs,
        metavar="ARM:SEED",
        help=f"runs to make; arms: {', '.join(arms)} (default: all)",
    )
    add_shared(parser, updates=1550)


def add_shared(parser: argparse.ArgumentParser, updates: int) -> None:
    """Add the options of all experiments with arms."""
    parser.add_argument(
        "--updates", type=int, default=updates, help="updates of some 2,050 target tokens each (default: %(default)s)"
    )
    parser.add_argument("--at-once", type=int, default=2, help="number of runs at a time (default: %(default)s)")
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all arms"
    )
