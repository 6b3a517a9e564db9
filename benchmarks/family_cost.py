"""Cost of a forward and a backward pass of each family of models, relative to the plain Transformer of equal depth.

    python benchmarks/run.py family_cost [--dim 512] [--layers 6] [--tokens 4096] [--vocab 32000]

All families have the same width, depth on each side (applications of layers, LSTMs or convolutions), dropout and
objective, and process the same random batches in turns. Their parameters differ, and are a column. --layers is even.
On a CPU, seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from records import Results
from timing import add_sizes, both_passes, half_on_gpu, in_turns, random_batch, relative, shape_of

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary

DROPOUT = 0.1


def families(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of each family."""
    dim, layers = arguments.dim, arguments.layers
    shape = {**shape_of(arguments).model_dump(include={"dim", "ffn_dim", "heads"}), "dropout": DROPOUT}
    shape |= {f"{side}_layers": layers for side in ("encoder", "decoder")}
    half = {f"{side}_layers": layers // 2 for side in ("encoder", "decoder")}
    loops = {f"{side}_loops": 2 for side in ("encoder", "decoder")}
    lstms = {"dim": dim, "encoder_layers": layers, "decoder_layers": layers, "dropout": DROPOUT}
    convolutions = {f"{side}_convolutions": [[layers, dim, 3]] for side in ("encoder", "decoder")}
    return {
        "Transformer": {"model": {"name": "transformer", **shape}},
        "merged attention": {"model": {"name": "transformer", **shape}, "layer": {"name": "merged_attention"}},
        "coordination": {"model": {"name": "coordination", **shape}},
        "relative positions": {"model": {"name": "relative_positions", **shape}},
        "transparent attention": {"model": {"name": "transparent_attention", **shape}},
        "DLCL": {"model": {"name": "dlcl", **shape}},
        "MSC": {"model": {"name": "msc", **shape}},
        "SDT": {"model": {"name": "sdt", **shape, "stack_layers": max(1, layers // 2)}},
        "recurrent, each layer twice": {"model": {"name": "recurrent", **shape, **half, **loops}},
        "depth growing, one layer on top": {
            "model": {
                "name": "depth_growing", **shape, "encoder_layers": layers - 1, "decoder_layers": layers - 1,
                "top_encoder_layers": 1, "top_decoder_layers": 1,
            }
        },
        "GNMT": {"model": {"name": "gnmt", **lstms}},
        "ConvS2S": {"model": {"name": "convs2s", "dim": dim, "dropout": DROPOUT, **convolutions}},
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, layers=6, tokens=4096, vocab=32_000, rounds=5)


def run(arguments: argparse.Namespace) -> Results:
    """Measure the families."""
    device, vocabulary = torch.device(arguments.device), Vocabulary(arguments.vocab)
    modules: dict[str, TrainModule] = {}
    for name, settings in families(arguments).items():
        config = validate(settings)
        module = TrainModule(build_model(config, vocabulary), build_objective(config, vocabulary))
        modules[name] = module.to(device, half_on_gpu(arguments.device)).train()
    millions = {
        name: sum(parameter.numel() for parameter in module.parameters()) / 1e6 for name, module in modules.items()
    }

    def work(module: TrainModule, number: int) -> partial[None]:
        return partial(both_passes, module, random_batch(arguments, number + 1))

    works = {name: partial(work, module) for name, module in modules.items()}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    taken = in_turns(works, arguments.rounds, device=device, clock=clock)
    return Results(tables={"cost": relative(taken, **{"million parameters": millions})}, rounds=taken)
