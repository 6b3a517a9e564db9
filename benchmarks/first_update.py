"""Time and memory of ordering and batching a large corpus, up to the micro-batches of a run's first update.

    python benchmarks/run.py first_update [--pairs 1000000 10000000 40000000]
    python benchmarks/run.py first_update --command --as first_update_command [--pairs 10000 1000000 10000000]

A run starts at the beginning and in the middle of an epoch, each time in a process of its own: `first_update.py
DIRECTORY padded|packed FROM`, where FROM is a share of the first epoch. Measured are seconds until the loader is
ready, seconds until the first micro-batches, and MiB of its own memory at the peak, without pages of the corpus,
which ranks of a host share. Imports, hashes of the data, the engine and the update itself are not measured.

With `--command` they are: seconds from the command `train` until its log has update 1, of `sample_quick` in one
process of plain torch, and on two ranks under ZeRO-2. The corpus is a sample of 10,000 pairs, repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from records import Results, Table

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
    return {"ready": ready - started, "first update": ended - started, "own memory": peak[0]}


def write_repeated(data: Path, times: int) -> None:
    """Repeat the training pairs of a data directory."""
    from deepspeed_nmt.data.data_directory import META_FILE
    from deepspeed_nmt.manifest import FileRecord, write_record

    meta = json.loads((data / META_FILE).read_text(encoding="utf-8"))
    split = meta["splits"]["train"]
    split["pairs"] *= times
    for side in ("source", "target"):
        names = [f"train.{side}.{name}.bin" for name in ("offsets", "uint16")]
        offsets, tokens = np.fromfile(data / names[0], "<i8"), (data / names[1]).read_bytes()
        starts = offsets[-1] * np.arange(times)
        np.append(0, (starts[:, None] + offsets[1:]).ravel()).astype("<i8").tofile(data / names[0])
        with (data / names[1]).open("wb") as file:
            file.writelines(itertools.repeat(tokens, times))
        split[side]["tokens"] *= times
        meta["files"].update({name: FileRecord.of(data / name).model_dump() for name in names})
    write_record(data / META_FILE, json.dumps(meta).encode())


def _seconds_of_command(data: Path, run: Path, ranks: int) -> float:
    """Return the seconds from a start of `train` to its first update, and stop it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [*launcher, "-m", *(["--"] if launcher else []), "deepspeed_nmt", "train", "--recipe", "sample_quick"]
    words += ["--data", str(data), "--run", str(run), "engine.device=cpu", "training.log_every=1"]
    words += ["training.max_updates=2", "collapse.every=0"]
    words += ["engine.name=deepspeed", "engine.ds_config=cpu"] if launcher else ["engine.name=plain"]
    started, log = time.perf_counter(), run / "metrics.jsonl"
    with subprocess.Popen([sys.executable, *words], stderr=subprocess.DEVNULL) as process:
        while not (log.exists() and '"train/loss"' in log.read_text()):
            if process.poll() is not None:
                raise RuntimeError(f"train ended with status {process.returncode}")
            time.sleep(0.02)
        return time.perf_counter() - started


def _of_commands(sizes: Sequence[int], rounds: int) -> Results:
    from tests.support import prepare_sample

    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        sample = prepare_sample(Path(name), 2000, train=10_000, valid=200, test=200)
        for pairs, ranks in itertools.product(sizes, (1, 2)):
            data = Path(name) / f"{pairs}"
            if not data.exists():
                shutil.copytree(sample, data)
                write_repeated(data, pairs // 10_000)
            times = [_seconds_of_command(data, Path(name) / f"run-{pairs}-{ranks}-{n}", ranks) for n in range(rounds)]
            rows.append(
                {"pairs": pairs, "ranks": ranks, "first update": statistics.median(times), "slowest": max(times)}
            )
    formats = {"pairs": "{:,}", "first update": "{:.1f} s", "slowest": "{:.1f} s"}
    return Results(tables={"command": Table.of(rows, formats)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, nargs="+", help="sizes of the corpus")
    parser.add_argument("--command", action="store_true", help="measure from the command")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each command (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Measure starts of runs for each size of the corpus."""
    if arguments.command:
        return _of_commands(arguments.pairs or [10_000, 1_000_000, 10_000_000], arguments.rounds)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        for pairs in arguments.pairs or [1_000_000, 10_000_000, 40_000_000]:
            directory = Path(name) / str(pairs)
            write_lengths(directory, pairs)
            for layout, share in itertools.product(("padded", "packed"), (0.0, 0.5)):
                found = json.loads(
                    subprocess.check_output([sys.executable, __file__, str(directory), layout, str(share)])
                )
                rows.append({"pairs": pairs, "layout": layout, "from": 100 * share, **found})
            shutil.rmtree(directory)
    formats = {"pairs": "{:,}", "from": "{:.0f}%", "own memory": "{:,.0f} MiB"}
    formats |= dict.fromkeys(("ready", "first update"), "{:.2f} s")
    return Results(tables={"start": Table.of(rows, formats)})


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_start(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))))
