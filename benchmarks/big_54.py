"""Three real updates of the 54-layer BIG deep decoder on CPU ranks, under ZeRO-3 with recomputation.

    python benchmarks/run.py big_54 [--ranks 2] [--tokens 64] [--updates 3]

The model has 755 million parameters with V=32,000; DDR and ALD are off. Measured are loss, gradient norm and time
of each update, and the peak memory of each rank. It shows that the model trains although no rank holds
all of it. Times on CPUs do not predict those on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from records import Results, Table

from tests.support import free_port, rank_environment

DS_CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 2e7,
        "reduce_bucket_size": 5e6,
        "stage3_prefetch_bucket_size": 5e6,
        "stage3_max_live_parameters": 4e7,
        "stage3_max_reuse_distance": 4e7,
        "stage3_param_persistence_threshold": 0,
    }
}
SETTINGS = [
    *("objective.ddr=null", "objective.ald=null", "engine.name=deepspeed", "engine.device=cpu"),
    *("engine.recompute_encoder=1", "engine.recompute_decoder=1", "engine.precision=fp32"),
]
VOCABULARY = 32000


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as one of the ranks; rank 0 writes its rows."""
    import numpy as np

    from deepspeed_nmt.build import build_model, build_objective
    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.core.objective import TrainModule
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.data.batching import BatchConfig
    from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
    from deepspeed_nmt.data.loader import Cursor, TrainLoader, collate
    from deepspeed_nmt.engine import build_engine
    from deepspeed_nmt.engine.settings import resolve_engine
    from deepspeed_nmt.parallel.collectives import gather_lists
    from deepspeed_nmt.parallel.world import join_world, leave_world

    world = join_world("cpu", timeout_s=1200)
    vocabulary = Vocabulary(VOCABULARY)
    directory = Path(arguments.scratch, f"rank{world.rank}")
    directory.mkdir()
    (directory / "zero3.json").write_text(json.dumps(DS_CONFIG))
    settings = [*SETTINGS, f"engine.ds_config={directory / 'zero3.json'}", *arguments.settings]
    config = load_config("deep_decoder_big_54_stabilised", settings=settings)
    rng = np.random.default_rng(1)
    pairs = [rng.integers(4, VOCABULARY, size=(64, 15)).tolist() for _ in range(2)]
    with CorpusWriter(directory, "train", VOCABULARY) as writer:
        writer.append(*pairs)
    corpus = Corpus(directory, "train")
    tokens = arguments.tokens
    batches = BatchConfig(update_tokens=tokens * world.ranks, micro_tokens=tokens)
    loader = TrainLoader.of_corpus(corpus, batches, 1, world.rank, world.ranks, vocabulary)
    model = build_model(config, vocabulary)
    model.recompute(config.engine.recompute_encoder, config.engine.recompute_decoder)
    module = TrainModule(model, build_objective(config, vocabulary))
    parameters = sum(p.numel() for p in module.parameters())
    dummy = collate(corpus, np.empty(0, dtype=np.int64), vocabulary)
    engine = build_engine(resolve_engine(config.engine, config.optimizer, world), module, world, dummy)
    rows = []
    for update in loader.updates(Cursor(), 1):
        started = time.monotonic()
        result = engine.update(update.micro_batches, update.target_tokens, 1e-4)
        nll = float(result.sums["nll"]) / sum(batch.target_tokens for batch in update.micro_batches)
        row = {"update": update.number, "NLL": nll, "gradient norm": float(result.grad_norm)}
        rows.append({**row, "seconds": time.monotonic() - started})
        if update.number == arguments.updates:
            break
    peaks = gather_lists([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20], world)
    if world.is_main:
        Path(arguments.scratch, "rows.json").write_text(json.dumps([rows, parameters, peaks]))
    leave_world()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=64, help="padded tokens of a rank in an update (default: %(default)s)"
    )
    parser.add_argument("--updates", type=int, default=3, help="number of updates (default: %(default)s)")
    parser.add_argument("--settings", nargs="+", default=[], metavar="KEY=VALUE", help="further settings")


def run(arguments: argparse.Namespace) -> Results:
    """Start the ranks."""
    with tempfile.TemporaryDirectory() as scratch:
        threads = str(max(1, (os.cpu_count() or 1) // arguments.ranks))
        words = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--tokens", str(arguments.tokens)]
        words += ["--updates", str(arguments.updates), "--scratch", scratch]
        words += ["--settings", *arguments.settings] if arguments.settings else []
        # Freed memory returns to the system at once, so that the peak counts only memory in use.
        environment = {"OMP_NUM_THREADS": threads, "MALLOC_TRIM_THRESHOLD_": "0"}
        port = free_port()
        ranks = [
            subprocess.Popen(
                words, env={**rank_environment(rank, arguments.ranks, port, Path(scratch)), **environment}
            )
            for rank in range(arguments.ranks)
        ]
        if max(abs(rank.wait()) for rank in ranks):
            sys.exit("a rank failed")
        rows, parameters, peaks = json.loads(Path(scratch, "rows.json").read_text())
    size = {"parameters": parameters, "peak memory of the ranks, GiB": peaks, "in all, GiB": sum(peaks)}
    sizes = {"parameters": "{:,}", "peak memory of the ranks, GiB": ", ".join(["{:.1f}"] * len(peaks))}
    updates = {"NLL": "{:.2f}", "gradient norm": "{:.1f}", "seconds": "{:.0f}"}
    tables = {"updates": Table.of(rows, updates), "size": Table.of([size], {**sizes, "in all, GiB": "{:.1f}"})}
    return Results(tables=tables)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    add_arguments(options)
    options.add_argument("--scratch")
    run_rank(options.parse_args())
