"""Coins for each micro-batch: equal on all ranks, in every engine, and in recomputation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from deepspeed_nmt.parity import write_corpus
from tests.support import ROOT, run_ranks


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the worker, by layout and engine."""
    directory = tmp_path_factory.mktemp("coins")
    write_corpus(directory)
    out = directory / "report.json"
    run_ranks([str(ROOT / "tests/parity/coins_worker.py"), str(directory), str(out)], 2, directory)
    content: dict[str, Any] = json.loads(out.read_text())
    return content


@pytest.mark.parametrize(
    ("name", "reference"),
    [("2 plain", "1"), ("2 zero3+recompute", "1"), ("2x1 zero1+recompute", "1x1")],
)
def test_the_kth_micro_batches_of_all_ranks_share_their_coins(
    reports: dict[str, Any], name: str, reference: str
) -> None:
    ours, theirs = reports[name], reports[reference]
    assert max(ours["counts"]) > 1
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5, rel=0)
    for parameter, weight in theirs["weights"].items():
        np.testing.assert_allclose(ours["weights"][parameter], weight, rtol=0, atol=1e-5, err_msg=parameter)


def test_a_run_depends_on_the_number_of_ranks(reports: dict[str, Any]) -> None:
    """Another division of the same updates has other coins."""
    one, two = reports["1x1"], reports["2 plain"]
    assert one["counts"] != two["counts"]
    assert max(abs(a - b) for a, b in zip(one["loss"], two["loss"], strict=True)) > 1e-3
