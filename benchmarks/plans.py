"""Time and memory of the plan of a large corpus, for `benchmarks/data.py plan`; as a program, one start.

    python benchmarks/plans.py DIRECTORY padded|packed FROM

FROM is the share of the first epoch at which the run starts. Prints seconds until the loader is ready, seconds until
the first update, and MiB of its own memory at the peak: pages of the corpus, which ranks of a host share, are not
counted.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

_DRAW = 1 << 20
"""Pairs whose lengths are drawn at once."""


def write_lengths(directory: Path, pairs: int) -> None:
    """Write a corpus with lengths like those of news text; its tokens are a hole in a file."""
    rng, ends = np.random.default_rng(1), [0, 0]
    directory.mkdir(parents=True)
    files = [(directory / f"train.{side}.offsets.bin").open("wb") for side in ("source", "target")]
    for file in files:
        file.write(np.zeros(1, "<i8").tobytes())
    for start in range(0, pairs, _DRAW):
        source = np.clip(rng.gamma(3.0, 8.0, min(_DRAW, pairs - start)), 2, 100)
        target = np.clip(source * 1.05 * np.exp(rng.normal(0.0, 0.18, len(source))), 2, 100)
        for side, lengths in enumerate((source, target)):
            offsets = ends[side] + np.cumsum(lengths.astype(np.int64))
            files[side].write(offsets.astype("<i8").tobytes())
            ends[side] = int(offsets[-1])
    for file, side, end in zip(files, ("source", "target"), ends, strict=True):
        file.close()
        with (directory / f"train.{side}.uint16.bin").open("wb") as tokens:
            tokens.truncate(2 * end)


def _own_memory() -> float:
    """Return the MiB of memory that belong to this process alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _start(directory: Path, layout: str, share: float) -> dict[str, float]:
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.data.batching import BatchConfig
    from deepspeed_nmt.data.corpus import Corpus
    from deepspeed_nmt.data.loader import TrainLoader
    from deepspeed_nmt.data.update_order import Cursor

    before, peak, done = _own_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _own_memory() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    config = BatchConfig.model_validate({"layout": layout})
    loader = TrainLoader.of_corpus(Corpus(directory, "train"), config, 1, 0, 8, Vocabulary(32000))
    update = int(share * loader.order.updates_in(0))
    ready = time.perf_counter()
    next(loader.updates(Cursor(0, update), update + 1))
    ended = time.perf_counter()
    done.set()
    watcher.join()
    return {"ready": ready - started, "first": ended - started, "memory": peak[0]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_start(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
