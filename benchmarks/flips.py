"""Flip bits of weights, gradients and batches on one of two ranks: what is detected, and to what is it put down?

    python benchmarks/run.py flips [--flips 100] [--seed 1]

Each flip is a bit of one fp32 weight, of one fp32 gradient before it is reduced, or of one token of a batch. Rank 1
has the fault, in one update of a small model on two CPU ranks under plain torch. A flip is detected if it makes the
update's gradient infinite or NaN, or ten times as long (training.norm_spike_factor=10), or the weights of the ranks
differ (training.checksum_every=1). It is attributed rightly if rank 1 is named, alone or as one of the two that
contradict one another; a gradient that is damaged after its loss was computed is put down to the way between devices,
and a token that makes a spike to data.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from records import Results, Table

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import UpdateResult
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import ReportedError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.faults import attribute, check_replicas
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import free_port, random_corpus

V = Vocabulary(60)
KINDS = {
    "weight": "a weight",
    "gradient": "a gradient, before the ranks add theirs",
    "batch": "a token of a batch",
}
FAULTY = 1
FACTOR = 10
"""Times the usual norm of a gradient from which on an update is a spike."""
RIGHT = ("named", "on its way", "data")
"""Ends with the right cause."""


def flip(tensor: torch.Tensor, dice: random.Random) -> int:
    """Flip a random bit of a random element of an fp32 tensor, in place, and return the number of the bit."""
    bit, place = dice.randrange(32), dice.randrange(tensor.numel())
    pattern = torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    tensor.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(pattern)
    return bit


def flip_token(batch: Batch, dice: random.Random) -> tuple[Batch, int]:
    """Return a batch with a bit of a source token flipped that leaves it in the vocabulary, and the bit's number."""
    source = batch.source_BS.clone()
    while True:
        bit, row, place = dice.randrange(6), dice.randrange(source.shape[0]), dice.randrange(source.shape[1])
        changed = int(source[row, place]) ^ (1 << bit)
        if 4 <= changed < 60 and int(source[row, place]) >= 4:
            source[row, place] = changed
            return replace(batch, source_BS=source), bit


def outcome(
    kind: str, seed: int, usual: float, loader: TrainLoader, module: TrainModule, world: World
) -> tuple[str, int]:
    """Make an update, with a flip on the faulty rank, whose norm would be ``usual``.

    Returns how it ended, and the number of the bit.
    """
    dice, bit = random.Random(seed), -1
    engine = PlainEngine(deepcopy(module), AdamConfig(), "fp32", world)
    parameters = list(engine.module.parameters())
    update = next(loader.updates(Cursor(), 1))
    batches = list(update.micro_batches)
    (chosen,) = dice.choices(range(len(parameters)), [parameter.numel() for parameter in parameters])
    if world.rank == FAULTY and kind == "weight":
        with torch.no_grad():
            bit = flip(parameters[chosen].data, dice)
    elif world.rank == FAULTY and kind == "batch":
        batches[0], bit = flip_token(batches[0], dice)
    elif world.rank == FAULTY:
        inner, before = engine._backward, []

        def damaged(batch: Batch, factor: float) -> Any:
            nonlocal bit
            output = inner(batch, factor)
            gradient = parameters[chosen].grad
            if not before and gradient is not None:
                before.append(True)
                bit = flip(gradient, dice)
            return output

        engine._backward = damaged  # type: ignore[method-assign]
    again = lambda rank: next(loader.of_rank(rank).updates(Cursor(), 1)).micro_batches  # noqa: E731
    causes: list[str] = []

    def watch(result: UpdateResult) -> None:
        if not result.skipped and result.grad_norm > FACTOR * usual:
            causes.append(attribute(engine.module, again, result, world, loader.corpora))

    try:
        result = engine.update(batches, update.target_tokens, 1e-3, on_gradient=watch)
        if result.skipped:
            cause = attribute(engine.module, again, result, world, loader.corpora)
            return ("on its way" if "on its way" in cause else f"WRONG: {cause}"), bit
        check_replicas(engine.module, world)
    except ReportedError as error:
        return ("named" if f"rank {FAULTY} on " in error.reason else "WRONG"), bit
    if causes:
        return ("data" if kind == "batch" and "data or arithmetic" in causes[0] else f"WRONG: {causes[0]}"), bit
    return "undetected", bit


def work(rank: int, flips: int, seed: int, port: int, directory: str) -> None:
    """Be a rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    world = World(rank, 2, rank, torch.device("cpu"))
    corpus = random_corpus(Path(directory), 60, 60, 1)
    loader = TrainLoader.of_corpus(corpus, BatchConfig(update_tokens=400, micro_tokens=100), 1, rank, 2, V)
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.1)
    module = TrainModule(build_transformer(config, V), Objective(LabelSmoothed(0.1, V.pad)))
    first = next(loader.updates(Cursor(), 1))
    sound = PlainEngine(deepcopy(module), AdamConfig(), "fp32", world)
    usual = sound.update(first.micro_batches, first.target_tokens, 1e-3).grad_norm
    rows: dict[str, Counter[str]] = {}
    bits: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
    for kind in KINDS:
        rows[kind] = Counter()
        for number in range(flips):
            ended, bit = outcome(kind, hash((seed, list(KINDS).index(kind), number)), usual, loader, module, world)
            rows[kind][ended] += 1
            if ended == "undetected":
                bits[kind][bit] += 1
    if rank == FAULTY:
        content = {kind: {**rows[kind], "undetected by bit": dict(sorted(bits[kind].items()))} for kind in KINDS}
        Path(directory, "flips.json").write_text(json.dumps(content))
    dist.destroy_process_group()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flips", type=int, default=100, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> Results:
    """Run both ranks."""
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(2):
            (Path(directory) / str(rank)).mkdir()
        processes.spawn(_start, (arguments.flips, arguments.seed, free_port(), directory), nprocs=2)
        found = json.loads((Path(directory) / str(FAULTY) / "flips.json").read_text())
    rows = []
    for kind, ends in found.items():
        right, undetected = sum(ends.get(end, 0) for end in RIGHT), ends.get("undetected", 0)
        counts: Counter[str] = Counter()
        for bit, count in ends["undetected by bit"].items():
            counts[part_of(int(bit)) if kind != "batch" else "token"] += count
        row = {"flips of": KINDS[kind], "flips": arguments.flips, "attributed rightly": right}
        row |= {"attributed wrongly": arguments.flips - right - undetected, "undetected": undetected}
        rows.append({**row, "undetected in": ", ".join(f"{part} {count}" for part, count in counts.most_common())})
    return Results(tables={"flips": Table.of(rows)}, rounds=found)


def part_of(bit: int) -> str:
    """Return the part of an fp32 number that has a bit."""
    return "mantissa" if bit < 23 else "exponent" if bit < 31 else "sign"


def _start(rank: int, flips: int, seed: int, port: int, directory: str) -> None:
    work(rank, flips, seed, port, str(Path(directory) / str(rank)))
