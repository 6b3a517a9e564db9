"""Small models of every method, trained for a few updates under any engine, for `selftest` and the tests.

All engines do the same arithmetic: losses, gradient norms and weights of any two differ by rounding only. Each method
provides its own case (:class:`deepspeed_nmt.registry.SelfTest`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
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
from deepspeed_nmt.engine.base import Engine, ParameterState
from deepspeed_nmt.engine.config import EngineConfig
from deepspeed_nmt.engine.ds_config import load_ds_config
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.engine.settings import resolve_engine
from deepspeed_nmt.kernels.choice import DEFAULT, Kernels
from deepspeed_nmt.methods import self_tests
from deepspeed_nmt.parallel.collectives import sum_over_data_ranks
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World

VOCABULARY = Vocabulary(61)
"""Vocabulary of an odd size, so that two ranks that share a model hold unequal slices."""
BATCH = BatchConfig(update_tokens=700, micro_tokens=260)
_CLIP_NORM = 0.5
_SUMS = ("loss", "nll")
"""Sums that every objective has."""


def methods(quick: bool = False) -> list[str]:
    """Return the names of all cases, or of the quick ones."""
    return [name for name, case in self_tests().items() if case.quick or not quick]


def settings_of(method: str, dropout: float = 0.0) -> RunConfig:
    """Return the settings of a case.

    Args:
        method: name of the case.
        dropout: dropout probability of the model, if it has such a setting.
    """
    config = validate({**self_tests()[method].settings, "training": {"seed": 7}})
    if "dropout" not in type(config.model).model_fields:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"dropout": dropout})})


class Saved:
    """State of an engine in memory, a :class:`deepspeed_nmt.engine.base.SavedState`.

    Args:
        states: of all parameters.

    Attributes:
        weights: unsharded weights by parameter name.
    """

    def __init__(self, states: Iterable[ParameterState]) -> None:
        self._states = {state.name: state for state in states}
        self.weights = {name: state.weight for name, state in self._states.items()}

    def weight(self, name: str) -> Tensor:
        """Return the weight of a parameter."""
        return self.weights[name]

    def moment(self, name: str, which: str) -> Tensor:
        """Return one of Adam's moments of a parameter."""
        return self._states[name].moments[which]


def write_corpus(directory: Path, pairs: int = 300, longest: int = 30) -> None:
    """Write a training corpus of random tokens, the same on every machine.

    Args:
        directory: to write into.
        pairs: number of sentence pairs.
        longest: bound on the length of a sentence.
    """

    def tokens(count: int, *parts: int) -> list[int]:
        low = VOCABULARY.unk + 1
        return [low + int(each) % (VOCABULARY.size - low) for each in randomness.keys(count, *parts)]

    lengths = 1 + (randomness.keys(pairs, 1) % np.uint64(longest - 4)).astype(int)
    sources = [tokens(length, 2, pair) for pair, length in enumerate(lengths)]
    targets = [tokens(length + pair % 3, 3, pair) for pair, length in enumerate(lengths)]
    with CorpusWriter(directory, "train", VOCABULARY.size) as writer:
        writer.append(sources, targets)


def loader_of(directory: Path, world: World, engine: str = "plain", batch: BatchConfig = BATCH) -> TrainLoader:
    """Return a loader of this rank's micro-batches, over the corpus in ``directory``.

    Args:
        directory: directory of the corpus.
        world: the ranks.
        engine: name of the engine, as :func:`build` takes it.
        batch: sizes of batches.
    """
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
    """Build an engine over a model whose initial weights are the same in every layout.

    Args:
        method: name of a case.
        engine: NAME[:PRECISION][+recompute][+compile][+packed], with NAME one of plain, zero0 ... zero3, and offload
            (ZeRO-3 with weights and optimizer state in the host's memory). The layout of batches is the loader's.
        world: the ranks, of which ``tensor_ranks`` share a model.
        directory: directory of the corpus; each rank writes its DeepSpeed configuration there.
        dropout: dropout probability of the model.
        weights: initial weights by parameter name; None for random ones.
        kernels: of the model's fused operations.
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
    trainable = [p for p in module.to(world.device).parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.0, betas=(0.9, 0.98), eps=1e-6)
    settings: dict[str, Any] = {"name": "plain", "precision": precision or "fp32", "device": world.device.type}
    if name != "plain":
        file = directory / f"rank{world.rank}.json"
        content: dict[str, Any] = {"zero_optimization": {"stage": 0 if name == "offload" else int(name[-1])}}
        if name == "offload":
            content = load_ds_config("zero3_offload")
        # Otherwise ZeRO-3 does not shard parameters as small as these.
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if precision == "fp16":
            content["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        file.write_text(json.dumps(content))
        settings |= {"name": "deepspeed", "ds_config": str(file)}
    resolved = resolve_engine(EngineConfig(**settings), _CLIP_NORM, world)
    dummy = collate(Corpus(directory, "train"), np.empty(0, dtype=np.int64), VOCABULARY)
    return build_engine(resolved, module, optimizer, world, dummy)


def train(engine: Engine, loader: TrainLoader, world: World, first: int, last: int, cursor: Cursor) -> dict[str, Any]:
    """Make some updates from a position in the data.

    Args:
        engine: to train.
        loader: of this rank.
        world: the ranks.
        first: number of the first update.
        last: number of the last update.
        cursor: position in the data of the first update.

    Returns:
        Lists with an entry for each update: "loss" (per target token), "norm" (of the gradient), "counts"
        (micro-batches of a rank), "skipped", "metrics" (further sums per target token); and of the last update
        "cursor", the position after it, and "gradient" and "change", sums of squares by parameter.
    """
    losses, norms, counts, skipped, metrics = [], [], [], [], []
    for update in loader.updates(cursor, first):
        lr, ends = 3e-3 * min(1.0, update.number / 5), update.number == last
        result = engine.update(update.micro_batches, update.target_tokens, lr, measure=ends)
        total = sum_over_data_ranks({name: float(value) for name, value in result.sums.items()}, world)
        metrics.append({name: value / update.target_tokens for name, value in total.items() if name not in _SUMS})
        losses.append(total["loss"] / update.target_tokens)
        norms.append(result.grad_norm)
        counts.append(len(update.micro_batches))
        skipped.append(result.skipped)
        cursor = update.after
        if ends:
            break
    lists = {"loss": losses, "norm": norms, "counts": counts, "skipped": skipped, "metrics": metrics}
    squares = result.squares or Squares({}, {})
    return {**lists, "cursor": cursor, "gradient": squares.gradient, "change": squares.change}
