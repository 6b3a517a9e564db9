"""Two ranks on one GPU: collectives of CUDA tensors, and training that must equal that of one rank.

NCCL refuses two ranks on one GPU, so these communicate by gloo, through the host: the figures say nothing of speed. A
collective that gloo lacks for CUDA tensors is a row that fails, and so is an engine that needs it.

    python benchmarks/gpu/ranks.py RANK DIRECTORY cuda|cpu NAME...     one of the two ranks, which run.py starts
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, Values
from torch import Tensor

from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.parallel.hardware import prepare_gpu
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import build, loader_of, train, write_corpus

RANKS, UPDATES, METHOD = 2, 4, "vanilla"
ENGINES = ("plain", "plain+packed", "zero1", "zero2", "zero3", "offload")
ON_GPU = ("plain:bf16+packed", "zero2:bf16")
REHEARSED = ("plain", "zero1")
TOLERANCE, TOLERANCE_16_BIT = 1e-3, 5e-2
TIMEOUT_S = 120


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x


def all_gather(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def reduce_scatter(x: Tensor) -> Tensor:
    part = x.new_empty(x.numel() // RANKS)
    dist.reduce_scatter_tensor(part, x)
    return part


def barrier(x: Tensor) -> Tensor:
    dist.barrier()
    return x


COLLECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "all_reduce": (all_reduce, lambda ones, rank: 3 * ones),
    "broadcast": (broadcast, lambda ones, rank: 2 * ones),
    "all_gather": (all_gather, lambda ones, rank: torch.cat([ones, 2 * ones])),
    "reduce_scatter": (reduce_scatter, lambda ones, rank: 3 * ones[: ones.numel() // RANKS]),
    "barrier": (barrier, lambda ones, rank: (1 + rank) * ones),
}
"""Collectives, and their results if rank r has the numbers r + 1."""


def collective(name: str, world: World, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Carry out a collective of a million numbers, and check its result."""
    run, expected = COLLECTIVES[name]
    ones = torch.ones(2**20, dtype=dtype, device=world.device)
    begun = time.perf_counter()
    result = run((1 + world.rank) * ones)
    spent = time.perf_counter() - begun
    if not torch.equal(result, expected(ones, world.rank)):
        raise ValueError("the result is wrong")
    return {"ms": 1e3 * spent}


def engine(name: str, world: World, directory: Path) -> dict[str, Any]:
    """Train with an engine on both ranks, and compare the losses with those of one rank."""

    def losses(name: str, world: World) -> list[float]:
        made = build(METHOD, name, world, directory)
        result = train(made, loader_of(directory, world, name), world, 1, UPDATES, Cursor())["loss"]
        made.close()
        return list(map(float, result))

    alone = losses("plain", World(0, 1, 0, world.device))
    together = losses(name, world)
    difference = float(
        torch.tensor([abs(a - b) / max(1.0, abs(b)) for a, b in zip(together, alone, strict=True)]).max()
    )
    if not difference <= (TOLERANCE_16_BIT if ":" in name else TOLERANCE):
        raise ValueError(f"losses differ by {difference:.2g} from those of one rank")
    return {"difference": difference}


def work(rank: int, directory: Path, device: torch.device, names: list[str]) -> None:
    """Carry out what the names say, as one of the ranks; rank 0 writes a line for each."""
    if device.type == "cuda":
        prepare_gpu(device)
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", store, timedelta(seconds=TIMEOUT_S), world_size=RANKS, rank=rank)
    world = World(rank, RANKS, 0, device)
    for name in names:
        try:
            found = collective(name, world) if name in COLLECTIVES else engine(name, world, directory)
        except Exception as error:  # the others are still wanted
            found = {"problem": f"{type(error).__name__}: {error}".splitlines()[0]}
        if rank == 0:
            with (directory / "results").open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, found]) + "\n")
    dist.destroy_process_group()


def start(bench: Bench, directory: Path, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run both ranks to their end or to the limit, and yield what they found, by name."""
    write_corpus(directory)
    command = [sys.executable, str(Path(__file__).resolve())]
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which DeepSpeed wants to see, and does not use
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(directory), bench.device.type, *names],
            env={**os.environ, **port, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0"},
        )
        for rank in range(RANKS)
    ]
    ends = []
    for process in processes:
        try:
            ends.append(f"status {process.wait(max(1.0, bench.seconds_left))}")
        except subprocess.TimeoutExpired:
            process.kill()
            ends.append("a kill when the time was over")
    results = directory / "results"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    yield from map(json.loads, lines)
    for name in names[len(lines) :]:
        yield name, {"problem": f"no result: the ranks ended with {' and '.join(ends)}"}


def run(bench: Bench) -> None:
    """Measure collectives and engines."""
    engines = REHEARSED if bench.tiny else (*ENGINES, *(ON_GPU if bench.half == "bf16" else ()))
    named = [*COLLECTIVES, *engines]
    kinds = {name: "collective" if name in COLLECTIVES else "engine" for name in named}
    wanted = [name for name in named if bench.wants(what=kinds[name], of=name)]
    with TemporaryDirectory() as scratch:
        for name, found in start(bench, Path(scratch), wanted) if wanted else ():

            def one(found: dict[str, Any] = found) -> Values:
                if "problem" in found:
                    raise RuntimeError(found["problem"])
                return found

            bench.measure(one, in_any_case=True, what=kinds[name], of=name)


if __name__ == "__main__":
    place, where, kind, *chosen = sys.argv[1:]
    work(int(place), Path(where), torch.device(kind, 0) if kind == "cuda" else torch.device(kind), chosen)
