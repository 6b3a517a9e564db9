"""Tools in benchmarks/: kernels of a layer, counted on the meta device, and the update at which metrics part."""

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    """The benchmark."""
    pytest.importorskip("triton", reason="needs triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import launches

        return sys.modules.pop(launches.__name__)


@pytest.mark.parametrize(
    ("norm", "layout", "encoder", "decoder"),
    [
        ("pre", "packed", [(14, 25.7, 125), (14, 26.3, 136)], [(24, 43.2, 176), (24, 44.3, 193)]),
        ("pre", "padded", [(13, 23.7, 125)], [(22, 41.2, 176)]),
        ("post", "packed", [(12, 23.7, 121)], [(21, 40.2, 170)]),
    ],
)
def test_a_layer_launches_few_kernels(
    launches: ModuleType, norm: str, layout: str, encoder: list[tuple[float, ...]], decoder: list[tuple[float, ...]]
) -> None:
    """The first, and the second micro-batch of an update."""
    layers = launches.count_layers(layout=layout, norm=norm)
    for expected, found in ((encoder, layers["encoder"]), (decoder, layers["decoder"])):
        for layer, (forward, backward, kilobytes) in zip(found, expected, strict=False):
            assert layer.forward <= forward
            assert layer.backward <= backward
            assert layer.bytes <= 1e3 * kilobytes


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
