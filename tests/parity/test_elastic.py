"""A run resumed in another layout continues the same loss curve."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from deepspeed_nmt.parity import write_corpus
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.support import ROOT, run_ranks

METHOD = "deep_decoder"
HALF, END = 5, 10
# Engine, number of ranks, tensor-parallel ranks among them.
Layout = tuple[str, int, int]
ONE: Layout = ("plain", 1, 1)
ZERO2: Layout = ("zero2", 2, 1)
PACKED: Layout = ("plain+packed", 2, 1)
TENSOR: Layout = ("zero1+recompute", 2, 2)

Segment = Callable[[Layout, int, int, Path | None], tuple[list[float], Path]]


@pytest.fixture(scope="module")
def segment(tmp_path_factory: pytest.TempPathFactory) -> Segment:
    """A function that trains in a layout, from a checkpoint or from the start, and returns losses and checkpoint."""
    directory: Path = tmp_path_factory.mktemp("elastic")
    write_corpus(directory)

    @cache
    def run(layout: Layout, first: int, last: int, start: Path | None) -> tuple[list[float], Path]:
        engine, ranks, tensor = layout
        store = directory / f"{engine}-{ranks}-{tensor}-from-{start.parent.name if start else 'start'}"
        out = store.with_suffix(".json")
        worker = [str(ROOT / "tests/parity/elastic_worker.py"), str(directory), METHOD, engine]
        words = [*worker, str(first), str(last), str(start or "-"), str(store), str(out)]
        run_ranks(words, ranks, directory, TENSOR_RANKS=str(tensor))
        return json.loads(out.read_text()), store / f"update-{last:07d}"

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ZERO2, ("zero3", 4, 1)),
        (ZERO2, ("plain+packed", 1, 1)),
        (PACKED, ("zero2", 2, 1)),
        (ZERO2, ("zero3+recompute", 4, 2)),
        (TENSOR, ONE),
    ],
)
def test_the_loss_curve_continues(segment: Segment, before: Layout, after: Layout) -> None:
    whole, _ = segment(ONE, 1, END, None)
    half, checkpoint = segment(before, 1, HALF, None)
    rest, _ = segment(after, HALF + 1, END, checkpoint)
    assert [*half, *rest] == pytest.approx(whole, abs=1e-5, rel=0)


def test_a_checkpoint_of_tensor_parallel_ranks_has_whole_tensors(segment: Segment) -> None:
    _, whole = segment(ONE, 1, END, None)
    _, sliced = segment(TENSOR, 1, HALF, None)
    shapes = [{name: weight.shape for name, weight in Checkpoint(path).weights().items()} for path in (whole, sliced)]
    assert shapes[0] == shapes[1]
    assert shapes[0]["source_embedding.weight"][0] == 61, "the vocabulary is saved without its padding"
