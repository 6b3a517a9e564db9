"""Comparison of engines and layouts on this machine, with small models of every method, which also serve the tests.

All engines do the same arithmetic: losses, gradient norms and weights of any two differ by rounding only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.data.loader import TrainLoader, collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.contract import Engine, EngineScalars, ParameterState
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.engine.settings import EngineConfig, load_ds_config, resolve_engine
from deepspeed_nmt.errors import ConfigError, did_you_mean, first_line, shown
from deepspeed_nmt.kernels.choice import DEFAULT, Kernels
from deepspeed_nmt.kernels.precision import capability_of, has_bf16
from deepspeed_nmt.methods import self_tests
from deepspeed_nmt.parallel.collectives import sum_over_data_ranks
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers import OPTIMIZERS

VOCABULARY = Vocabulary(61)
"""Vocabulary of an odd size, so that two ranks that share a model hold unequal slices."""
UPDATES = 6
"""Number of updates that each engine makes when engines are compared; its state is handed over after half of them."""
_SMALL = BatchConfig(update_tokens=360, micro_tokens=130)
"""Batches of this comparison; two ranks have two micro-batches of an update."""
_EVERY = 5
"""Number of methods under which each engine is compared once, if several methods are."""
BATCH = BatchConfig(update_tokens=700, micro_tokens=260)
_CLIP_NORM, _WEIGHT_DECAY = 0.5, 0.1


def methods(quick: bool = False, only: str | None = None) -> list[str]:
    """Return the names of all cases, of the quick ones, or of those of a method or of a case that ``only`` names."""
    cases = self_tests()
    if only is None:
        return [name for name, case in cases.items() if case.quick or not quick]
    known: dict[str, list[str]] = {}
    for name, case in cases.items():
        parts = {part["name"] for part in case.settings.values() if "name" in part}
        for word in {name, *parts, *case.settings.get("objective", ())}:
            known.setdefault(word, []).append(name)
    if only not in known:
        raise ConfigError(f"--only is {shown(only)}, which `selftest` does not know{did_you_mean(only, known)}")
    return known[only]


def settings_of(method: str, dropout: float = 0.0) -> RunConfig:
    """Return the settings of a case, with a dropout probability of the model if it has such a setting."""
    config = validate({**self_tests()[method].settings, "training": {"seed": 7}})
    if "dropout" not in type(config.model).model_fields:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dropout": dropout})})


class Saved:
    """State of an engine in memory; a :class:`deepspeed_nmt.engine.contract.SavedState`."""

    def __init__(self, states: Iterable[ParameterState]) -> None:
        self._states = {state.name: state for state in states}
        self.weights = {name: state.weight for name, state in self._states.items()}

    def weight(self, name: str) -> Tensor:
        """Return the weight of a parameter."""
        return self.weights[name]

    def optimizer_state(self, name: str, which: str) -> Tensor:
        """Return one of the optimizer's states of a parameter."""
        return self._states[name].states[which]


