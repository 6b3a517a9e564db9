"""Time and memory of ordering and batching a large corpus, up to the micro-batches of a run's first update.

    python benchmarks/run.py first_update [--pairs 1000000 10000000 40000000]
    python benchmarks/run.py first_update --as first_update_billion --pairs 1000000000 --corpora 1 10
    python benchmarks/run.py first_update --command --as first_update_command [--pairs 10000 1000000 10000000]

A run starts at the beginning and in the middle of an epoch, each time in a process of its own: `first_update.py start
DIRECTORY CORPORA padded|packed FROM`, where FROM is a share of the first epoch. Measured are seconds until the loader
is ready, seconds until the first micro-batches, and MiB of its own memory at the peak, without pages of the corpus,
which ranks of a host share. A "cold" start finds no page of the corpus in memory. Imports, hashes of the data, the
engine and the update itself are not measured. A mixture has the same files for all its corpora.

Then the files are cold again, and pages that come into memory are counted (mincore): those of offsets for a window,
and those of tokens for updates of rank 0 of 8. Used of them are two offsets of each sentence, and the rank's tokens.
At last a loop over cold files takes updates and sleeps for a step after each.

With `--command`, imports, hashes and updates are measured as well: seconds from the command `train` until its log has
update 1, of `sample_quick` in one process of plain torch, and on two ranks under ZeRO-2. The corpus is a sample of
10,000 pairs, repeated.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from records import Results, Table

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart
from deepspeed_nmt.data.loader import Prefetcher, TrainLoader
from deepspeed_nmt.data.mixture import MixtureOrder, Phase, Stream, Weight
from deepspeed_nmt.data.update_order import Cursor

_DRAW = 1 << 20
"""Pairs whose lengths are drawn at once."""
_LONGEST = 100
"""Tokens of the longest sentence, without EOS."""
_UPDATES = 1 << 40
"""More updates than a run has."""
_READ_UPDATES, _STEPS = 8, 320
"""Updates whose tokens are counted, and those that are waited for, which are of two windows."""


def write_lengths(directory: Path, pairs: int) -> None:
    """Write a corpus with lengths like those of news text; its tokens are a hole in a file."""
    rng, ends = np.random.default_rng(1), [0, 0]
    directory.mkdir(parents=True)
    files = [(directory / f"train.{side}.offsets.bin").open("wb") for side in ("source", "target")]
    for file in files:
        file.write(np.zeros(1, "<i8").tobytes())
    for start in range(0, pairs, _DRAW):
        source = np.clip(rng.gamma(3.0, 8.0, min(_DRAW, pairs - start)), 2, _LONGEST)
        target = np.clip(source * 1.05 * np.exp(rng.normal(0.0, 0.18, len(source))), 2, _LONGEST)
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


def _evict(directory: Path) -> None:
    """Drop the pages of all files of a directory that no process has mapped."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _resident(directory: Path, name: str) -> int:
    """Return the bytes in memory of files, such as the ``offsets`` of both sides."""
    libc, pages = ctypes.CDLL(None, use_errno=True), 0
    for path in directory.glob(f"train.*.{name}.bin"):
        mapped = np.memmap(path, np.uint8, mode="r")
        states = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
        address, size, result = (
            ctypes.c_void_p(mapped.ctypes.data),
            len(mapped),
            ctypes.c_void_p(states.ctypes.data),
        )
        if libc.mincore(address, ctypes.c_size_t(size), result):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        pages += int((states & 1).sum())
    return pages * mmap.PAGESIZE


def _loader(directory: Path, corpora: int, layout: str) -> TrainLoader:
    """Return the loader of rank 0 of 8."""
    config = BatchConfig.model_validate({"layout": layout})
    corpus, vocabulary = Corpus(directory, "train", (_LONGEST, _LONGEST)), Vocabulary(32000)
    if corpora == 1:
        return TrainLoader.of_corpus(corpus, config, 1, 0, 8, vocabulary)
    parts = [CorpusPart(f"{n}", (corpus,), key=n) for n in range(corpora)]
    weights = (Weight(value=1.0),)
    streams = [
        Stream(corpus=part.name, pairs=len(part), tokens=part.mean_target_tokens, weights=weights) for part in parts
    ]
    phase = Phase(first=1, temperature=1.0, streams=tuple(streams))
    order = MixtureOrder(Corpora(parts), 1, config.update_tokens, phase, _UPDATES)
    return TrainLoader(order, config, 0, 8, vocabulary)


