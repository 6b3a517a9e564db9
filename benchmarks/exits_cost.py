"""Cost of an update with N x M softmaxing relative to a vanilla update, measured and computed.

python benchmarks/run.py exits_cost [--device cpu|cuda] [--dim 512] [--layers 6] [--tokens 2048] [--vocab 32000]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from records import Results
from timing import add_sizes, both_passes, half_on_gpu, in_turns, random_batch, relative, shape_of

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.transformer import build_transformer


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
    add_sizes(parser, layers=6, tokens=2048, vocab=32_000, rounds=3)


def run(arguments: argparse.Namespace) -> Results:
    """Measure the variants."""
    torch.manual_seed(1)
    model = build_transformer(shape_of(arguments), Vocabulary(arguments.vocab))
    model.to(arguments.device, half_on_gpu(arguments.device)).train()
    likelihoods = {
        "vanilla": LabelSmoothed(0.1, 0),
        "2x2": MultiSoftmax(MultiSoftmaxConfig(exits="2x2"), 0),
        "all": MultiSoftmax(MultiSoftmaxConfig(), 0),
    }
    modules = {name: TrainModule(model, Objective(likelihood)) for name, likelihood in likelihoods.items()}

    def work(name: str, number: int) -> partial[None]:
        return partial(both_passes, modules[name], random_batch(arguments, number))

    taken = in_turns(
        {name: partial(work, name) for name in modules}, arguments.rounds, device=torch.device(arguments.device)
    )
    exits = {"vanilla": (1, 1), "2x2": (2, 2), "all": (arguments.layers, arguments.layers)}
    sizes = (arguments.dim, arguments.layers, arguments.vocab)
    expected = {name: arithmetic(*sizes, *pair) for name, pair in exits.items()}
    return Results(tables={"cost": relative(taken, **{"by arithmetic": expected})}, rounds=taken)
