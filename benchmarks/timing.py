"""Common code of the benchmarks: arguments, models, random batches, and timing in turns."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from records import Table

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.methods.transformer import TransformerConfig

LENGTH = 32
"""Length of each sentence, on both sides."""

Work = Callable[[int], Callable[[], object]]
"""Prepares the work of a round, given its number."""


def add_rounds(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the number of measurements."""
    words = "measurements of each variant, after one that warms up (default: %(default)s)"
    parser.add_argument("--rounds", type=int, default=rounds, help=words)


def add_sizes(parser: argparse.ArgumentParser, layers: int, tokens: int, vocab: int, rounds: int) -> None:
    """Add the sizes of a model and of its batches."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=512, help="width of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=layers, help="layers on each side (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens of a batch (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=vocab, help="size of the vocabulary (default: %(default)s)")
    add_rounds(parser, rounds)


def shape_of(arguments: argparse.Namespace) -> TransformerConfig:
    """Return a Transformer of these sizes."""
    dim, layers = arguments.dim, arguments.layers
    return TransformerConfig(
        dim=dim, ffn_dim=4 * dim, heads=max(1, dim // 64), encoder_layers=layers, decoder_layers=layers
    )


def random_batch(arguments: argparse.Namespace, update: int) -> Batch:
    """Return a batch of random tokens, the same for every variant."""
    generator = torch.Generator().manual_seed(update)
    rows = max(1, arguments.tokens // LENGTH)
    source, target = (torch.randint(4, arguments.vocab, (rows, LENGTH), generator=generator) for _ in range(2))
    count = rows * LENGTH
    made = Batch(
        source_BS=source,
        target_input_BT=target,
        target_output_BT=target,
        sentence_ids_B=torch.arange(rows),
        source_tokens=count,
        target_tokens=count,
        pad=0,
        update=UpdateInfo(seed=1, number=update, tokens=count, sentences=rows),
    )
    return made.to(torch.device(arguments.device))


def half_on_gpu(device: str) -> torch.dtype:
    """Return the dtype of a model's weights: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def both_passes(module: TrainModule, batch: Batch) -> None:
    """Run a forward and a backward pass."""
    (module(batch).loss / batch.target_tokens).backward()
    module.zero_grad(set_to_none=True)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(
    work: Callable[[], object], device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds from the start of some work until the device has finished, launches included."""
    device = device or torch.device("cpu")
    synchronise(device)
    started = clock()
    work()
    synchronise(device)
    return clock() - started


def in_turns(works: Mapping[str, Work], rounds: int, **options: Any) -> dict[str, list[float]]:
    """Time works in turns, so that other work on the machine affects all alike; return the seconds of each round.

    The order is random in each round, because each inherits the memory and the caches of the one before. Round 0
    warms up and does not count. ``options`` are those of :func:`seconds_of`.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, prepare in random.Random(number).sample(list(works.items()), len(works)):
            taken[name].append(seconds_of(prepare(number), **options))
    return {name: seconds[1:] for name, seconds in taken.items()}


def ratio(dividends: Sequence[float], divisors: Sequence[float]) -> float:
    """Return the median of the ratios of two works, paired by round."""
    return statistics.median(a / b for a, b in zip(dividends, divisors, strict=True))


def relative(taken: Mapping[str, Sequence[float]], speed: bool = False, **more: Mapping[str, object]) -> Table:
    """Return a table of medians, and of the time of each variant, or its speed, relative to the first one.

    Args:
        taken: seconds by variant.
        speed: True for speed.
        more: further columns, by variant.
    """
    first = next(iter(taken))
    title = f"{'speed' if speed else 'time'}, {first} = 1"
    rows = []
    for name, seconds in taken.items():
        pair = (taken[first], seconds) if speed else (seconds, taken[first])
        columns = {column: values.get(name) for column, values in more.items()}
        rows.append({"variant": name, title: ratio(*pair), "seconds": statistics.median(seconds), **columns})
    return Table.of(rows, {title: "{:.2f}", "seconds": "{:.3f}", **dict.fromkeys(more, "{:.2f}")})
