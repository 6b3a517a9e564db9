"""The same run under every engine: same losses, norms and weights; probed, stopped and restored: the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_nmt.selftest.models import write_corpus
from tests.support import ROOT, run_ranks

FULL = ["plain", "zero0", "zero1", "zero2", "zero3"]
SIXTEEN_BIT = ["plain:bf16", "zero1:bf16", "zero3:bf16", "zero2:fp16"]
RECOMPUTED = [f"{name}+recompute" for name in ("zero0", "zero2", "zero3", "zero3:bf16")]

# Methods, and the engines each is run under, by number of ranks. One plain process is what all are compared with.
ENGINES = {
    "vanilla": {1: ["plain", "zero2"], 2: [*FULL, *SIXTEEN_BIT, "offload"], 3: ["zero3"]},
    "deep_decoder": {1: ["plain", "zero2"], 2: [*FULL, *SIXTEEN_BIT, *RECOMPUTED]},
    "exits": {1: ["plain"], 2: ["zero1", "zero3", "zero2:fp16", "zero3+recompute"]},
    "growing": {1: ["plain"], 2: ["zero2", "zero3", "zero1:bf16", "zero2+recompute"]},
    "berts": {1: ["plain"], 2: ["zero1", "zero3+recompute", "zero2:fp16"]},
    "abnet": {1: ["plain"], 2: ["zero3+recompute", "zero2:fp16"]},
}
# The same with two ranks that share a model, on two such pairs.
TENSOR = {
    "vanilla": ["plain", "zero0", "zero1:bf16", "zero3+recompute"],
    "deep_decoder": ["plain+recompute", "zero1", "zero2:fp16", "zero3"],
    "exits": ["zero2", "zero3+recompute"],
    "growing": ["zero0+recompute", "zero3"],
    "berts": ["zero3"],
}
ALL = [(method, ranks, name) for method, by in ENGINES.items() for ranks, names in by.items() for name in names]
ALL += [(method, "2x2", name) for method, names in TENSOR.items() for name in names]
FP32 = [each for each in ALL if ":" not in each[2]]

pytestmark = pytest.mark.timeout(900)  # the first test of a method waits for all its engines

Ranks = int | str
Reports = Callable[[str, Ranks], dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """A function: what each engine reported of a method on so many ranks, by the engine's name."""
    directory: Path = tmp_path_factory.mktemp("engines")
    write_corpus(directory)

    @cache
    def report(method: str, ranks: Ranks) -> dict[str, Any]:
        names = TENSOR[method] if ranks == "2x2" else ENGINES[method][int(ranks)]
        count, tensor = (4, 2) if ranks == "2x2" else (int(ranks), 1)
        out = directory / f"{method}-{ranks}.json"
        worker = [str(ROOT / "tests/parity/engine_worker.py"), str(directory), str(out), method]
        run_ranks([*worker, *names], count, directory, timeout=800, TENSOR_RANKS=str(tensor))
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    return report


@pytest.mark.parametrize(("method", "ranks", "name"), FP32)
def test_losses_norms_and_weights_are_those_of_one_plain_process(
    reports: Reports, method: str, ranks: Ranks, name: str
) -> None:
    reference, ours = reports(method, 1)["plain"], reports(method, ranks)[name]
    assert len(ours["loss"]) == 20
    assert ours["loss"] == pytest.approx(reference["loss"], abs=1e-5, rel=0)
    assert ours["norm"] == pytest.approx(reference["norm"], abs=1e-5, rel=0)
    for theirs, metrics in zip(reference["metrics"], ours["metrics"], strict=True):
        assert metrics == pytest.approx(theirs, abs=1e-5, rel=0)
    for parameter, weight in reference["weights"].items():
        np.testing.assert_allclose(ours["weights"][parameter], weight, rtol=0, atol=1e-5, err_msg=parameter)
    assert reference["loss"][-1] < reference["loss"][0] + 0.2


def test_the_number_of_micro_batches_really_varies(reports: Reports) -> None:
    one, two = reports("vanilla", 1)["plain"]["counts"], reports("vanilla", 2)["zero2"]["counts"]
    assert len(set(one)) > 1 and len(set(two)) > 1
    assert two == [-(-many // 2) for many in one], "two ranks share an update's micro-batches evenly"


@pytest.mark.parametrize(("method", "ranks", "name"), ALL)
def test_probed_and_restored_half_way_the_run_goes_on_bit_for_bit(
    reports: Reports, method: str, ranks: Ranks, name: str
) -> None:
    report = reports(method, ranks)[name]
    straight, resumed = report["resumed_loss"]
    assert straight == resumed
    assert report["resumed_bitwise"]


@pytest.mark.parametrize(("method", "ranks", "name"), [each for each in ALL if ":" in each[2]])
def test_sixteen_bit_follows_fp32(reports: Reports, method: str, ranks: Ranks, name: str) -> None:
    reference, ours = reports(method, 1)["plain"], reports(method, ranks)[name]
    assert sum(ours["skipped"]) <= 2
    assert ours["loss"] == pytest.approx(reference["loss"], rel=0.03)


@pytest.mark.parametrize(("ranks", "name"), [each[1:] for each in ALL if each[0] == "growing"])
def test_a_frozen_bottom_keeps_its_bits(reports: Reports, ranks: Ranks, name: str) -> None:
    reference, ours = reports("growing", 1)["plain"]["weights"], reports("growing", ranks)[name]["weights"]
    frozen = [parameter for parameter in reference if parameter.startswith("bottom.")]
    assert len(frozen) > 20
    assert all(ours[parameter] == reference[parameter] for parameter in frozen)
