"""Queries, keys and values as one matrix product, as on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels.choice import Kernels, use_kernels
from deepspeed_nmt.nn.attention import MultiHeadAttention


class Joining(Kernels):
    """Kernels that join products on a CPU, too."""

    def joins_products(self, x: Tensor) -> bool:
        return torch.is_grad_enabled()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights of all products so far."""
    seen = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def attend(attention: MultiHeadAttention, across: bool) -> list[Tensor]:
    """Return the output, and the gradients of the inputs and of all parameters."""
    torch.manual_seed(2)
    x, memory = torch.randn(2, 2, 5, 12, dtype=torch.float64).requires_grad_().unbind()
    out = attention(x, memory if across else x).total()
    inputs = [x, memory] if across else [x]
    return [out, *torch.autograd.grad(out.square().sum(), [*inputs, *attention.parameters()])]


@pytest.mark.parametrize("across", [False, True])
def test_one_product_equals_several(across: bool, products: list[tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    attention = MultiHeadAttention(12, 3).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    apart = attend(attention, across)
    use_kernels(attention, Joining())
    products.clear()
    for ours, theirs in zip(attend(attention, across), apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert products == ([(24, 12), (12, 12), (12, 12)] if across else [(36, 12), (12, 12)])
    products.clear()
    with torch.no_grad():  # Nothing is gained without a backward pass.
        attention(*[torch.randn(1, 4, 12, dtype=torch.float64)] * 2)
    assert products == [(12, 12)] * 4
