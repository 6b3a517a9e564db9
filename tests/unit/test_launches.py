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


@pytest.mark.parametrize(
    ("norm", "encoder", "decoder"),
    [("pre", (12, 22, 115), (20, 37, 157)), ("post", (11, 21, 112), (19, 37, 158))],
)
def test_a_layer_launches_few_kernels(
    launches: ModuleType, norm: str, encoder: tuple[int, int, int], decoder: tuple[int, int, int]
) -> None:
    found = launches.count_layers(norm=norm)
    for layer, (forward, backward, kilobytes) in zip(found, (encoder, decoder), strict=True):
        assert layer.forward <= forward
        assert layer.backward <= backward
        assert layer.bytes <= 1e3 * kilobytes
