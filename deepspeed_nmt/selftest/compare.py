"""The comparison of engines that `deepspeed-nmt selftest` prints."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt.data.loader import Cursor
from deepspeed_nmt.engine.base import Engine
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.selftest.models import Saved, build, loader_of, methods, train, write_corpus

UPDATES = 10


@dataclass(frozen=True)
class Row:
    """How an engine compares with one plain process in fp32.

    Attributes:
        ranks, tensor_ranks: in all, and of these how many share a model.
        loss, norm, weights: greatest differences; of losses and norms over the updates, of weights at the end.
        resumed: the same of losses after its state was handed to a new engine, against itself undisturbed.
        tolerance: that none of the above may exceed, in relation to the loss's size (weights: absolute).
        seconds: that it took.
        problem: what went wrong, where there are no figures.
    """

    method: str
    engine: str
    ranks: int
    tensor_ranks: int
    tolerance: float
    loss: float = math.nan
    norm: float = math.nan
    weights: float = math.nan
    resumed: float = math.nan
    seconds: float = 0.0
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Whether every difference is small enough; NaN is not."""
        return not self.problem and all(
            value <= self.tolerance for value in (self.loss, self.norm, self.weights, self.resumed)
        )


def engines(world: World, method: str) -> Iterator[tuple[str, int]]:
    """Engines to compare, with how many ranks share a model."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    names = ["plain", "plain+recompute"]
    if has_deepspeed:
        names += ["zero0", "zero1", "zero2+recompute", "zero3", "zero3+recompute", "offload"]
        names += ["zero2:fp16"] if world.device.type == "cuda" else []
        names += ["zero1:bf16", "zero3:bf16+recompute"] if _has_bf16(world) else []
    yield from ((name, 1) for name in names)
    if world.ranks % 2 == 0:
        yield from ((name, 2) for name in ["plain", *(["zero1", "zero3+recompute"] if has_deepspeed else [])])


def rows(world: World, quick: bool = False) -> Iterator[Row]:
    """Compare engine after engine. All ranks iterate together, and get the same rows.

    Args:
        world: all ranks, none of which share a model yet.
        quick: only the quick cases.
    """
    grids = {1: world, **({2: world.regrouped(2)} if world.ranks % 2 == 0 else {})}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_corpus(directory)
        for method in methods(quick):
            alone = World(0, 1, world.local_rank, world.device)
            # The others run with the kernels that are chosen on this machine.
            plain = build(method, "plain", alone, directory, kernels=Kernels.only("torch"))
            reference, weights = _trained(plain, alone, directory)
            for engine, tensor_ranks in engines(world, method):
                yield _compare(method, engine, grids[tensor_ranks], directory, reference, weights)


def _compare(
    method: str, engine: str, world: World, directory: Path, reference: dict[str, Any], weights: dict[str, Any]
) -> Row:
    row = Row(method, engine, world.ranks, world.tensor_ranks, _tolerance(engine, world))
    started = time.monotonic()
    try:
        found, own = _trained(build(method, engine, world, directory), world, directory)
        resumed = _resumed(method, engine, world, directory, found["loss"])
    except (RuntimeError, ValueError) as error:  # of torch and DeepSpeed: it belongs into the table
        return replace(row, problem=f"{type(error).__name__}: {error}".splitlines()[0])
    return replace(
        row,
        loss=_apart(found["loss"], reference["loss"]),
        norm=_apart(found["norm"], reference["norm"]),
        weights=max(float((own[name] - weight).abs().max()) for name, weight in weights.items()),
        resumed=resumed,
        seconds=time.monotonic() - started,
    )


def _trained(engine: Engine, world: World, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What UPDATES updates gave, and the weights after them."""
    report = train(engine, loader_of(directory, world), world, 1, UPDATES, Cursor())
    weights = {state.name: state.weight for state in engine.parameters()}
    engine.close()
    return report, weights


def _resumed(method: str, engine: str, world: World, directory: Path, straight: list[float]) -> float:
    """How far losses are from the undisturbed ones when the state goes to a new engine half-way."""
    loader = loader_of(directory, world)
    half = UPDATES // 2
    first = build(method, engine, world, directory)
    done = train(first, loader, world, 1, half, Cursor())
    saved, scalars = Saved(first.state()), first.scalars()
    first.close()
    second = build(method, engine, world, directory, weights=saved.weights)
    second.restore(saved, scalars)
    rest = train(second, loader, world, half + 1, UPDATES, done["cursor"])
    second.close()
    return _apart(rest["loss"], straight[half:])


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def _tolerance(engine: str, world: World) -> float:
    if ":" in engine:
        return 0.05
    return 1e-5 if world.device.type == "cpu" else 1e-3


def _has_bf16(world: World) -> bool:
    return world.device.type == "cpu" or torch.cuda.get_device_capability(world.device) >= (8, 0)
