"""Cost of an update with DDR, R-Drop, ALD and cross-attention drop, relative to the plain objective.

    python benchmarks/objectives.py [--device cpu|cuda] [--dim 512] [--layers 15] [--tokens 4096] [--vocab 36000]

All variants make the same updates on the same random batches. They take turns, so that other work on the machine
slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

import torch
from timing import half_on_gpu, parser, random_batch, seconds

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, REGULARIZERS
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer

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
    config = TransformerConfig(
        dim=arguments.dim,
        ffn_dim=4 * arguments.dim,
        heads=arguments.dim // 64,
        encoder_layers=arguments.layers,
        decoder_layers=arguments.layers,
    )
    entry = LAYERS["cross_attention_drop"]
    drop = entry.config(drop_depth=int(layer.get("drop_depth", 0.0) * arguments.layers))
    model = build_transformer(config, vocabulary, partial(entry.build, drop))
    likelihood = LIKELIHOODS["label_smoothed"]
    objective = Objective(
        likelihood.build(likelihood.config(), vocabulary),
        [REGULARIZERS[name].build(REGULARIZERS[name].config(), vocabulary) for name in regularizers],
    )
    return TrainModule(model, objective).to(arguments.device, half_on_gpu(arguments.device)).train()


def main() -> None:
    """Measure the variants and print their times."""
    arguments = parser(__doc__, layers=15, tokens=4096, vocab=36_000, rounds=5).parse_args()
    on_gpu = arguments.device == "cuda"
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    memory: dict[str, float] = {}
    modules = {name: build(arguments, *variant) for name, variant in VARIANTS.items()}
    for number in range(arguments.rounds + 1):
        for name, module in modules.items():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            elapsed = seconds(module, random_batch(arguments, number + 1))
            if number:  # the first round warms up
                taken[name].append(elapsed)
            memory[name] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    plain = statistics.median(taken["plain"])
    sys.stdout.write(f"{arguments.layers}+{arguments.layers} layers, D={arguments.dim}, {arguments.tokens} tokens\n")
    for name, each in taken.items():
        middle = statistics.median(each)
        extra = f", peak {memory[name]:.2f} GiB" if on_gpu else ""
        sys.stdout.write(f"{name:<12} {middle:8.3f} s  {middle / plain:5.2f} x plain{extra}\n")


if __name__ == "__main__":
    main()
