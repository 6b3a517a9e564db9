"""What N x M softmaxing costs, as a ratio to an ordinary update in one run, beside what arithmetic says.

python benchmarks/exits.py [--device cpu|cuda] [--dim 512] [--layers 6] [--tokens 2048] [--vocab 32000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer

LENGTH = 32


def arithmetic(dim: int, layers: int, vocab: int, encoders: int, decoders: int) -> float:
    """Multiplications of an update with so many exits over those of an ordinary one, per token pair.

    An encoder layer has 12 D^2 weights, a decoder layer 16 D^2 (ffn_dim = 4 D); each application of one, and of the
    projection's V D, costs its weights. Attention's own products are left out: at sentence length they are small.
    """
    encoder, decoder, projection = 12 * dim**2 * layers, 16 * dim**2 * layers, vocab * dim
    # Cross-attention's keys and values are among the decoder's weights, and computed for each encoder exit.
    return (encoder + encoders * decoder + encoders * decoders * projection) / (encoder + decoder + projection)


def seconds(module: TrainModule, batch: Batch, synchronise: Callable[[], None], autocast: bool) -> float:
    """One forward and backward."""
    synchronise()
    started = time.perf_counter()
    with torch.autocast(batch.source_BS.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = module(batch).loss
    (loss / batch.target_tokens).backward()
    module.zero_grad(set_to_none=True)
    synchronise()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    synchronise = torch.cuda.synchronize if on_gpu else lambda: None
    torch.manual_seed(1)
    config = TransformerConfig(
        dim=arguments.dim,
        ffn_dim=4 * arguments.dim,
        heads=arguments.dim // 64,
        encoder_layers=arguments.layers,
        decoder_layers=arguments.layers,
    )
    model = build_transformer(config, Vocabulary(arguments.vocab)).to(arguments.device).train()
    likelihoods = {
        "vanilla": LabelSmoothed(0.1, 0),
        "2x2": MultiSoftmax(MultiSoftmaxConfig(exits="2x2"), 0),
        "all": MultiSoftmax(MultiSoftmaxConfig(), 0),
    }
    rows = max(1, arguments.tokens // LENGTH)
    source, target = (torch.randint(4, arguments.vocab, (rows, LENGTH)) for _ in range(2))
    count = rows * LENGTH
    taken: dict[str, list[float]] = {name: [] for name in likelihoods}
    for update in range(arguments.rounds + 1):
        batch = Batch(source, target, target, torch.arange(rows), count, count, 0, 1, update, 0, count, rows)
        for name, likelihood in likelihoods.items():
            module = TrainModule(model, Objective(likelihood))
            elapsed = seconds(module, batch.to(torch.device(arguments.device)), synchronise, on_gpu)
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
