"""Losses and gradient norms of 100 updates of every family of methods, in float64, equal the recorded ones to 1e-9.

A change that rounds does not matter here; one that computes something else does. After a change that is meant to,

    python -m tests.golden.test_golden_losses [FAMILY ...]

records new values and says where they part from the old ones. Nothing depends on the CPU: weights, tokens and dropout
masks are hashes, and positions are computed in float64. The engine is the plain one, because DeepSpeed's ZeRO-2
communicates and keeps its weights in fp32; `tests/parity` compares it with the plain one in fp32.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_nmt import parity, randomness
from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.settings import EngineConfig, resolve_engine
from deepspeed_nmt.nn.embedding import POSITIONS
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers.adam import AdamConfig

UPDATES = 100
TOLERANCE = 1e-9
WORLD = World(0, 1, 0, torch.device("cpu"))
SHAPE = {"dim": 32, "ffn_dim": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
SHAPE |= {"attention_dropout": 0.1, "activation_dropout": 0.1}
LOOPS = {"name": "recurrent", **SHAPE, "encoder_loops": 2, "decoder_loops": 2}
BERT = {"layers": 2, "dim": 32, "ffn_dim": 64, "heads": 4, "positions": 32}
BERTS = {"source": BERT, "target": BERT, "dropout": 0.1, "attention_dropout": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "vanilla": {"model": {"name": "transformer", **SHAPE}},
    "depth_growing": {
        "model": {"name": "depth_growing", **SHAPE, "top_encoder_layers": 1, "top_decoder_layers": 1, "norm": "post"}
    },
    "deep_decoder": {
        "model": {"name": "transformer", **SHAPE, "decoder_layers": 4},
        "layer": {"name": "cross_attention_drop", "drop_depth": 1, "drop_ratio": 1.0, "beyond": 0.5},
        "objective": {"ddr": {"weight": 0.7}, "ald": {"weight": 0.5, "every": 2}},
    },
    "abnet": {
        "model": {"name": "abnet", **BERTS, "adapters": "parallel", "adapter_dim": 48, "length_from": "token"},
        "objective": {"masked_tokens": {"replacement": "bert", "source_rate": 0.1}},
        "search": {"name": "mask_predict"},
    },
    "bert_parallel": {"model": {"name": "bert", **BERTS, "fusion_scale": "learned", "freeze": ["embeddings"]}},
    "multi_softmax_all": {
        "model": {"name": "transformer", **SHAPE},
        "objective": {"multi_softmax": {"exits": "all"}},
    },
    "multi_softmax_2x2": {
        "model": {"name": "transformer", **SHAPE, "encoder_layers": 3, "decoder_layers": 3},
        "objective": {"multi_softmax": {"exits": "2x2"}},
    },
    "closed_chain": {"model": {**LOOPS, "sharing": "closed_chain"}, "objective": {"r_drop": {"weight": 1.0}}},
    "recurrent": {"model": {**LOOPS, "sharing": "stacked"}},
    "transparent_attention": {"model": {"name": "transparent_attention", **SHAPE, "encoder_layers": 3}},
    "dlcl": {"model": {"name": "dlcl", **SHAPE}},
    "relative_positions": {"model": {"name": "relative_positions", **SHAPE, "clip_distance": 4}},
    "sdt": {"model": {"name": "sdt", **SHAPE, "encoder_layers": 4, "stack_layers": 2}},
    "coordination": {"model": {"name": "coordination", **SHAPE}},
    "msc": {"model": {"name": "msc", **SHAPE, "encoder_layers": 4}},
    "merged_attention": {
        "model": {"name": "transformer", **SHAPE, "norm": "post"},
        "layer": {"name": "merged_attention"},
    },
    "gnmt": {"model": {"name": "gnmt", "dim": 32, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.1}},
    "convs2s": {
        "model": {
            "name": "convs2s",
            "dim": 32,
            "encoder_convolutions": [[2, 32, 3]],
            "decoder_convolutions": [[1, 32, 3], [1, 48, 3]],
            "dropout": 0.1,
        }
    },
}


def positions(length: int, dim: int, device: torch.device | None = None) -> torch.Tensor:
    """Compute sinusoids in float64: those of fp32 differ from one CPU to another."""
    angles = np.arange(length)[:, None] * 10000.0 ** -(np.arange(dim // 2) / (dim / 2 - 1))
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=1))


def hashed_weights(model: nn.Module) -> None:
    """Set weights to uniform numbers that depend on their names alone; constant vectors stay as they are."""
    for number, (_, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() > 1 or weight.unique().numel() > 1:
            bound = math.sqrt(6.0 / sum(weight.shape))
            unit = (randomness.keys(weight.numel(), 17, number) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            weight.data = torch.from_numpy((2.0 * unit - 1.0) * bound).view(weight.shape)


@contextmanager
def corpus_directory() -> Iterator[Path]:
    """Write a corpus of short sentences, and have positions computed in float64."""
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        parity.write_corpus(Path(scratch), pairs=200, longest=10)
        patch.setitem(POSITIONS, "tensor2tensor", positions)
        yield Path(scratch)


def train(family: str, directory: Path) -> dict[str, list[float]]:
    """Train a family; returns its losses and gradient norms."""
    config = validate({**FAMILIES[family], "training": {"seed": 7}})
    module = TrainModule(build_model(config, parity.VOCABULARY), build_objective(config, parity.VOCABULARY))
    hashed_weights(module.model)
    module.double()
    settings = resolve_engine(EngineConfig(name="plain", device="cpu"), AdamConfig(eps=1e-6, clip_norm=0.5), WORLD)
    dummy = collate(Corpus(directory, "train"), np.empty(0, dtype=np.int64), parity.VOCABULARY)
    engine = build_engine(settings, module, WORLD, dummy)
    loader = parity.loader_of(directory, WORLD, batch=BatchConfig(update_tokens=60, micro_tokens=60))
    values: dict[str, list[float]] = {"losses": [], "norms": []}
    for update in islice(loader.updates(Cursor(), 1), UPDATES):
        result = engine.update(update.micro_batches, update.target_tokens, 3e-3 * min(1.0, update.number / 5))
        values["losses"].append(float(result.sums["loss"]) / update.target_tokens)
        values["norms"].append(result.grad_norm)
    engine.close()
    return values


def recorded(family: str) -> Path:
    """Return the file of a family's values."""
    return Path(__file__).with_name(f"{family}.json")