def write_corpus(directory: Path, pairs: int = 300, longest: int = 30) -> None:
    """Write a training corpus of random tokens, of at most ``longest`` in a sentence, the same on every machine.

    Two of three pairs have word alignments, which link three of four target tokens, to one or two source tokens.
    """

    def tokens(count: int, *parts: int) -> list[int]:
        low = VOCABULARY.unk + 1
        return [low + int(key) % (VOCABULARY.size - low) for key in randomness.keys(count, *parts)]

    lengths = 1 + (randomness.keys(pairs, 1) % np.uint64(longest - 4)).astype(int)
    sources = [tokens(length, 2, pair) for pair, length in enumerate(lengths)]
    targets = [tokens(length + pair % 3, 3, pair) for pair, length in enumerate(lengths)]
    links = [
        [n for t in range(len(target)) if t % 4 for k in range(1 + t % 2) for n in ((5 * t + k) % len(source), t)]
        if pair % 3
        else []
        for pair, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    with CorpusWriter(directory, "train", VOCABULARY.size, positions=longest) as writer:
        writer.append(sources, targets, links=links)


def loader_of(directory: Path, world: World, engine: str = "plain", batch: BatchConfig = BATCH) -> TrainLoader:
    """Return a loader of this rank's micro-batches, over a corpus, for an engine that :func:`build` makes."""
    batch = batch.model_copy(update={"layout": "packed" if "packed" in engine.split("+") else "padded"})
    return TrainLoader.of_corpus(Corpus(directory, "train"), batch, 5, world.data_rank, world.data_ranks, VOCABULARY)


def build(
    method: str,
    engine: str,
    world: World,
    directory: Path,
    dropout: float = 0.0,
    weights: dict[str, Tensor] | None = None,
    kernels: Kernels = DEFAULT,
) -> Engine:
    """Build an engine over a model of a case, whose initial weights are the same in every layout.

    Args:
        engine: NAME[:PRECISION][+recompute][+compile][+packed][+OPTIMIZER], with NAME one of plain, zero0 ... zero3,
            and offload (ZeRO-3 with weights and optimizer state in the host's memory), and Adam as the default of
            OPTIMIZER. The layout of batches is the loader's.
        directory: of the corpus; each rank writes its DeepSpeed configuration there.
        weights: initial weights by parameter name; None for random ones.
    """
    config = settings_of(method, dropout)
    module = TrainModule(build_model(config, VOCABULARY, kernels), build_objective(config, VOCABULARY))
    kind, *options = engine.split("+")
    name, _, precision = kind.partition(":")
    if "compile" in options:
        module.model.compile_layers()
    if "recompute" in options:
        module.model.recompute(1, 1)
    if weights is not None:
        module.model.load_state_dict(weights, strict=False)
    parallelize(module.model, world)
    # With an epsilon below rounding errors, Adam turns the sign of a gradient that is zero up to rounding into a full
    # step, so some weights would depend on the CPU. 1e-6 is above rounding errors.
    module.to(world.device)
    chosen = OPTIMIZERS[next((option for option in options if option in OPTIMIZERS), OPTIMIZERS.default)].config
    eps = {"eps": 1e-6} if "eps" in chosen.model_fields else {}
    decay = {"weight_decay": _WEIGHT_DECAY}  # makes two groups of parameters
    optimizer = chosen.model_validate({"clip_norm": _CLIP_NORM, **decay, **eps})
    assert isinstance(optimizer, OptimizerConfig)
    settings: dict[str, Any] = {"name": "plain", "precision": precision or "fp32", "device": world.device.type}
    if name != "plain":
        file = directory / f"rank{world.rank}.json"
        content: dict[str, Any] = {"zero_optimization": {"stage": 0 if name == "offload" else int(name[-1])}}
        if name == "offload":
            content = load_ds_config("zero3_offload")
        # Otherwise ZeRO-3 does not shard parameters as small as these.
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        # By default DeepSpeed takes 2 GB for each buffer, whatever the model.
        sizes = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
        content["zero_optimization"] |= dict.fromkeys(sizes, 1_000_000)
        if precision == "fp16":
            content["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        file.write_text(json.dumps(content))
        settings |= {"name": "deepspeed", "ds_config": str(file)}
    resolved = resolve_engine(EngineConfig(**settings), optimizer, world)
    dummy = collate(Corpus(directory, "train"), np.empty(0, dtype=np.int64), VOCABULARY)
    return build_engine(resolved, module, world, dummy)


def train(engine: Engine, loader: TrainLoader, world: World, first: int, last: int, cursor: Cursor) -> dict[str, Any]:
    """Make the updates ``first`` to ``last`` from a position in the data.

    Returns:
        Lists with an entry for each update: "loss" (per target token), "norm" (of the gradient), "counts"
        (micro-batches of a rank), "skipped", "metrics" (further sums per target token); and of the last update
        "cursor", the position after it, and "gradient" and "change", sums of squares by parameter.
    """
    lists: dict[str, Any] = {name: [] for name in ("loss", "norm", "counts", "skipped", "metrics")}
    for update in loader.updates(cursor, first):
        lr, ends = 3e-3 * min(1.0, update.number / 5), update.number == last
        result = engine.update(update.micro_batches, update.target_tokens, lr, measure=ends)
        total = sum_over_data_ranks({name: float(value) for name, value in result.sums.items()}, world)
        means = {name: value / update.target_tokens for name, value in total.items() if name != "nll"}
        values = means.pop("loss"), result.grad_norm, len(update.micro_batches), result.skipped, means
        for name, value in zip(lists, values, strict=True):
            lists[name].append(value)
        cursor = update.after
        if ends:
            break
    squares = result.squares or Squares({}, {})
    return {**lists, "cursor": cursor, "gradient": squares.gradient, "change": squares.change}


@dataclass(frozen=True)
class Row:
    """Largest differences of an engine from one plain process in fp32, or the error that prevented the comparison.

    Losses and gradient norms are those of all updates, relative for values above 1, weights the last ones, absolute;
    ``resumed`` compares losses after a resume with those of the same engine without one.
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
        differences = (self.loss, self.norm, self.weights, self.resumed)
        return not self.problem and all(value <= self.tolerance for value in differences)


def engines(world: World, method: str) -> Iterator[tuple[str, int]]:
    """Yield the engines to compare, each with the number of ranks that share a model."""
    on_gpu, has_bf16_here = world.device.type == "cuda", has_bf16(capability_of(world.device))
    packed = "+packed" if settings_of(method).model.packed else ""
    names, shared = ["plain", "plain+recompute"], ["plain"]
    names += ["plain+packed"] if packed else []
    # On a GPU packed sentences attend by another kernel in 16 bit than in fp32.
    packed_bf16 = bool(packed) and on_gpu and has_bf16_here
    names += ["plain:bf16+packed"] if packed_bf16 else []
    if importlib.util.find_spec("deepspeed") is not None:
        names += ["zero0", "zero1", "zero2+recompute", "zero3", f"zero3+recompute{packed}", "offload"]
        names += ["zero2:fp16"] if on_gpu else []
        names += ["zero1:bf16", "zero3:bf16+recompute"] if has_bf16_here else []
        names += ["zero1:bf16+packed"] if packed_bf16 else []
        shared += [f"zero1{packed}", "zero3+recompute"]
    yield from ((name, 1) for name in names)
    if world.ranks % 2 == 0 and settings_of(method).model.sliceable:
        yield from ((name, 2) for name in shared)


def rows(world: World, cases: Sequence[str]) -> Iterator[Row]:
    """Yield the comparison of each case and engine. All ranks get the same rows together.

    A case that is quick, or the only one, is compared under every engine. Others take turns with the engines.
    """
    grids = {1: world, **({2: world.regrouped(2)} if world.ranks % 2 == 0 else {})}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_corpus(directory)
        for number, method in enumerate(cases):
            alone = World(0, 1, world.local_rank, world.device)
            # The reference runs on torch's own operations, the others on the kernels chosen for this machine.
            plain = build(method, "plain", alone, directory, kernels=Kernels.only("torch"))
            reference, weights, _ = _trained(plain, loader_of(directory, alone, batch=_SMALL), alone)
            chosen = list(engines(world, method))
            if len(cases) > 1 and not self_tests()[method].quick:
                chosen = chosen[number % _EVERY :: _EVERY]
            for engine, tensor_ranks in chosen:
                yield _compare(method, engine, grids[tensor_ranks], directory, reference, weights)


_BURNER = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Program that computes until its parent ends."""


@contextmanager
def busy(world: World) -> Iterator[None]:
    """Keep every core of this host busy and fill new memory with NaN during the block.

    Then races show, and computations that depend on what memory held before.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # which fills memory, too
    count = (os.cpu_count() or 1) if world.local_rank == 0 else 0
    burners = [subprocess.Popen([sys.executable, "-S", "-c", _BURNER]) for _ in range(count)]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        for burner in burners:
            burner.kill()
            burner.wait()


def _compare(
    method: str, engine: str, world: World, directory: Path, reference: dict[str, Any], weights: dict[str, Any]
) -> Row:
    tolerance = 0.05 if ":" in engine else 1e-5 if world.device.type == "cpu" else 1e-3
    row = Row(method, engine, world.ranks, world.tensor_ranks, tolerance)
    started = time.monotonic()
    try:
        loader = loader_of(directory, world, engine, _SMALL)
        report, own, (saved, scalars, cursor) = _trained(build(method, engine, world, directory), loader, world)
        second = build(method, engine, world, directory, weights=saved.weights)
        second.restore(saved, scalars)
        rest = train(second, loader, world, UPDATES // 2 + 1, UPDATES, cursor)
        second.close()
    except (RuntimeError, ValueError) as error:  # errors of torch and DeepSpeed are reported in the table
        return replace(row, problem=first_line(error))
    return replace(
        row,
        loss=_difference(report["loss"], reference["loss"]),
        norm=_difference(report["norm"], reference["norm"]),
        weights=_largest(float((own[name] - weight).abs().max()) for name, weight in weights.items()),
        resumed=_difference(rest["loss"], report["loss"][UPDATES // 2 :]),
        seconds=time.monotonic() - started,
    )


def _trained(
    engine: Engine, loader: TrainLoader, world: World
) -> tuple[dict[str, Any], dict[str, Any], tuple[Saved, EngineScalars, Cursor]]:
    """Train, and return losses and norms, the last weights, and state and position half-way; close the engine."""
    first = train(engine, loader, world, 1, UPDATES // 2, Cursor())
    half = Saved(engine.state()), engine.scalars(), first["cursor"]
    second = train(engine, loader, world, UPDATES // 2 + 1, UPDATES, first["cursor"])
    weights = {state.name: state.weight.cpu() for state in engine.parameters()}
    engine.close()
    return {name: first[name] + second[name] for name in ("loss", "norm")}, weights, half


def _difference(ours: list[float], theirs: list[float]) -> float:
    return _largest(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True))


def _largest(differences: Iterable[float]) -> float:
    """Return the maximum, NaN if one is NaN, which `max` would leave out."""
    return float(np.max(list(differences)))
