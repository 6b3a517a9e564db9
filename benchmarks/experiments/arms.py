"""What the experiments share: arms trained side by side on the CPU, one thread each, then translated and scored."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_nmt.data.directory import DataDirectory

PROGRAM = [sys.executable, "-m", "deepspeed_nmt"]

# A narrow model on a recipe of 2,048-token updates.
COMMON = [
    *("model.dim=64", "model.ffn_dim=128", "engine.name=plain", "engine.device=cpu"),
    *("training.keep_last=4", "training.validate_every=250", "training.log_every=50"),
    *("validation.max_sentences=200", "search.beam=4", "model.dropout=0.1", "optimizer.lr=3e-3"),
]

Results = list[dict[str, object]]


@dataclass(frozen=True)
class Arm:
    """A run: its settings, how many times --updates it trains, the arm it grows from, how it is translated, and the
    recipe it starts from.
    """

    settings: list[str]
    times: int = 1
    grow_from: str | None = None
    translations: dict[str, list[str]] = field(default_factory=lambda: {"": []})
    recipe: str = "multi30k_cpu"


def sh(*words: str) -> str:
    """Run a command of the program on one thread and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PROGRAM, *words], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


class Experiment:
    """Arms by name, run a few at once; a run that was stopped goes on when the script is started again.

    Args:
        common: settings of all arms.
        reference: of the test set; default the data's own text.
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
        self.futures: dict[tuple[str, str], Future[Results]] = {}

    def run_of(self, name: str, seed: str) -> Path:
        """The run directory of an arm."""
        return Path(self.arguments.out, f"{name}-seed{seed}")

    def one(self, name: str, seed: str) -> Results:
        """Train, average and translate an arm: one result for each of its translations."""
        arm, data, run = self.arms[name], self.arguments.data, self.run_of(name, seed)
        settings = [*self.common, *arm.settings, *self.arguments.settings, f"training.seed={seed}"]
        settings.append(f"training.max_updates={self.arguments.updates * arm.times}")
        train = ["train", "--recipe", arm.recipe, "--data", str(data), "--run", str(run)]
        if arm.grow_from:
            self.futures[arm.grow_from, seed].result()
            train += ["--grow-from", str(self.run_of(arm.grow_from, seed)), "--from-checkpoint", "average"]
        with run.with_suffix(".log").open("a") as stream:
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
        results: Results = []
        for label, options in arm.translations.items():
            hypothesis = run / f"test{label and '.' + label.replace(' ', '-')}.hyp"
            files = ["--input", str(data / "test.source"), "--output", str(hypothesis)]
            sh("translate", "--run", str(run), "--checkpoint", "average", *files, *options)
            results.append({"arm": f"{name} {label}".strip(), "hypothesis": str(hypothesis), **common})
        return results

    def run(self, jobs: list[str]) -> None:
        """Run the jobs ARM:SEED in order, then score: each translation against the first by paired bootstrap."""
        out = Path(self.arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.arguments.at_once) as pool:
            for job in jobs:
                name, seed = job.split(":")
                self.futures[name, seed] = pool.submit(self.one, name, seed)
            results = [result for future in self.futures.values() for result in future.result()]
        reference = ["--reference", str(self.reference)]
        hypotheses = [str(result["hypothesis"]) for result in results]
        lines = sh("score", "--hypothesis", *hypotheses, *reference, "--json").splitlines()
        for result, line in zip(results, lines, strict=True):
            result["score"] = json.loads(line)
        sys.stdout.write(sh("score", "--hypothesis", *hypotheses, *reference))
        (out / "summary.json").write_text(json.dumps(results, indent=1))


def parser_for(description: str | None, arms: dict[str, Arm], jobs: list[str]) -> argparse.ArgumentParser:
    """The options that the experiments have in common."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", nargs="+", default=jobs, metavar="ARM:SEED", help=f"arms: {', '.join(arms)}")
    parser.add_argument("--updates", type=int, default=1550, help="of some 2,050 target tokens each")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--set", dest="settings", nargs="+", default=[], metavar="KEY=VALUE", help="for all arms")
    return parser
