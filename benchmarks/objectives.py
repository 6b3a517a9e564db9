"""Cost of an update with DDR, R-Drop, ALD, cross-attention drop or N x M softmaxing, relative to the plain objective.

    python benchmarks/run.py objectives [--dim 512] [--layers 15] [--tokens 4096] [--vocab 36000]
    python benchmarks/run.py objectives --as exits_cost --layers 6 --vocab 32000 --variants plain 2x2 all

All variants make the same updates on the same random batches, in turns.
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

VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "cad": ["cad"],
    "ddr": ["ddr"],
    "r_drop": ["r_drop"],
    "ald": ["ald"],
    "ddr+ald": ["ddr", "ald"],
    "cad+ddr+ald": ["cad", "ddr", "ald"],
}
EXITS = ("2x2", "all")


def build(arguments: argparse.Namespace, variant: str) -> TrainModule:
    """Build the model and the objective of a variant. Cross-attention is dropped in 0.4 of the decoder layers."""
    vocabulary = Vocabulary(arguments.vocab)
    torch.manual_seed(1)
    names = VARIANTS.get(variant, [])
    entry = LAYERS["cross_attention_drop"]
    drop = entry.config(drop_depth=int(0.4 * arguments.layers) if "cad" in names else 0)
    model = build_transformer(shape_of(arguments), vocabulary, partial(entry.build, drop))
    likelihood = LIKELIHOODS["multi_softmax" if variant in EXITS else "label_smoothed"]
    config = likelihood.config(exits=variant) if variant in EXITS else likelihood.config()
    regularizers = [REGULARIZERS[name] for name in names if name != "cad"]
    objective = Objective(
        likelihood.build(config, vocabulary), [each.build(each.config(), vocabulary) for each in regularizers]
    )
    return TrainModule(model, objective).to(arguments.device, half_on_gpu(arguments.device)).train()


def arithmetic(dim: int, layers: int, vocab: int, encoders: int, decoders: int) -> float:
    """Return the multiplications of an update with N x M exits, relative to a vanilla update.

    For each token, a layer or a projection costs as many multiplications as it has weights: 12 D^2 in an encoder
    layer, 16 D^2 in a decoder layer (ffn_dim = 4 D), V D in the projection. The products of attention weights are
    neglected: they are small for sentences.

    Args:
        dim: D.
        layers: number of layers on each side.
        vocab: V.
        encoders: N, number of encoder exits.
        decoders: M, number of decoder exits.
    """
    encoder, decoder, projection = 12 * dim**2 * layers, 16 * dim**2 * layers, vocab * dim
    # The weights of a decoder layer include those of cross-attention, whose keys and values are computed for each
    # encoder exit.
    return (encoder + encoders * decoder + encoders * decoders * projection) / (encoder + decoder + projection)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, layers=15, tokens=4096, vocab=36_000, rounds=5)
    names = [*VARIANTS, *EXITS]
    parser.add_argument(
        "--variants", nargs="+", choices=names, default=list(VARIANTS), metavar="V", help=", ".join(names)
    )


def run(arguments: argparse.Namespace) -> Results:
    """Measure the variants."""
    modules = {name: build(arguments, name) for name in arguments.variants}
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
    sizes = (arguments.dim, arguments.layers, arguments.vocab)
    pairs = {"2x2": (2, 2), "all": (arguments.layers, arguments.layers)}
    expected = {name: arithmetic(*sizes, *pair) for name, pair in pairs.items() if name in taken}
    columns = {name: values for name, values in (("by arithmetic", expected), ("peak GiB", peaks)) if values}
    return Results(tables={"cost": relative(taken, **columns)}, rounds=taken)
