"""Speed of the work on data before and between updates.

    python benchmarks/data.py prepare [--pairs 100000 1000000] [--workers 1 2] [--rounds 3]
    python benchmarks/data.py plan [--pairs 1000000 10000000 40000000]

`prepare` cleans and encodes pairs of the sample corpus with each number of workers, with a vocabulary that was
trained before, and compares encoding with SentencePiece's own encoding of lists of lines in as many threads, which is
the limit.

`plan` starts a run on corpora of these sizes at its beginning and in the middle of an epoch, each in a process of its
own.

All variants of `prepare` run in turn in each round, so that others' load on the machine meets all of them. The table
has medians of pairs a second of wall time, and of pairs a second of CPU time, which such a load changes less.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from plans import write_lengths

from deepspeed_nmt.console import output
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data import preparation as prepare_module
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.sample import LANGUAGES, write_sample

VOCABULARY_PAIRS = 30_000
BATCH = 10_000

Times = dict[tuple[str, int], list[tuple[float, float]]]
"""Wall and CPU seconds of each round by (work, number of workers)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="cleaning and encoding in worker processes")
    prepare.add_argument(
        "--pairs", type=int, nargs="+", default=[100_000], help="sizes of the text (default: 100000)"
    )
    prepare.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of workers (default: 1 2)")
    prepare.add_argument("--rounds", type=int, default=3, help="measurements of each variant (default: 3)")
    prepare.set_defaults(run=measure_prepare)
    plan = commands.add_parser("plan", help="start of a run on a large corpus")
    plan.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000, 40_000_000], help="sizes")
    plan.set_defaults(run=measure_plan)
    arguments = parser.parse_args()
    arguments.run(arguments)


def measure_plan(arguments: argparse.Namespace) -> None:
    """Measure starts of runs for each size of the corpus."""
    output(f"{'pairs':>12}{'layout':>8}{'from':>6}{'ready':>9}{'first update':>14}{'own memory':>12}")
    with tempfile.TemporaryDirectory() as name:
        for pairs in arguments.pairs:
            directory = Path(name) / str(pairs)
            write_lengths(directory, pairs)
            for layout, share in itertools.product(("padded", "packed"), (0.0, 0.5)):
                command = [sys.executable, str(Path(__file__).with_name("plans.py")), str(directory), layout]
                found = json.loads(subprocess.check_output([*command, str(share)]))
                output(
                    f"{pairs:>12,}{layout:>8}{share:>6.0%}{found['ready']:>7.2f} s{found['first']:>12.2f} s"
                    f"{found['memory']:>8.0f} MiB"
                )
            shutil.rmtree(directory)


def measure_prepare(arguments: argparse.Namespace) -> None:
    """Measure `prepare` for each size of the text."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        vocabulary = _prepared(place / "small", VOCABULARY_PAIRS, place / "vocabulary", vocab_size=8000)
        for pairs in arguments.pairs:
            _measure_size(place / str(pairs), pairs, vocabulary, arguments)


def _measure_size(text: Path, pairs: int, vocabulary: Path, arguments: argparse.Namespace) -> None:
    times: Times = defaultdict(list)
    write_sample(text, train=pairs, valid=100, test=1, seed=1)
    load = os.getloadavg()[0]
    for _ in range(arguments.rounds):
        for workers in arguments.workers:
            with _stages_timed(times, workers), _timed(times["prepare", workers]):
                _prepared(text, pairs, text / "data", vocab_from=vocabulary, workers=workers, overwrite=True)
            with _timed(times["SentencePiece", workers]):
                _encode_in_threads(text, vocabulary, workers)
    output(f"\n{pairs:,} pairs, load {load:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    output(f"{'':<26}{'pairs/s':>10}{'times 1st':>11}{'pairs/CPU s':>13}")
    for work in ("clean", "encode", "SentencePiece", "prepare"):
        first = median(wall for wall, _ in times[work, arguments.workers[0]])
        for workers in arguments.workers:
            wall, cpu = (median(each) for each in zip(*times[work, workers], strict=True))
            unit = "threads" if work == "SentencePiece" else "workers"
            label = f"{work}, {workers} {unit}"
            output(f"{label:<26}{pairs / wall:>10,.0f}{first / wall:>11.2f}{pairs / cpu:>13,.0f}")
    for workers in arguments.workers:
        share = median(
            limit / ours
            for (ours, _), (limit, _) in zip(times["encode", workers], times["SentencePiece", workers], strict=True)
        )
        output(
            f"encoding with {workers} workers has {share:.0%} of the speed of SentencePiece with {workers} threads"
        )


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
    tokenizer = open_tokenizer(vocabulary)
    for side, language in zip(SIDES, LANGUAGES, strict=True):
        with (text / f"train.{language}").open(encoding="utf-8") as lines:
            while batch := list(islice(lines, BATCH)):
                tokenizer.encode_batch(batch, side, threads)


@contextmanager
def _stages_timed(times: Times, workers: int) -> Iterator[None]:
    """Measure cleaning and encoding of training text by themselves."""

    def timed(work: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            kept = times[work, workers] if "valid" not in arguments else []
            with _timed(kept):
                return stage(*arguments)

        return run

    with (
        mock.patch.object(prepare_module, "clean_text", timed("clean", prepare_module.clean_text)),
        mock.patch.object(prepare_module, "encode_split", timed("encode", prepare_module.encode_split)),
    ):
        yield


@contextmanager
def _timed(kept: list[tuple[float, float]]) -> Iterator[None]:
    """Append wall and CPU seconds of the block, those of ended children included."""
    gc.collect()
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    kept.append((time.perf_counter() - wall, sum(os.times()[:4]) - cpu))


if __name__ == "__main__":
    main()
