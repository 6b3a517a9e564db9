"""Cost of an update with DDR, R-Drop, ALD and cross-attention drop, relative to the plain objective.

    python benchmarks/run.py objectives [--device cpu|cuda] [--dim 512] [--layers 15] [--tokens 4096] [--vocab 36000]

All variants make the same updates on the same random batches. They take turns, so that other work on the machine
slows all of them alike.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from records import Results
from timing import add_sizes, both_passes, half_on_gpu, in_turns, random_batch, relative, shape_of

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, REGULARIZERS
from deepspeed_nmt.methods.transformer import build_transformer

VARIANTS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "cad": ({"drop_depth": 0.4}, ()),
    "ddr": ({}, ("ddr",)),
    "r_drop": ({}, ("r_drop",)),
    "ald": ({}, ("ald",)),
    "ddr+ald": ({}, ("ddr", "ald")),
    "cad+ddr+ald": ({"drop_depth": 0.4}, ("ddr", "ald")),
}


def build(arguments: argparse.Namespace, layer: dict[str, float], regularizers: tuple[str, ...]) -> TrainModule:
    """Build the model and the objective of a variant.

    Args:
        arguments: of the command line.
        layer: settings of cross-attention drop; ``drop_depth`` is a share of the decoder layers.
        regularizers: names of the regularizers.
    """
    vocabulary = Vocabulary(arguments.vocab)
    torch.manual_seed(1)
    entry = LAYERS["cross_attention_drop"]
    drop = entry.config(drop_depth=int(layer.get("drop_depth", 0.0) * arguments.layers))
    model = build_transformer(shape_of(arguments), vocabulary, partial(entry.build, drop))
    likelihood = LIKELIHOODS["label_smoothed"]
    objective = Objective(
        likelihood.build(likelihood.config(), vocabulary),
        [REGULARIZERS[name].build(REGULARIZERS[name].config(), vocabulary) for name in regularizers],
    )
    return TrainModule(model, objective).to(arguments.device, half_on_gpu(arguments.device)).train()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, layers=15, tokens=4096, vocab=36_000, rounds=5)


def run(arguments: argparse.Namespace) -> Results:
    """Measure the variants."""
    modules = {name: build(arguments, *variant) for name, variant in VARIANTS.items()}
    peaks: dict[str, float] = {}

    def once(name: str, batch: Batch) -> None:
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        both_passes(modules[name], batch)
        if arguments.device == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30

    def work(name: str, number: int) -> partial[None]:
        return partial(once, name, random_batch(arguments, number + 1))

    works = {name: partial(work, name) for name in modules}
    taken = in_turns(works, arguments.rounds, device=torch.device(arguments.device))
    return Results(tables={"cost": relative(taken, **({"peak GiB": peaks} if peaks else {}))}, rounds=taken)
