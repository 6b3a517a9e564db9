"""Comparison of every engine and layout with one plain process, as `deepspeed-nmt selftest` prints it."""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.base import Engine
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import capability_of, has_bf16
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.selftest.models import (
    Saved,
    build,
    loader_of,
    methods,
    settings_of,
    train,
    write_corpus,
)

UPDATES = 10
"""Number of updates that each engine makes."""


@dataclass(frozen=True)
class Row:
    """Comparison of an engine with one plain process in fp32.

    Differences of losses and gradient norms are relative for values above 1, those of weights absolute.

    Attributes:
        method: name of the method's case.
        engine: name of the engine, as :func:`deepspeed_nmt.selftest.models.build` takes it.
        ranks: number of ranks.
        tensor_ranks: number of ranks that share a model.
        tolerance: upper bound on each difference.
        loss: largest difference of the losses of all updates.
        norm: largest difference of the gradient norms of all updates.
        weights: largest difference of the weights after the last update.
        resumed: largest difference of the losses after a resume from those of the same engine without one.
        seconds: duration of the comparison.
        problem: message of the error that prevented the comparison, or "".
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
        """True if no difference exceeds the tolerance; False for NaN."""
        return not self.problem and all(
            value <= self.tolerance for value in (self.loss, self.norm, self.weights, self.resumed)
        )


def engines(world: World, method: str) -> Iterator[tuple[str, int]]:
    """Yield the engines to compare, each with the number of ranks that share a model."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    packed = "+packed" if settings_of(method).model.packed else ""
    names = ["plain", "plain+recompute", *([f"plain{packed}"] if packed else [])]
    # On a GPU packed sentences attend by another kernel in 16 bit than in fp32.
    packed_bf16 = bool(packed) and world.device.type == "cuda" and _has_bf16(world)
    names += ["plain:bf16+packed"] if packed_bf16 else []
    if has_deepspeed:
        names += ["zero0", "zero1", "zero2+recompute", "zero3", f"zero3+recompute{packed}", "offload"]
        names += ["zero2:fp16"] if world.device.type == "cuda" else []
        names += ["zero1:bf16", "zero3:bf16+recompute"] if _has_bf16(world) else []
        names += ["zero1:bf16+packed"] if packed_bf16 else []
    yield from ((name, 1) for name in names)
    if world.ranks % 2 == 0:
        names = ["plain", *([f"zero1{packed}", "zero3+recompute"] if has_deepspeed else [])]
        yield from ((name, 2) for name in names)


def rows(world: World, quick: bool = False) -> Iterator[Row]:
    """Yield the comparison of each method and engine. All ranks iterate together and get the same rows.

    Args:
        world: all ranks, without tensor parallelism.
        quick: True for the quick cases only.
    """
    grids = {1: world, **({2: world.regrouped(2)} if world.ranks % 2 == 0 else {})}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_corpus(directory)
        for method in methods(quick):
            alone = World(0, 1, world.local_rank, world.device)
            # The reference runs on torch's own operations, the others on the kernels chosen for this machine.
            plain = build(method, "plain", alone, directory, kernels=Kernels.only("torch"))
            reference, weights = _trained(plain, loader_of(directory, alone), alone)
            for engine, tensor_ranks in engines(world, method):
                yield _compare(method, engine, grids[tensor_ranks], directory, reference, weights)


def _compare(
    method: str, engine: str, world: World, directory: Path, reference: dict[str, Any], weights: dict[str, Any]
) -> Row:
    row = Row(method, engine, world.ranks, world.tensor_ranks, _tolerance(engine, world))
    started = time.monotonic()
    try:
        loader = loader_of(directory, world, engine)
        found, own = _trained(build(method, engine, world, directory), loader, world)
        resumed = _resumed(method, engine, world, directory, found["loss"])
    except (RuntimeError, ValueError) as error:  # errors of torch and DeepSpeed are reported in the table
        return replace(row, problem=f"{type(error).__name__}: {error}".splitlines()[0])
    return replace(
        row,
        loss=_difference(found["loss"], reference["loss"]),
        norm=_difference(found["norm"], reference["norm"]),
        weights=max(float((own[name] - weight).abs().max()) for name, weight in weights.items()),
        resumed=resumed,
        seconds=time.monotonic() - started,
    )


def _trained(engine: Engine, loader: TrainLoader, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make UPDATES updates, and return their report and the final weights."""
    report = train(engine, loader, world, 1, UPDATES, Cursor())
    weights = {state.name: state.weight.cpu() for state in engine.parameters()}
    engine.close()
    return report, weights


def _resumed(method: str, engine: str, world: World, directory: Path, straight: list[float]) -> float:
    """Resume half-way in a new engine, and return the largest difference of the losses from ``straight``."""
    loader = loader_of(directory, world, engine)
    half = UPDATES // 2
    first = build(method, engine, world, directory)
    done = train(first, loader, world, 1, half, Cursor())
    saved, scalars = Saved(first.state()), first.scalars()
    first.close()
    second = build(method, engine, world, directory, weights=saved.weights)
    second.restore(saved, scalars)
    rest = train(second, loader, world, half + 1, UPDATES, done["cursor"])
    second.close()
    return _difference(rest["loss"], straight[half:])


def _difference(ours: list[float], theirs: list[float]) -> float:
    """Return max_i |a_i - b_i| / max(1, |b_i|)."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def _tolerance(engine: str, world: World) -> float:
    if ":" in engine:
        return 0.05
    return 1e-5 if world.device.type == "cpu" else 1e-3


def _has_bf16(world: World) -> bool:
    return has_bf16(capability_of(world.device))
