"""Time to make the micro-batches of an update from the corpus, by layout.

    python benchmarks/run.py collating [--rounds 30]

Lengths of news text, updates of 32,768 target tokens, micro-batches of up to 8,192. A thread makes them beside the
training, and each millisecond in which it holds Python's lock is one without launches. Dividing an update among
micro-batches is not counted. To compare two states of the code, run it in turns with each on the PYTHONPATH.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpu.harness import write_corpus
from records import Results, Table
from timing import add_rounds, in_turns

from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader

VOCABULARY = Vocabulary(32000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 30)


def run(arguments: argparse.Namespace) -> Results:
    """Time the updates, in milliseconds of the thread."""
    pairs: dict[str, list[int]] = {"packed": [], "padded": []}
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 60000, VOCABULARY)

        def work(layout: str) -> Callable[[int], Callable[[], None]]:
            config = BatchConfig(update_tokens=32768, micro_tokens=8192, layout=layout)
            loader = TrainLoader.of_corpus(corpus, config, 1, 0, 1, VOCABULARY)
            window = loader.order.sample()

            def prepare(number: int) -> Callable[[], None]:
                makers = loader._makers(window, window[number % (len(window) - 1)])

                def once() -> None:
                    batches = [make(UpdateInfo()) for make in makers]
                    pairs[layout].append(sum(len(batch.sentence_ids_B) for batch in batches))

                return once

            return prepare

        taken = in_turns({layout: work(layout) for layout in pairs}, arguments.rounds, clock=time.thread_time)
    rows = [
        {"layout": name, "ms an update": 1e3 * statistics.median(each), "pairs": statistics.mean(pairs[name])}
        for name, each in taken.items()
    ]
    formats = {"ms an update": "{:.2f}", "pairs": "{:,.0f}"}
    return Results(tables={"time": Table.of(rows, formats)}, rounds=taken)
