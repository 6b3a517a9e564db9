"""Cost of an update with N x M softmaxing relative to a vanilla update, measured and computed.

python benchmarks/exits.py [--device cpu|cuda] [--dim 512] [--layers 6] [--tokens 2048] [--vocab 32000]
"""

from __future__ import annotations

import statistics
import sys

import torch
from timing import half_on_gpu, parser, random_batch, seconds

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer


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


def main() -> None:
    """Measure the variants and print their times."""
    arguments = parser(__doc__, layers=6, tokens=2048, vocab=32_000, rounds=3).parse_args()
    torch.manual_seed(1)
    config = TransformerConfig(
        dim=arguments.dim,
        ffn_dim=4 * arguments.dim,
        heads=arguments.dim // 64,
        encoder_layers=arguments.layers,
        decoder_layers=arguments.layers,
    )
    model = build_transformer(config, Vocabulary(arguments.vocab))
    model.to(arguments.device, half_on_gpu(arguments.device)).train()
    likelihoods = {
        "vanilla": LabelSmoothed(0.1, 0),
        "2x2": MultiSoftmax(MultiSoftmaxConfig(exits="2x2"), 0),
        "all": MultiSoftmax(MultiSoftmaxConfig(), 0),
    }
    taken: dict[str, list[float]] = {name: [] for name in likelihoods}
    for update in range(arguments.rounds + 1):
        for name, likelihood in likelihoods.items():
            module = TrainModule(model, Objective(likelihood))
            elapsed = seconds(module, random_batch(arguments, update))
            if update:  # the first round warms up
                taken[name].append(elapsed)
    vanilla = statistics.median(taken["vanilla"])
    exits = {"vanilla": (1, 1), "2x2": (2, 2), "all": (arguments.layers, arguments.layers)}
    for name, each in taken.items():
        expected = arithmetic(arguments.dim, arguments.layers, arguments.vocab, *exits[name])
        middle = statistics.median(each)
        sys.stdout.write(
            f"{name:<8} {middle:8.3f} s  {middle / vanilla:5.2f} x vanilla, arithmetic {expected:5.2f} x\n"
        )


if __name__ == "__main__":
    main()