def first_difference(values: dict[str, list[float]], before: dict[str, list[float]]) -> str:
    """Say where values part from those before by more than the tolerance; "" if nowhere."""
    for update in range(UPDATES):
        for name, numbers in values.items():
            one, other = numbers[update], before[name][update]
            if not abs(one - other) <= TOLERANCE * max(1.0, abs(other)):
                return f"{name} part at update {update + 1}: {other!r} before, {one!r} now"
    return ""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with corpus_directory() as directory:
        yield directory


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_norms_are_the_recorded_ones(family: str, directory: Path) -> None:
    values = train(family, directory)
    assert len(values["losses"]) == UPDATES
    assert sum(values["losses"][-10:]) < sum(values["losses"][:10])
    assert first_difference(values, json.loads(recorded(family).read_text())) == ""


def main() -> None:
    """Record values, and print what changed."""
    with corpus_directory() as directory:
        for family in sys.argv[1:] or FAMILIES:
            values, file = train(family, directory), recorded(family)
            before = json.loads(file.read_text()) if file.is_file() else None
            said = "new" if before is None else first_difference(values, before) or "unchanged"
            sys.stdout.write(f"{family}: {said}\n")
            if before is None or first_difference(values, before):
                file.write_text(json.dumps(values) + "\n")


if __name__ == "__main__":
    main()
