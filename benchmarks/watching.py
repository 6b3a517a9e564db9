"""Cost of what a run records beside its losses, as a share of its training, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/run.py watching [--rounds 8]

The model is transformer_base (6+6 layers, D=512, V=32,000) in fp32. An update has one micro-batch of about 2,048
target tokens, a sixteenth of that of the recipe, so the shares of a real run are smaller. All is timed in one
process: the calls by which the engine measures norms, in each second update, and the other parts by themselves.
Shares are those of the default settings, norms each 100 updates, with a validation (three images) and an event each
1,000.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import Results, Table
from step import batches
from timing import add_rounds, in_turns

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.engine import plain
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.attention_images import AttentionImages
from deepspeed_nmt.train.events import Events
from deepspeed_nmt.train.log import Metrics, norms_by_layer
from deepspeed_nmt.train.optimizers.adam import AdamWConfig
from deepspeed_nmt.train.progress import Progress

V = Vocabulary(32_000)
NORMS_EVERY, VALIDATE_EVERY = 100, 1000
MEASURING = ("squares_of", "squared_changes", "whole_squares")
"""Functions by which the engine measures."""


class Numbers:
    """A tokenizer whose pieces are the numbers of the tokens."""

    vocabulary = V

    def pieces(self, tokens: list[int], side: str = "target") -> list[str]:
        """Return the pieces of some tokens."""
        return [str(token) for token in tokens]


def corpus_in(directory: Path) -> Corpus:
    """Return a validation corpus of three sentences of 25 tokens."""
    with CorpusWriter(directory, "valid", V.size) as writer:
        writer.append(*[[[4 + row] * 25 for row in range(3)]] * 2)
    return Corpus(directory, "valid")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 8)


def run(arguments: argparse.Namespace) -> Results:
    """Measure the parts and their shares."""
    rounds = arguments.rounds
    torch.manual_seed(1)
    world = World(0, 1, 0, torch.device("cpu"))
    module = TrainModule(build_transformer(TransformerConfig(), V), Objective(LabelSmoothed(0.1, V.pad)))
    engine = plain.PlainEngine(module, AdamWConfig(weight_decay=0.01), "fp32", world)
    measured = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal measured
            started = time.perf_counter()
            result = function(*arguments, **options)
            measured += time.perf_counter() - started
            return result

        return call

    for name in MEASURING:
        setattr(plain, name, timed(getattr(plain, name)))
    updates, norms = [], []
    values: dict[str, float] = {}
    for number, batch in enumerate(batches(2 * rounds + 2)):
        measured, started = 0.0, time.perf_counter()
        result = engine.update([batch], batch.target_tokens, 1e-4, measure=number % 2 == 1)
        elapsed = time.perf_counter() - started
        if number > 1:  # the first ones warm up
            (norms if result.squares else updates).append(measured if result.squares else elapsed)
        if result.squares is not None:
            values = norms_by_layer(result.squares)
    update = statistics.median(updates)
    names = {
        "norms": "norms of gradient and change",
        "values": f"their {len(values)} values in the log",
        "drawn": "attention of 3 sentences, drawn",
        "images": "its images in the log",
        "event": "an event",
    }
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        draw = AttentionImages(corpus_in(directory), Numbers(), 3)  # type: ignore[arg-type]
        model = module.model.eval()
        images = draw(model, world.device)
        with Metrics(directory, True, 0, 10) as metrics, Events(directory, True) as events:
            works: dict[str, Callable[[], object]] = {
                "values": lambda: metrics.log(Progress(update=1), values),
                "drawn": lambda: draw(model, world.device),
                "images": lambda: metrics.show(1, {}, images),
                "event": lambda: events.record("best", 1, "best"),
            }
            taken = in_turns({name: lambda _, work=work: work for name, work in works.items()}, rounds)
    taken = {"norms": norms, **taken}
    rows: list[dict[str, object]] = []
    total = 0.0
    for name, label in names.items():
        seconds, every = statistics.median(taken[name]), NORMS_EVERY if name[0] in "nv" else VALIDATE_EVERY
        share = 100 * seconds / every / update
        total += share
        rows.append({"part": label, "time": 1e3 * seconds, "each": every, "share of training": share})
    rows.append({"part": "all", "share of training": total})
    formats = {"time": "{:.2f} ms", "each": "{:,} updates", "share of training": "{:.4f}%"}
    return Results(tables={"parts": Table.of(rows, formats)}, rounds={**taken, "update": updates})
