"""Experiment: where a deep decoder may collapse, and whether cross-attention drop (CAD) cures it.

    python benchmarks/run.py collapse --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). Three experiments, English to German, a joint
vocabulary of 2,000, updates of some 2,050 target tokens, Glorot initialisation, no clipping:

    mixed6-15_drop78, ...   pre-norm encoder, post-norm decoder of 15 or 27 layers, of which the lowest 0, 40, 63, 78
                            or 93% have no cross-attention (layer.drop_ratio=1); D=64, lr 2e-3, warm-up 400, 3,000
                            updates
    mixed6-15_scaled, ...   all layers have it, and the initialisation is depth-scaled
    post6-15, post15-6      post-norm on both sides, with the same settings
    memory_plain, ...       2,500 pairs, pre-norm 6-27, D=128, neither dropout nor label smoothing, 4,000 updates;
                            with CAD in 21 layers, ALD, or both; reliance is measured on the training text, too

An arm is a row when it ends, by its number of updates, or at --hours. A run that was interrupted is resumed, and an
arm that has a row in the record is not run again. `--as` and `--set` make another experiment, such as twice the
width: `--as collapse_wide --set model.dim=128 model.ffn_dim=512`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from arms import PROGRAM, sh
from records import Record, Results, Table, commit

from deepspeed_nmt.build import build_objective
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.run.directory import Run

RESUMES = True
"""A record that exists has the arms that have ended."""
COMMON = [
    *("model.norm=pre", "model.init=xavier", "model.heads=4", "optimizer.clip_norm=0", "optimizer.lr=2e-3"),
    *("schedule.name=inverse_sqrt", "schedule.warmup_updates=400", "engine.name=plain", "engine.device=cpu"),
    *("training.log_every=50", "training.validate_every=500", "training.keep_last=1", "search.beam=1"),
    *("validation.max_sentences=200", "validation.best_by=loss", "collapse.every=250", "collapse.sentences=256"),
]
NARROW = ["model.dim=64", "model.ffn_dim=256", "model.dropout=0.1"]
CAD, ALD = "layer.name=cross_attention_drop", "objective.ald.weight=1"
MEMORY = [
    *("model.dim=128", "model.ffn_dim=512", "model.encoder_layers=6", "model.decoder_layers=27"),
    *("model.dropout=0", "objective.label_smoothed.smoothing=0"),
]
PAIRS = 2500
"""Size of the training text to be memorised."""
SHARES = (0, 40, 63, 78, 93)
"""Drop depths, in percent of the decoder's layers."""
DEPTHS = ((6, 15), (15, 27))


def layers(encoder: int, decoder: int) -> list[str]:
    """Return the settings of a narrow model of this depth."""
    return [*NARROW, f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}"]


def dropped(depth: int) -> list[str]:
    """Return the settings of decoders without cross-attention in their lowest layers."""
    return [CAD, f"layer.drop_depth={depth}", "layer.drop_ratio=1.0"] if depth else []


ARMS = {
    **{
        f"mixed{encoder}-{decoder}_drop{share}": [
            *layers(encoder, decoder),
            "model.decoder_norm=post",
            *dropped(round(decoder * share / 100)),
        ]
        for encoder, decoder in DEPTHS
        for share in SHARES
    },
    **{
        f"mixed{encoder}-{decoder}_scaled": [
            *layers(encoder, decoder),
            "model.decoder_norm=post",
            "model.init=depth_scaled",
        ]
        for encoder, decoder in DEPTHS
    },
    "post6-15": [*layers(6, 15), "model.norm=post"],
    "post15-6": [*layers(15, 6), "model.norm=post"],
    "memory_plain": MEMORY,
    "memory_cad": [*MEMORY, *dropped(21)],
    "memory_ald": [*MEMORY, ALD],
    "memory_both": [*MEMORY, *dropped(21), ALD],
}
JOBS = [f"{arm}:{seed}" for arm in ARMS for seed in (1, 2) if seed == 1 or arm.startswith("mixed")]
COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "at update": "update",
    "train ppl": "train/ppl",
    "valid ppl": "valid/ppl",
    "valid BLEU": "valid/bleu",
    "source reliance": "collapse/source_reliance",
    "prefix reliance": "collapse/prefix_reliance",
    "on training text: source reliance": "training text/collapse/source_reliance",
    "on training text: prefix reliance": "training text/collapse/prefix_reliance",
    "train loss, with dropout": "with dropout",
    "without": "without dropout",
    "hours": "hours",
}
CURVES = (
    "train/ppl",
    "valid/bleu",
    *(f"collapse/{tag}" for tag in ("source_reliance", "prefix_reliance", "nll", "drop_ratio")),
)


def prepare(text: Path, out: Path) -> dict[str, Path]:
    """Prepare the whole training text, and its first pairs with the same vocabulary, also to validate themselves."""
    data = {name: out / name for name in ("data", "pairs", "pairs_as_valid")}
    out.mkdir(parents=True, exist_ok=True)
    for language in ("en", "de"):
        lines = (text / f"train.{language}").read_bytes().splitlines(keepends=True)
        (out / f"pairs.{language}").write_bytes(b"".join(lines[:PAIRS]))
    some, held_out, same = out / "pairs", text / "val", ["--vocab-from", str(data["data"])]
    for name, train, valid, options in (
        ("data", text / "train", held_out, ["--vocab-size", "2000"]),
        ("pairs", some, held_out, same),
        ("pairs_as_valid", some, some, same),
    ):
        if not data[name].exists():
            files = [
                f"--{split}-{side}={stem}.{language}"
                for split, stem in (("train", train), ("valid", valid))
                for side, language in (("source", "en"), ("target", "de"))
            ]
            sh("prepare", "--out", str(data[name]), *files, *options)
    return data


