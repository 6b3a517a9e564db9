"""The same run under every engine: same losses, same norms, same weights; stopped and restored: the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, random_corpus, run_ranks

ONE_RANK = ["plain", "zero2"]
TWO_RANKS = ["plain", "zero0", "zero1", "zero2", "zero3"]
SIXTEEN_BIT = ["plain:bf16", "zero1:bf16", "zero3:bf16", "zero2:fp16"]


@pytest.fixture(scope="module", params=["vanilla", "deep_decoder", "exits", "growing"])
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], dict[str, Any]]:
    """What each engine reported, by (ranks, engine)."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    random_corpus(directory, pairs=300, vocab=60, seed=1)
    worker = str(ROOT / "tests/parity/engine_worker.py")
    found = {}
    for ranks, engines in ((1, ONE_RANK), (2, TWO_RANKS + SIXTEEN_BIT)):
        out = directory / f"{ranks}.json"
        run_ranks([worker, str(directory), str(out), request.param, *engines], ranks, directory, timeout=400)
        found.update({(ranks, name): report for name, report in json.loads(out.read_text()).items()})
    return found


ALL = [(1, name) for name in ONE_RANK] + [(2, name) for name in TWO_RANKS]


@pytest.mark.parametrize("which", ALL)
def test_losses_norms_and_weights_are_those_of_one_plain_process(
    reports: dict[tuple[int, str], dict[str, Any]], which: tuple[int, str]
) -> None:
    reference, ours = reports[1, "plain"], reports[which]
    assert len(ours["loss"]) == 20
    assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5, rel=0)
    assert ours["norm"] == pytest.approx(reference["norm"], abs=1e-5, rel=0)
    for theirs, terms in zip(reference["terms"], ours["terms"], strict=True):
        assert terms == pytest.approx(theirs, abs=1e-5, rel=0)
    for name, weight in reference["weights"].items():
        assert ours["weights"][name] == pytest.approx(weight, abs=1e-5, rel=0), name
    assert reference["loss"][-1] < reference["loss"][0] + 0.2


def test_the_number_of_micro_batches_really_varies(reports: dict[tuple[int, str], dict[str, Any]]) -> None:
    one, two = reports[1, "plain"]["counts"], reports[2, "zero2"]["counts"]
    assert len(set(one)) > 1 and len(set(two)) > 1
    assert all(few < many for few, many in zip(two, one, strict=True)), "two ranks accumulate less than one"


@pytest.mark.parametrize("which", [*ALL, *((2, name) for name in SIXTEEN_BIT)])
def test_restored_half_way_the_run_goes_on_bit_for_bit(
    reports: dict[tuple[int, str], dict[str, Any]], which: tuple[int, str]
) -> None:
    straight, resumed = reports[which]["resumed_loss"]
    assert straight == resumed
    assert reports[which]["resumed_bitwise"]


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_sixteen_bit_follows_fp32(reports: dict[tuple[int, str], dict[str, Any]], name: str) -> None:
    reference, ours = reports[1, "plain"], reports[2, name]
    assert sum(ours["skipped"]) <= 2
    assert ours["loss"] == pytest.approx(reference["loss"], rel=0.03)
