"""Sides of a comparison, and the update at which metrics part."""

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    """benchmarks/compare_commits.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("compare_commits")
        del sys.modules["compare_commits"]


def test_metrics_part_at_their_first_difference(compare: ModuleType) -> None:
    old = {"loss": {1: 2.0, 2: 4.0, 3: 8.0}, "norm": {1: 1.0, 2: 1.0}, "same": {1: math.nan}, "small": {1: 1e-9}}
    new = {"loss": {1: 2.0, 2: 4.4, 3: 10.0}, "norm": {1: 1.5, 2: 1.0}, "same": {1: math.nan}, "small": {1: 2e-9}}
    found = {row["metric"]: row for row in compare.find_partings(old, new, 0.0)}
    assert list(found) == ["small", "norm", "loss"]
    assert (found["loss"]["parts at"], found["loss"]["at"]) == (2, 3)
    assert found["loss"]["by"] == pytest.approx(0.4 / 4.4) and found["loss"]["at most"] == pytest.approx(0.2)
    assert found["norm"]["parts at"] == found["norm"]["at"] == 1
    assert [row["metric"] for row in compare.find_partings(old, new, 1e-5)] == ["norm", "loss"]
    (lacking,) = compare.find_partings({"loss": {1: 2.0}}, {"loss": {1: 2.0, 2: 3.0}}, 0.5)
    assert lacking["parts at"] == 2 and math.isinf(lacking["by"])