def entries_of(run: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's log."""
    log = run / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train(
    name: str,
    seed: str,
    own: list[str],
    updates: int,
    data: dict[str, Path],
    arguments: argparse.Namespace,
    begin: Sequence[str] = (),
) -> dict[str, Any]:
    """Train an arm with settings of its own until its end or its time is up, and return what it has measured.

    ``begin`` are options that take the place of recipe and data.
    """
    memory = name.startswith("memory")
    run = arguments.out / f"{name}-seed{seed}"
    settings = [*COMMON, *own, *arguments.settings, f"training.max_updates={updates}", f"training.seed={seed}"]
    words = ["train", *(begin or ["--recipe", "multi30k_cpu", "--data", str(data["pairs" if memory else "data"])])]
    begun = time.monotonic()
    status = _run([*words, "--run", str(run), *settings], run, arguments.hours * 3600)
    row = _measured(run)
    if memory and row:  # the monitor measures on the training text, from the same weights
        copy = arguments.out / f"{name}-seed{seed}-as-valid"
        words = ["train", "--recipe", "multi30k_cpu", "--data", str(data["pairs_as_valid"]), "--run", str(copy)]
        settings = [*settings, "training.max_updates=1", "optimizer.lr=1e-12", "collapse.every=1", "collapse.grace=9"]
        _run([*words, "--init-from", str(run), "--from-checkpoint", "last", *settings], copy, arguments.hours * 3600)
        row |= {
            f"training text/{key}": value for key, value in _measured(copy).items() if key.startswith("collapse/")
        }
    with suppress(CheckpointError):  # it diverged before it wrote one
        row |= losses(run, data["pairs" if memory else "data"])
    # A run that was resumed has trained for longer than its last process.
    hours = max((time.monotonic() - begun) / 3600, row.get("perf/hours", 0.0))
    return {"arm": name, "seed": int(seed), "hours": hours, "status": status, **row}


def losses(run: Path, data: Path) -> dict[str, float]:
    """Return the loss of the last weights on some of the training text, in nats a token, with and without dropout."""
    opened = Run.open(run)
    vocabulary = opened.tokenizer.vocabulary
    module = TrainModule(opened.model("last"), build_objective(opened.config, vocabulary))
    batch = opened.config.batch.model_copy(update={"update_tokens": 4 * opened.config.batch.update_tokens})
    loader = TrainLoader.of_corpus(Corpus(data, "train"), batch, 1, 0, 1, vocabulary)
    update = next(loader.updates(Cursor(), 1))
    found = {}
    with torch.no_grad():
        for key in ("with dropout", "without dropout"):
            module.train(key == "with dropout")
            found[key] = sum(float(module(part).nll) for part in update.micro_batches) / update.target_tokens
    return found


def _run(words: list[str], run: Path, limit_s: float) -> int | str:
    """Run a training on one thread, and return its status, or that its time was up; it can then be resumed."""
    with run.with_name(f"{run.name}.log").open("a") as stream:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen([*PROGRAM, *words], env=environment, stderr=stream) as process:
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                process.terminate()  # it saves
                process.wait()
                return "time is up"


def _measured(run: Path) -> dict[str, Any]:
    """Return the last value of each tag of a run, and its curves as lists of updates and values."""
    entries = entries_of(run)
    last = {key: value for entry in entries for key, value in entry.items() if "/layer_" not in key}
    curves = {tag: [[entry["update"], entry[tag]] for entry in entries if tag in entry] for tag in CURVES}
    return {**last, "curves": curves} if entries else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, JOBS)


def add_options(parser: argparse.ArgumentParser, arms: Iterable[str], jobs: list[str]) -> None:
    """Add the options of an experiment whose arms end one after another."""
    parser.add_argument("--text", type=Path, required=True, help="directory of raw Multi30k")
    parser.add_argument("--out", type=Path, required=True, help="directory for data and runs")
    parser.add_argument(
        "--jobs", nargs="+", default=jobs, metavar="ARM:SEED", help=f"runs to make; arms: {', '.join(arms)}"
    )
    parser.add_argument("--updates", type=int, default=0, help="length of each run (default: that of the experiment)")
    parser.add_argument("--hours", type=float, default=2.0, help="longest time of an arm (default: %(default)s)")
    parser.add_argument(
        "--set", dest="settings", nargs="+", default=[], metavar="KEY=VALUE", help="settings of all arms"
    )


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data = prepare(arguments.text, arguments.out)
    yield from results(arguments, COLUMNS, lambda name, seed: train_arm(name, seed, data, arguments))


def train_arm(name: str, seed: str, data: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train an arm of this experiment."""
    updates = arguments.updates or (4000 if name.startswith("memory") else 3000)
    return train(name, seed, ARMS[name], updates, data, arguments)


def results(
    arguments: argparse.Namespace, columns: dict[str, str], row_of: Callable[[str, str], dict[str, Any]]
) -> Iterator[Results]:
    """Yield the results after each job that the record lacks, given what makes a row of an arm and a seed."""
    path = arguments.results / f"{arguments.record}.json"
    rounds: list[dict[str, Any]] = []
    if path.exists():
        rounds = Record.model_validate_json(path.read_text(encoding="utf-8")).rounds
    ended = {f"{row['arm']}:{row['seed']}" for row in rounds}
    for job in arguments.jobs:
        if job not in ended:
            rounds.append({**row_of(*job.split(":")), "commit": commit()})
            rows = [{title: row.get(key) for title, key in columns.items()} for row in rounds]
            yield Results(tables={"arms": Table.of(rows)}, rounds=rounds)
