"""Speed of training in the packed layout relative to the padded one, and time to make their micro-batches.

    OMP_NUM_THREADS=1 python benchmarks/run.py layouts [--rounds 12]

Training: 6+6 layers, D=256, FFN 1,024, 4 heads, V=8,000; lengths of news text; updates of 8,192 target tokens,
micro-batches of up to 2,048. Both layouts make every update in turns; the ratio is the median over the updates. On a
CPU attention is computed in a padded row for each sentence in either layout.

Micro-batches: updates of 32,768 target tokens, micro-batches of up to 8,192, processor time of a thread. A thread
makes them beside the training, and each millisecond in which it holds Python's lock is one without launches. Dividing
an update among micro-batches is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from gpu.harness import write_corpus
from records import Results, Table
from timing import Work, add_rounds, in_turns, ratio

from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 12)


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Time the making of micro-batches, then the updates."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 60000, VOCABULARY)
        rows, made = collating(corpus, arguments.rounds)
        collated = {"collating": Table.of(rows, {"ms an update": "{:.2f}", "pairs": "{:,.0f}"})}
        yield Results(tables=collated, rounds={"collating": made})
        results = training(corpus, arguments.rounds)
        yield Results(tables={**results.tables, **collated}, rounds={**results.rounds, "collating": made})


def collating(corpus: Corpus, rounds: int) -> tuple[list[dict[str, object]], dict[str, list[float]]]:
    """Time the making of micro-batches: rows of the table, and raw seconds."""
    pairs: dict[str, list[int]] = {layout: [] for layout in LAYOUTS}

    def work(layout: str) -> Work:
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

    taken = in_turns({layout: work(layout) for layout in LAYOUTS}, rounds, clock=time.thread_time)
    rows: list[dict[str, object]] = [
        {"layout": name, "ms an update": 1e3 * statistics.median(each), "pairs": statistics.mean(pairs[name])}
        for name, each in taken.items()
    ]
    return rows, taken


def training(corpus: Corpus, rounds: int) -> Results:
    """Time updates."""
    made: dict[str, list[Update]] = {layout: [] for layout in LAYOUTS}
    runs = {}
    for layout in LAYOUTS:
        config = BatchConfig(update_tokens=8192, micro_tokens=2048, layout=layout)
        runs[layout] = engine(), TrainLoader.of_corpus(corpus, config, 1, 0, 1, VOCABULARY).updates(Cursor(), 1)

    def work(layout: str, number: int) -> Callable[[], object]:
        made[layout].append(update := next(runs[layout][1]))
        return lambda: runs[layout][0].update(update.micro_batches, update.target_tokens, 1e-4)

    taken = in_turns({layout: partial(work, layout) for layout in LAYOUTS}, rounds)
    rows = [
        {
            "layout": layout,
            "seconds an update": statistics.median(taken[layout]),
            "micro-batches": statistics.mean(len(update.micro_batches) for update in updates),
            "empty": 100 * statistics.mean(1 - each.real_positions / each.padded_positions for each in updates),
        }
        for layout, (_, *updates) in made.items()
    ]
    formats = {"seconds an update": "{:.2f}", "micro-batches": "{:.1f}", "empty": "{:.1f}%"}
    both = [{"products": "default", "packed / padded": ratio(taken["packed"], taken["padded"])}]
    tables = {"layouts": Table.of(rows, formats), "ratio": Table.of(both, {"packed / padded": "{:.2f}"})}
    return Results(tables=tables, rounds=taken)
