"""Tools in benchmarks/: kernels of a layer, counted on the meta device, and the update at which metrics part."""

import sys
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
