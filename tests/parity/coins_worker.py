"""One of two ranks that train a decoder with coins for each micro-batch, under several engines in turn.

Arguments: corpus directory, output file. The output is JSON: losses and all weights of each engine on two
data-parallel ranks ("2 plain", ...), on a tensor-parallel pair ("2x1 plain", ...), and in one process: with the
micro-batches of the two data-parallel ranks, which keep their numbers ("1"), and with those of one rank ("1x1").
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from deepspeed_nmt import parity as models
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.parity import build, train
from deepspeed_nmt.registry import SelfTest
from tests.support import parity_loader

UPDATES = 4
DATA_PARALLEL = ["plain", "zero3+recompute"]
TENSOR_PARALLEL = ["zero1+recompute"]
CASE = SelfTest(
    "coins",
    {
        "model": {"name": "transformer", **SMALL, "encoder_layers": 1, "decoder_layers": 3},
        "layer": {"name": "cross_attention_drop", "drop_depth": 3, "drop_ratio": 0.5, "coins": "micro_batch"},
        "objective": {"ddr": {"weight": 0.7}},
    },
)


class BothRanks(TrainLoader):
    """The micro-batches of two data-parallel ranks in one process."""

    def __init__(self, loaders: list[TrainLoader]) -> None:
        self.loaders = loaders

    @override
    def updates(self, start: Cursor, number: int) -> Iterator[Update]:
        for first, second in zip(*(each.updates(start, number) for each in self.loaders), strict=True):
            yield replace(first, micro_batches=[*first.micro_batches, *second.micro_batches])


def main() -> None:
    world = join_world("cpu", timeout_s=300)
    directory, out = Path(sys.argv[1]), Path(sys.argv[2])
    models.self_tests = lambda: {CASE.name: CASE}
    report: dict[str, Any] = {}

    def record(name: str, engine_name: str, grid: World, loader: TrainLoader) -> None:
        engine = build(CASE.name, engine_name, grid, directory)
        done = train(engine, loader, grid, 1, UPDATES, Cursor())
        weights = {state.name: state.weight.flatten().tolist() for state in engine.parameters()}
        report[name] = {"loss": done["loss"], "counts": done["counts"], "weights": weights}
        engine.close()

    pair = world.regrouped(2)
    for name in DATA_PARALLEL:
        record(f"2 {name}", name, world, parity_loader(directory, world))
    for name in TENSOR_PARALLEL:
        record(f"2x1 {name}", name, pair, parity_loader(directory, pair))
    if world.is_main:
        alone = World(0, 1, 0, world.device)
        ranks = [World(rank, 2, rank, world.device) for rank in range(2)]
        record("1", "plain", alone, BothRanks([parity_loader(directory, rank) for rank in ranks]))
        record("1x1", "plain", alone, parity_loader(directory, alone))
        out.write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main()
