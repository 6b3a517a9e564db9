"""Speed of `prepare` with several numbers of workers, beside SentencePiece's own encoding.

    python benchmarks/run.py prepare [--pairs 100000] [--workers 1 2] [--rounds 3]

Pairs of the sample corpus are cleaned and encoded, with a vocabulary that was trained before. SentencePiece's
encoding of lists of lines in as many threads is the limit. All variants run in each round. The table has medians of
pairs a second of wall time, and of pairs a second of CPU time, which other work on the machine changes less.

The second table has the CPU time of each stage with the first number of workers, and what a billion such pairs would
take on 64 hosts of 16 cores by it: CPU time by the number of its tasks that run at once, and 3 seconds for their
start. That is arithmetic, not a measurement: disks and the queue are as fast as here. The text is in 64 sets of
files. Training the vocabulary is not part of it.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from records import Results, Table
from sentencepiece import SentencePieceProcessor
from timing import add_rounds

from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data import preparation as prepare_module
from deepspeed_nmt.data import tasks
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.stages import MAX_RANGES
from deepspeed_nmt.sample import LANGUAGES, write_sample

VOCABULARY_PAIRS = 30_000
BATCH = 10_000
HOSTS, CORES, START_S = 64, 16, 3.0
AT_ONCE = {
    "index": HOSTS,
    "clean": HOSTS * CORES,
    "duplicate": MAX_RANGES,
    "vocabulary": 1,
    "encode": HOSTS * CORES,
    "join": 1,
}
"""Tasks of each stage that run at once on so many hosts."""

Times = dict[tuple[str, int], list[tuple[float, float]]]
"""Wall and CPU seconds of each round by (work, number of workers)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=100_000, help="size of the text (default: %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    add_rounds(parser, 3)


def run(arguments: argparse.Namespace) -> Results:
    """Measure cleaning, encoding, and all of `prepare`."""
    times: Times = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        place, pairs, first = Path(name), arguments.pairs, arguments.workers[0]
        vocabulary = _prepared(place / "small", VOCABULARY_PAIRS, place / "vocabulary", vocab_size=8000)
        text = place / "text"
        write_sample(text, train=pairs, valid=100, test=1, seed=1)
        for _ in range(arguments.rounds):
            for workers in arguments.workers:
                with _stages_timed(times, workers), _timed(times["prepare", workers]):
                    _prepared(text, pairs, text / "data", vocab_from=vocabulary, workers=workers, overwrite=True)
                with _timed(times["SentencePiece", workers]):
                    _encode_in_threads(text, vocabulary, workers)
    rows: list[dict[str, object]] = []
    for work in ("clean", "encode", "SentencePiece", "prepare"):
        for workers in arguments.workers:
            wall, cpu = (median(each) for each in zip(*times[work, workers], strict=True))
            row: dict[str, object] = {"work": work, "workers": workers, "pairs/s": pairs / wall}
            if workers == 1 or work not in AT_ONCE:  # workers go on to the next stage: their time is known at the end
                row["pairs/CPU s"] = pairs / cpu
            rows.append({**row, "ratio": median(wall for wall, _ in times[work, first]) / wall})
    formats = {"pairs/s": "{:,.0f}", "pairs/CPU s": "{:,.0f}", "ratio": "{:.2f}"}
    scaled: list[dict[str, object]] = []
    for stage, at_once in AT_ONCE.items():
        cpu = median(cpu for _, cpu in times[stage, first]) * 1e6 / pairs
        row = {"stage": stage, "CPU s a million pairs": cpu, "tasks at once": at_once}
        scaled.append({**row, "a billion pairs, s": 1000 * cpu / at_once + START_S})
    total = {name: sum(row[name] for row in scaled) for name in ("CPU s a million pairs", "a billion pairs, s")}  # type: ignore[misc]
    scaled.append({"stage": "all", **total})
    of_stages = {"CPU s a million pairs": "{:.2f}", "tasks at once": "{:,}", "a billion pairs, s": "{:,.0f}"}
    rounds = {f"{work}, {workers}": seconds for (work, workers), seconds in times.items()}
    tables = {"speed": Table.of(rows, formats), "stages": Table.of(scaled, of_stages)}
    return Results(tables=tables, rounds=rounds)


def _prepared(text: Path, pairs: int, out: Path, **options: Any) -> Path:
    if not text.exists():
        write_sample(text, train=pairs, valid=100, test=1, seed=2)
    files = {
        f"{split}_{side}": (text / f"{split}.{language}",)
        for split in ("train", "valid")
        for side, language in zip(SIDES, LANGUAGES, strict=True)
    }
    prepare_module.prepare(PrepareOptions.model_validate({**files, "out": out, **options}))
    return out


def _encode_in_threads(text: Path, vocabulary: Path, threads: int) -> None:
    processor = SentencePieceProcessor(model_file=str(vocabulary / "vocabulary.model"))
    for language in LANGUAGES:
        with (text / f"train.{language}").open(encoding="utf-8") as lines:
            while batch := list(islice(lines, BATCH)):
                processor.encode(batch, num_threads=threads)


@contextmanager
def _stages_timed(times: Times, workers: int) -> Iterator[None]:
    """Measure each stage by itself."""
    stage = tasks.run_stage

    def run(work: Any, name: str, *arguments: Any) -> Any:
        with _timed(times[name, workers]):
            return stage(work, name, *arguments)

    def joined(*arguments: Any) -> Any:
        with _timed(times["join", workers]):
            return join(*arguments)

    join = prepare_module.join
    with mock.patch.object(tasks, "run_stage", run), mock.patch.object(prepare_module, "join", joined):
        yield


@contextmanager
def _timed(kept: list[tuple[float, float]]) -> Iterator[None]:
    """Append wall and CPU seconds of the block, those of ended children included."""
    gc.collect()
    wall, cpu = time.perf_counter(), _cpu_seconds()
    yield
    kept.append((time.perf_counter() - wall, _cpu_seconds() - cpu))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)
