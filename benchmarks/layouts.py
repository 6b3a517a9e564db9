"""Speed of training in the packed layout relative to the padded one, on the same updates.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py [--updates 12]

6+6 layers, D=256, FFN 1,024, 4 heads, V=8,000; lengths of news text; updates of 8,192 target tokens, micro-batches of
up to 2,048. Both layouts make every update, in turns, so that other work on the machine affects both alike; the ratio
is the median over the updates. On a CPU attention is computed in a padded row for each sentence in either layout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from gpu.harness import write_corpus

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers.adam import AdamConfig

VOCABULARY = Vocabulary(8000)
LAYOUTS = ("padded", "packed")


def engine() -> PlainEngine:
    """Build a model and its engine, the same for both layouts."""
    torch.manual_seed(1)
    shape = TransformerConfig(dim=256, ffn_dim=1024, heads=4)
    module = TrainModule(build_transformer(shape, VOCABULARY), Objective(LabelSmoothed(0.1, VOCABULARY.pad)))
    world = World(0, 1, 0, torch.device("cpu"))
    return PlainEngine(module, AdamConfig(), "fp32", world)


def main() -> None:
    """Time the updates, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=12, help="updates to time (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.updates < 1:
        parser.error(f"--updates must be at least 1, but is {arguments.updates}")
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 20000, VOCABULARY)
        runs = {}
        for layout in LAYOUTS:
            config = BatchConfig(update_tokens=8192, micro_tokens=2048, layout=layout)
            runs[layout] = engine(), TrainLoader.of_corpus(corpus, config, 1, 0, 1, VOCABULARY).updates(Cursor(), 1)
        seconds: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        empty: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
        counts: dict[str, int] = dict.fromkeys(LAYOUTS, 0)
        for number in range(arguments.updates + 1):  # the first is not counted
            for layout in LAYOUTS if number % 2 else reversed(LAYOUTS):
                engine_of, updates = runs[layout]
                update: Update = next(updates)
                started = time.perf_counter()
                engine_of.update(update.micro_batches, update.target_tokens, 1e-4)
                if number:
                    seconds[layout].append(time.perf_counter() - started)
                    empty[layout].append(1.0 - update.real_positions / update.padded_positions)
                    counts[layout] += len(update.micro_batches)
    for layout in LAYOUTS:
        median, made = statistics.median(seconds[layout]), counts[layout] / arguments.updates
        share = statistics.mean(empty[layout])
        sys.stdout.write(f"{layout}: {median:.2f} s an update, {made:.1f} micro-batches, {share:.1%} empty\n")
    ratio = statistics.median(a / b for a, b in zip(seconds["packed"], seconds["padded"], strict=True))
    sys.stdout.write(f"packed / padded: {ratio:.3f}\n")


if __name__ == "__main__":
    main()
