"""Experiment: whether growing a model in the course of its run pays, against training it from scratch.

    python benchmarks/run.py growth --text TEXT --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

TEXT is a directory with raw Multi30k (train and val in .en and .de). All arms end with 12+12 pre-norm layers, D=64.
Updates have some 2,050 target tokens; the schedule is wsd: lr 2e-3 after a warm-up of 100, a decay in the last fifth.
`scratch` has all layers for 600 updates. Arms that grow have as many updates; `stack`, `adjacent`, `interpolate` and
`zero` have 3+3 layers in the first 60% of them, `zero_later` 2+2 in 78%, and `zero_twice` 1+1 in the first half, then
4+4 up to 80%. `scratch_less` has all layers, and fewer updates: as many FLOPs as those that grow at 60%.
`sdt_scratch` and `sdt` are SDT with stacks of 3 layers, the latter grown by its own rule.

At equal FLOPs an arm is compared with `scratch_less`; if it has the loss of `scratch`, `FLOPs` is what that took:
those of matrix products, for equally many source and target tokens. An arm is a row when it ends, or at --hours; an
arm that has a row in the record is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from collapse import COMMON, add_options, entries_of, layers, prepare, results, train
from records import Results

from deepspeed_nmt.build import build_meta_model, build_objective
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.planning.counting import count_rates

RESUMES = True
"""A record that exists has the arms that have ended."""
UPDATES, DECAY = 600, 0.2
DEEP = 12
GROWN: dict[str, tuple[str, dict[int, float]]] = {
    **{way: (way, {3: 0.6}) for way in ("stack", "adjacent", "interpolate", "zero")},
    "zero_later": ("zero", {2: 0.78}),
    "zero_twice": ("zero", {1: 0.5, 4: 0.8}),
    "sdt": ("", {3: 0.6}),
}
"""Way in which each arm grows (its own rule if empty), and layers of each side up to a part of the updates."""
ARMS = ["scratch", "scratch_less", *GROWN, "sdt_scratch"]
COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "updates": "update",
    "FLOPs, of scratch": "flops",
    "train ppl": "train/ppl",
    "valid loss": "valid/loss",
    "valid ppl": "valid/ppl",
    "hours": "hours",
}


def flops_of(config: RunConfig, update: int) -> float:
    """Return the FLOPs of a source and a target token in an update."""
    vocabulary, config = Vocabulary(2000), config.for_update(update)
    return sum(count_rates(build_meta_model(config, vocabulary), build_objective(config, vocabulary), vocabulary))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, [f"{name}:1" for name in ARMS])


def settings_of(name: str, total: int, updates: int) -> list[str]:
    """Return the settings of an arm, which grows at parts of `total` updates and ends after `updates`."""
    own = [*layers(DEEP, DEEP), "schedule.name=wsd", "schedule.warmup_updates=100", "collapse.every=0"]
    own += [f"schedule.decay_updates={round(DECAY * updates)}", "training.validate_every=100"]
    own += ["validation.metrics=[]", "validation.attention_images=0"]
    if name.startswith("sdt"):
        own += ["model.name=sdt", "model.stack_layers=3"]
    if name not in GROWN:
        return own
    way, stages = GROWN[name]
    own += [f"growth.{side}_layers={list(stages)}" for side in ("encoder", "decoder")]
    own += [f"growth.at={[round(part * total) for part in stages.values()]}"]
    return own + ([f"growth.by={way}"] if way else [])


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Run the jobs that have no row yet, one after another; each is a row more."""
    data, total = prepare(arguments.text, arguments.out), arguments.updates or UPDATES

    def cost_of(name: str, updates: int) -> float:
        limit = f"training.max_updates={updates}"
        config = load_config(
            "multi30k_cpu", settings=[*COMMON, *settings_of(name, total, updates), *arguments.settings, limit]
        )
        ends = [*config.growth.at, updates]
        return sum((end - start) * flops_of(config, end) for start, end in zip([0, *ends], ends, strict=False))

    scratch = cost_of("scratch", total)

    def row(name: str, seed: str) -> dict[str, Any]:
        updates = round(total * cost_of("stack", total) / scratch) if name == "scratch_less" else total
        measured = train(name, seed, settings_of(name, total, updates), updates, data, arguments)
        log = entries_of(arguments.out / f"{name}-seed{seed}")
        losses = [[entry["update"], entry["valid/loss"]] for entry in log if "valid/loss" in entry]
        return {**measured, "flops": cost_of(name, updates) / scratch, "losses": losses}

    yield from results(arguments, COLUMNS, row)
