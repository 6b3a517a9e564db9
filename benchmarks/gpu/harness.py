"""Common code of the parts: rows of results, timing on a device, and a synthetic corpus with realistic lengths."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.planning.gpus import kind_of

sys.path.append(str(Path(__file__).resolve().parents[1]))

from records import Record, Results, Table, number
from timing import seconds_of

VOCABULARY, TINY_VOCABULARY = Vocabulary(33_000), Vocabulary(200)
"""Vocabulary of all models that are measured, and of rehearsals."""
LENGTHS = (
    ((1, 4), 2), ((5, 8), 6), ((9, 12), 9), ((13, 16), 12), ((17, 20), 12), ((21, 24), 12), ((25, 28), 11),
    ((29, 32), 9), ((33, 40), 12), ((41, 48), 7), ((49, 64), 6), ((65, 96), 2),
)  # fmt: skip
"""Source lengths in tokens with EOS, and the percentage of sentences: news text with 33,000 BPE tokens, rounded."""
LENGTH_RATIO, LENGTH_SPREAD = 1.05, 0.18
"""Median of target length / source length, and standard deviation of its logarithm."""

NO_KERNELS = (
    "the profiler saw no kernels: this process may not use CUPTI; let it "
    "(NVreg_RestrictProfilingToAdminUsers=0, or CAP_SYS_ADMIN), and end other profilers"
)

Values = Mapping[str, object]


class Skipped(Exception):  # noqa: N818
    """A measurement that is not possible here; the message gives the reason."""


class Bench:
    """The results of one part, written to disk after every row, so that a part that is killed keeps its rows.

    Args:
        part: name of the part, and of its files.
        out: directory of the results.
        device: device to measure.
        tiny: True for a rehearsal, in which models and data are tiny and the figures meaningless.
        limit_s: seconds after which no further measurement is started.
        only: rows to measure, each named by one of its labels; none for all.
    """

    def __init__(
        self, part: str, out: Path, device: torch.device, tiny: bool, limit_s: float, only: Iterable[str] = ()
    ) -> None:
        self.part, self.out, self.device, self.tiny = part, out, device, tiny
        self.rows: list[dict[str, object]] = []
        self._started, self._limit_s, self._load = time.monotonic(), limit_s, os.getloadavg()[0]
        self._only, self._known = frozenset(only), set[str]()
        names = (f"{part}{suffix}" for suffix in itertools.chain([""], map("-{}".format, itertools.count(2))))
        self._name = next(name for name in names if not (out / f"{name}.json").exists())

    @property
    def on_gpu(self) -> bool:
        """True on a GPU."""
        return self.device.type == "cuda"

    @property
    def half(self) -> Precision:
        """The 16-bit precision of the device: fp16 on a GPU without bf16, otherwise bf16."""
        return "fp16" if self.on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False) else "bf16"

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the models."""
        return TINY_VOCABULARY if self.tiny else VOCABULARY

    @property
    def seconds_left(self) -> float:
        """Seconds until the limit of the part."""
        return self._limit_s - (time.monotonic() - self._started)

    @property
    def failed(self) -> bool:
        """True if a measurement has failed; one that was skipped has not."""
        return any(str(row["status"]).startswith("failed") for row in self.rows)

    @property
    def unknown(self) -> list[str]:
        """Names of rows to measure that no row has."""
        return sorted(self._only - self._known)

    @property
    def known(self) -> list[str]:
        """Names that rows have."""
        return sorted(self._known)

    def wants(self, **labels: object) -> bool:
        """Return True if a row is to be measured."""
        names = {str(value) for value in labels.values()}
        self._known |= names
        return not self._only or bool(names & self._only)

    def measure(
        self, run: Callable[[], Values | Iterator[Values]], in_any_case: bool = False, **labels: object
    ) -> Values:
        """Run a measurement and add its row. If it fails, the row says why, and the part goes on.

        Args:
            run: returns the values of the row, or yields them in turn so that a failure loses only those that are
                missing; may raise :class:`Skipped`.
            in_any_case: True to run it though the time is over.
            labels: first columns of the row.

        Returns:
            The values; empty if there are none, or if the row is not wanted.
        """
        if not self.wants(**labels):
            return {}
        begun, status = time.monotonic(), "ok"
        values: dict[str, object] = {}
        row: dict[str, object] = {**labels, "status": "not finished"}
        self.rows.append(row)
        try:
            if self.seconds_left <= 0.0 and not in_any_case:
                raise Skipped("no time left")
            found = run()
            for each in [found] if isinstance(found, Mapping) else found:
                values |= each
                row.update(each)
                self._save()
        except Skipped as reason:
            status = f"skipped: {reason}"
        except Exception as error:
            traceback.print_exc()
            status = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        del row["status"]
        row["status"] = status  # the last column
        self._save()
        spent = time.monotonic() - begun
        shown = " ".join(f"{name}={number(value)}" for name, value in row.items())
        sys.stdout.write(f"{self.part} [{spent:.1f} s]: {shown}\n")
        sys.stdout.flush()
        if self.on_gpu:
            gc.collect()
            with contextlib.suppress(RuntimeError):  # a failed kernel makes every later call fail, too
                torch.cuda.empty_cache()
        return values

    def _save(self) -> None:
        """Write the record PART.json; PART-2.json if there are results of an earlier run, and so on."""
        titles = [*dict.fromkeys(name for row in self.rows for name in row if name != "status"), "status"]
        table = Table.of({name: row.get(name) for name in titles} for row in self.rows)
        seconds = round(time.monotonic() - self._started, 1)
        command = shlex.join(["python", "benchmarks/gpu/run.py", *sys.argv[1:]])
        settings = {"tiny": self.tiny, "seconds": seconds, "device": str(self.device)}
        results = Results(tables={self.part: table})
        Record.of(self._name, results, command=command, load=self._load, settings=settings).write(self.out)


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of 16-bit products by the data sheet, in operations a second; None if it is not known."""
    kind = kind_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return kind.tflops * 1e12 if kind is not None and kind.tflops else None


class DeviceTimer:
    """Timer of the kernels that a function launches, without the launching.

    The GPU spins while the host queues all kernels, so that none of them waits for its launch. Before they start, the
    GPU's cache is flushed. A function that waits for the GPU cannot be timed in this way.

    Args:
        device: the GPU; on a CPU the timer returns wall time.
    """

    _CYCLES_PER_S = 2.0e9  # at least the clock of any GPU, so that a spin is never too short by much

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(256 * 2**20 if device.type == "cuda" else 0, dtype=torch.int8, device=device)

    def milliseconds(self, once: Callable[[], object], rounds: int, warmup: int = 2) -> float:
        """Return the median time of a function's kernels.

        Args:
            once: function to time.
            rounds: number of measurements.
            warmup: number of calls before them, which compile kernels.
        """
        for _ in range(warmup):
            once()
        queueing = seconds_of(once, self.device)
        return statistics.median(self._once(once, queueing) for _ in range(rounds))

    def _once(self, once: Callable[[], object], queueing_s: float) -> float:
        if self.device.type != "cuda":
            return 1e3 * seconds_of(once, self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(self._CYCLES_PER_S * (1.5 * queueing_s + 2e-4)))
        self._flush.zero_()
        start.record()
        once()
        end.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(end))


# The synthetic corpus


def sentence_lengths(count: int, seed: int = 1) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw source and target lengths, EOS included, from the histogram. Shape: -> two of (count,)."""
    rng = np.random.default_rng(seed)
    share = np.array([percent for _, percent in LENGTHS], dtype=float)
    bins = np.array([bounds for bounds, _ in LENGTHS])[rng.choice(len(LENGTHS), size=count, p=share / share.sum())]
    source = rng.integers(bins[:, 0], bins[:, 1] + 1)
    ratio = LENGTH_RATIO * np.exp(LENGTH_SPREAD * rng.standard_normal(count))
    target = np.clip(np.rint(source * ratio), 1, 2 * LENGTHS[-1][0][1]).astype(np.int64)
    return source, target


def write_corpus(directory: Path, pairs: int, vocabulary: Vocabulary) -> Corpus:
    """Write a corpus of random tokens whose lengths follow the histogram, and open it."""
    rng = np.random.default_rng(2)
    first = vocabulary.unk + 1
    sides = []
    for lengths in sentence_lengths(pairs):
        tokens = rng.integers(first, vocabulary.size, size=int((lengths - 1).sum()))
        ends = np.cumsum(lengths - 1)[:-1]
        sides.append([sentence.tolist() for sentence in np.split(tokens, ends)])
    with CorpusWriter(directory, "train", vocabulary.size) as writer:
        writer.append(*sides)
    return Corpus(directory, "train")
