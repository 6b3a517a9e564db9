"""The training state under each engine: planned and allocated bytes, and collectives that gather it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, random_corpus, run_ranks

ENGINES = ["plain", "plain:bf16", "zero0", "zero2", "zero3", "zero1:bf16", "zero3:bf16"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("state")
    random_corpus(directory, pairs=100, vocab=60, seed=1)
    out = directory / "report.json"
    worker = [str(ROOT / "tests/distributed/state_worker.py"), str(directory), str(out)]
    run_ranks([*worker, *ENGINES], 2, directory)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


@pytest.mark.parametrize("name", ENGINES)
def test_weights_and_optimizer_take_the_planned_bytes(report: dict[str, Any], name: str) -> None:
    held, planned, trained = (report[name][key] for key in ("held", "planned", "trained"))
    expected = planned["weights"] + planned["optimizer"]
    if name.startswith("zero3"):  # ZeRO-3 keeps the gradients and the bucket that reduces them
        width = 2 if ":" in name else 4
        expected += planned["gradients"] + width * 50_000_000
    if name == "zero1:bf16":  # in which DeepSpeed keeps the gradients between updates
        expected += planned["gradients"]
    assert held == pytest.approx(expected, rel=0.1)
    assert trained > 4_000_000
    assert len({*report[name]["totals"]}) == (0 if name.startswith("zero3") else 1), "replicas begin alike"


@pytest.mark.parametrize("name", ENGINES)
def test_the_state_of_a_layer_is_gathered_by_one_collective(report: dict[str, Any], name: str) -> None:
    gathered = report[name]["gathered"]
    sharded = name.startswith(("zero1", "zero2", "zero3"))
    # Four layers, and the parameters before, between and after those of encoder and decoder.
    assert gathered["weights"] == gathered["state"] == (7 if sharded else 0)
    assert gathered["count"] > 60 and not gathered["differing"]
    if name.startswith("zero"):  # ZeRO-3 partitions a model before DeepSpeed moves it to the device
        assert report[name]["whole"] == [0 if name.startswith("zero3") else report[name]["trained"]]
