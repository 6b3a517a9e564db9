"""Three real updates of the 54-layer BIG deep decoder on CPU ranks, under ZeRO-3 with recomputation.

    python benchmarks/big_54.py [--ranks 2] [--tokens 64] [--updates 3]

The model has 755 million parameters with V=32,000; DDR and ALD are off. The script prints loss, gradient norm and
time of each update, and the peak memory of each rank. It shows that the model trains although no rank holds
all of it. Times on CPUs do not predict those on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


def output(line: str) -> None:
    """Write a line to standard output and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_rank(arguments: argparse.Namespace) -> None:
    """Train as one of the ranks; rank 0 prints."""
    import numpy as np
    import torch

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
    settings = [*SETTINGS, f"engine.ds_config={directory / 'zero3.json'}"]
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
    layers = (config.model.model_dump()["encoder_layers"], config.model.model_dump()["decoder_layers"])
    dummy = collate(corpus, np.empty(0, dtype=np.int64), vocabulary)
    engine = build_engine(resolve_engine(config.engine, config.optimizer, world), module, world, dummy)
    if world.is_main:
        output(f"{parameters:,} parameters, {layers[0]}+{layers[1]} layers, {world.ranks} ranks, ZeRO-3")
    for update in loader.updates(Cursor(), 1):
        started = time.monotonic()
        result = engine.update(update.micro_batches, update.target_tokens, 1e-4)
        nll = float(result.sums["nll"]) / sum(batch.target_tokens for batch in update.micro_batches)
        if world.is_main:
            seconds = time.monotonic() - started
            output(f"update {update.number}: nll {nll:.3f}, norm {result.grad_norm:.3f}, {seconds:.1f} s")
        if update.number == arguments.updates:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    peaks = gather_lists([peak], world)
    if world.is_main:
        output(f"peak memory of the ranks: {', '.join(f'{each:.1f}' for each in peaks)} GiB; {sum(peaks):.1f} in all")
        output(f"torch {torch.__version__}")
    leave_world()


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=64, help="padded tokens of a rank in an update (default: %(default)s)"
    )
    parser.add_argument("--updates", type=int, default=3, help="number of updates (default: %(default)s)")
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.scratch:
        return run_rank(arguments)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        shared = {
            **os.environ,
            "WORLD_SIZE": str(arguments.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // arguments.ranks)),
            "TORCH_EXTENSIONS_DIR": scratch,
            # Freed memory returns to the system at once, so that the peak counts only memory in use.
            "MALLOC_TRIM_THRESHOLD_": "0",
        }
        words = [sys.executable, __file__, *sys.argv[1:], "--scratch", scratch]
        ranks = [
            subprocess.Popen(words, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(arguments.ranks)
        ]
        sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    main()