def _start(directory: Path, corpora: int, layout: str, share: float) -> dict[str, float]:
    before, peak, done = _own_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], _own_memory() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    loader = _loader(directory, corpora, layout)
    update = int(share * loader.order.updates_in(0))
    ready = time.perf_counter()
    loader.update(Cursor(0, update), update + 1)
    ended = time.perf_counter()
    done.set()
    watcher.join()
    return {"ready": ready - started, "first update": ended - started, "own memory": peak[0]}


def _bytes_read(directory: Path, corpora: int) -> list[dict[str, object]]:
    """Return the KiB that came into memory, and those used, for an update of a run that has just started."""
    loader, found = _loader(directory, corpora, "padded"), []
    window = loader.order.window(loader.order.place(Cursor(), 1).window)
    read = {"offsets": _resident(directory, "offsets") / len(window)}
    used = {"offsets": 2 * 2 * 8 * len(window.rows) / len(window)}
    before = _resident(directory, "uint16")
    updates = [loader.update(Cursor(0, number), number + 1) for number in range(_READ_UPDATES)]
    read["tokens of a rank"] = (_resident(directory, "uint16") - before) / _READ_UPDATES
    used["tokens of a rank"] = 2 * sum(update.real_positions for update in updates) / _READ_UPDATES
    for what in read:
        found.append({"what": what, "read": read[what] / 1024, "used": used[what] / 1024})
    return found


def _waiting(directory: Path, corpora: int, step: float) -> dict[str, object]:
    """Return the seconds that a loop waited for updates after its first."""
    ahead, waits = Prefetcher(_loader(directory, corpora, "padded").updates(Cursor(), 1)), list[float]()
    for _ in range(_STEPS):
        started = time.perf_counter()
        ahead.next()
        waits.append(time.perf_counter() - started)
        time.sleep(step)
    return {"step": step, "updates": _STEPS, "waited": sum(waits[1:]), "longest": max(waits[1:])}


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
    parser.add_argument("--corpora", type=int, nargs="+", default=[1], help="corpora of the run; more are a mixture")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a step (default: %(default)s)")
    parser.add_argument(
        "--directory", type=Path, help="where corpora are kept for another run, 16 GB for a billion pairs"
    )
    parser.add_argument("--command", action="store_true", help="measure from the command")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Measure starts of runs for each size of the corpus."""
    if arguments.command:
        return _of_commands(arguments.pairs or [10_000, 1_000_000, 10_000_000], arguments.rounds)
    starts, reading, waiting = [list[dict[str, object]]() for _ in range(3)]
    with tempfile.TemporaryDirectory() as name:
        for pairs in arguments.pairs or [1_000_000, 10_000_000, 40_000_000]:
            directory = (arguments.directory or Path(name)) / str(pairs)
            if not directory.exists():
                write_lengths(directory, pairs)
            for corpora in arguments.corpora:
                first = {"pairs": pairs, "corpora": corpora}
                for layout, share in itertools.product(("padded", "packed"), (0.0, 0.5)):
                    words = ["start", str(directory), str(corpora), layout, str(share)]
                    _evict(directory)
                    cold = _in_process(*words)
                    found = [_in_process(*words) for _ in range(arguments.rounds)]
                    medians = {key: statistics.median(each[key] for each in found) for key in cold}
                    row = {**first, "layout": layout, "from": 100 * share, **medians, "cold": cold["first update"]}
                    starts.append(row)
                _evict(directory)
                reading += [{**first, **row} for row in _in_process("read", str(directory), str(corpora))]
                _evict(directory)
                row = _in_process("wait", str(directory), str(corpora), str(arguments.step))
                waiting.append({**first, **row})
            if arguments.directory is None:
                shutil.rmtree(directory)
    seconds = dict.fromkeys(("ready", "first update", "cold", "step", "waited", "longest"), "{:.2f} s")
    amounts = {"own memory": "{:,.0f} MiB", "read": "{:,.0f} KiB", "used": "{:,.1f} KiB"}
    formats = {"pairs": "{:,}", "from": "{:.0f}%", **seconds, **amounts}
    return Results(
        tables={
            name: Table.of(rows, formats)
            for name, rows in (("start", starts), ("reading", reading), ("waiting", waiting))
        }
    )


def _in_process(*words: str) -> Any:
    return json.loads(subprocess.check_output([sys.executable, __file__, *words]))


def _report(what: str, directory: str, corpora: str, *more: str) -> object:
    if what == "start":
        return _start(Path(directory), int(corpora), more[0], float(more[1]))
    if what == "read":
        return _bytes_read(Path(directory), int(corpora))
    return _waiting(Path(directory), int(corpora), float(more[0]))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_report(*sys.argv[1:])))
