"""What DDR, R-Drop, ALD and cross-attention drop cost, as ratios to the plain objective in one run.

    python benchmarks/objectives.py [--device cpu|cuda] [--dim 512] [--layers 15] [--tokens 4096] [--vocab 36000]

Each variant makes the same updates on the same random batches, in turns, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, TERMS
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


def build(arguments: argparse.Namespace, layer: dict[str, float], terms: tuple[str, ...]) -> TrainModule:
    """A model and an objective; ``layer`` gives the share of decoder layers without cross-attention."""
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
        [TERMS[name].build(TERMS[name].config(), vocabulary) for name in terms],
    )
    return TrainModule(model, objective).to(arguments.device).train()


def batch(arguments: argparse.Namespace, update: int) -> Batch:
    """Sentences of 32 tokens on both sides."""
    generator = torch.Generator().manual_seed(update)
    rows, length = max(1, arguments.tokens // 32), 32
    source, target = (torch.randint(4, arguments.vocab, (rows, length), generator=generator) for _ in range(2))
    count = rows * length
    made = Batch(source, target, target, torch.arange(rows), count, count, 0, 1, update, 0, count, rows)
    return made.to(torch.device(arguments.device))


def seconds(module: TrainModule, made: Batch, synchronise: Callable[[], None], autocast: bool) -> float:
    """One forward and backward."""
    synchronise()
    started = time.perf_counter()
    with torch.autocast(made.source_BS.device.type, dtype=torch.bfloat16, enabled=autocast):
        loss = module(made).loss
    (loss / made.target_tokens).backward()
    module.zero_grad(set_to_none=True)
    synchronise()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=36_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    synchronise = torch.cuda.synchronize if on_gpu else lambda: None
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    memory: dict[str, float] = {}
    modules = {name: build(arguments, *variant) for name, variant in VARIANTS.items()}
    for number in range(arguments.rounds + 1):
        for name, module in modules.items():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            elapsed = seconds(module, batch(arguments, number + 1), synchronise, on_gpu)
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
