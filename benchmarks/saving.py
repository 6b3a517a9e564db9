"""Time that training waits for a checkpoint, blocking and in the background, and what writing costs the updates.

    python benchmarks/run.py saving [--out DIR] [--device cpu|cuda] [--layers 6] [--rounds 5] [--tokens 128]

A Transformer of the size of transformer_base (60.5M parameters at a vocabulary of 32,000) makes updates of random
batches in plain torch. Checkpoints are saved in both ways in turns, so that other work on the machine affects both
alike; medians over the rounds. An update is timed without a checkpoint and while one is written.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from records import Results, Table
from timing import add_sizes, random_batch, ratio, seconds_of, shape_of

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.contract import checkpoint_bytes
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import build_transformer
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.configuration import Save, TrainingConfig
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.saving import Saver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, layers=6, tokens=128, vocab=32000, rounds=5)
    parser.add_argument("--out", type=Path, help="directory on the disk to measure (default: temporary files)")


def run(arguments: argparse.Namespace) -> Results:
    """Measure both ways."""
    device = torch.device(arguments.device)
    world = World(0, 1, 0, device)
    vocabulary = Vocabulary(arguments.vocab)
    torch.manual_seed(1)
    module = TrainModule(
        build_transformer(shape_of(arguments), vocabulary), Objective(LabelSmoothed(0.1, vocabulary.pad), [])
    )
    count = sum(parameter.numel() for parameter in module.parameters())
    precision = "bf16" if device.type == "cuda" else "fp32"
    engine = PlainEngine(module, AdamConfig(clip_norm=0.0), precision, world)
    batch = random_batch(arguments, 1)

    def update() -> float:
        return seconds_of(lambda: engine.update([batch], batch.target_tokens, 1e-4), device)

    update()
    size = checkpoint_bytes(count, 0, len(AdamConfig.states) * count)
    waited: dict[Save, list[float]] = {"blocking": [], "background": []}
    written: list[float] = []
    quiet: list[float] = []
    meanwhile: list[float] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.out))
        savers = {
            save: stack.enter_context(
                Saver(
                    CheckpointStore(Path(scratch) / save, keep_last=1, keep_best=False),
                    engine,
                    world,
                    Watchdog(world, 0.0, 1.0, 1.0),
                    TrainingConfig(save=save),
                    size,
                    0,
                )
            )
            for save in waited
        }
        for number in range(1, arguments.rounds + 1):
            for save, saver in savers.items():
                quiet += [update() for _ in range(3)]
                started = time.perf_counter()
                saver.save(Progress(update=number), must=False)
                waited[save].append(time.perf_counter() - started)
                while any(thread.name == "checkpoint" for thread in threading.enumerate()):
                    meanwhile.append(update())
                saver.finish()
                if save == "background":
                    written.append(time.perf_counter() - started)
    rounds = {**waited, "written": written, "update": quiet, "update meanwhile": meanwhile}
    middle = {name: statistics.median(seconds) if seconds else None for name, seconds in rounds.items()}
    waiting = [{"`training.save`": f"`{save}`", "training waits": middle[save]} for save in waited]
    writing = {
        "parameters": count,
        "checkpoint, MiB": size / 2**20,
        "written in the background in": middle["written"],
        "blocking / background": ratio(waited["blocking"], waited["background"]),
        "an update meanwhile": middle["update meanwhile"] and middle["update meanwhile"] / middle["update"],
    }
    formats = {"parameters": "{:,}", "checkpoint, MiB": "{:.0f}", "written in the background in": "{:.1f} s"}
    formats |= {"blocking / background": "{:.1f}", "an update meanwhile": "{:.2f} times as long"}
    tables = {"waiting": Table.of(waiting, {"training waits": "{:.2f} s"}), "writing": Table.of([writing], formats)}
    return Results(tables=tables, rounds=rounds)
