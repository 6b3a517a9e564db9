"""Kernels and bytes of a layer on a GPU, counted on the meta device."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from deepspeed_nmt.kernels import triton_ops
from tests.support import ROOT


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    """The benchmark."""
    pytest.importorskip("triton", reason="needs triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import launches

        return sys.modules.pop(launches.__name__)


def test_views_and_allocations_are_no_kernels(launches: ModuleType) -> None:
    x = torch.empty(8, 4, device="meta", dtype=torch.bfloat16)
    with launches.Launches().counting() as found:
        total = torch.empty_like(x.view(4, 8).t()[1:]).expand(3, 7, 4)
        assert found.kernels["forward"] == 0
        assert (total + total).shape == (3, 7, 4)
        x.mul_(2.0)
        x.copy_(x.clone())
    assert found.kernels == {"forward": 4, "backward": 0}
    # Reads of an expanded tensor count once; a tensor changed in place is read and written, one copied to is written.
    assert found.bytes["forward"] == 2 * (28 + 28 + 3 * 28) + 3 * 2 * (32 + 32)


def test_products_count_as_kernels_without_bytes(launches: ModuleType) -> None:
    x = torch.empty(8, 4, device="meta", requires_grad=True)
    with launches.Launches().counting() as found:
        y = torch.nn.functional.linear(x, torch.empty(6, 4, device="meta"), torch.empty(6, device="meta"))
        assert (found.kernels["forward"], found.bytes["forward"]) == (1, 0)
        triton_ops.bias_dropout_add(y, None, y, 0.1, 1.0)
    assert (found.kernels["forward"], found.bytes["forward"]) == (2, 3 * 8 * 6 * 4)


def test_lists_of_tensors_take_a_kernel_for_so_many_pieces_or_tensors(launches: ModuleType) -> None:
    def kernels(*sizes: int) -> int:
        one, other = (
            [torch.empty(size, device="meta", dtype=dtype) for size in sizes] for dtype in (None, torch.half)
        )
        with launches.Launches().counting() as found:
            torch._foreach_copy_(one, other)
        assert found.bytes["forward"] == 6 * sum(sizes)
        return int(found.kernels["forward"])

    assert [kernels(*[8] * count) for count in (1, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]
    assert [kernels(size << 16) for size in (1, 320, 321, 641)] == [1, 1, 2, 3]
    assert [kernels(319 << 16, more) for more in (1 << 16, (1 << 16) + 1)] == [1, 2]


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
