"""The planned bytes of each parameter under an engine, compared with the allocated bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, random_corpus, run_ranks

ENGINES = ["plain", "zero0", "zero1", "zero2", "zero3", "zero1:bf16", "zero2:bf16", "zero3:bf16"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory: Path = tmp_path_factory.mktemp("state")
    random_corpus(directory, pairs=100, vocab=60, seed=1)
    out = directory / "report.json"
    worker = [str(ROOT / "tests/distributed/state_worker.py"), str(directory), str(out)]
    run_ranks([*worker, *ENGINES], 2, directory, timeout=200)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_weights_and_optimizer_take_the_planned_bytes(report: dict[str, Any], name: str) -> None:
    held, planned, trained = (report[name][key] for key in ("held", "planned", "trained"))
    expected = planned["weights"] + planned["optimizer"]
    if name.startswith("zero3"):  # ZeRO-3 keeps the gradients and the bucket that reduces them
        width = 2 if ":" in name else 4
        expected += planned["gradients"] + width * 50_000_000
    assert held == pytest.approx(expected, rel=0.1)
    assert trained > 4_000_000
