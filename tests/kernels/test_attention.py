"""All implementations of attention against the formula in float64.

Legend: B sentences, H heads, T queries, S keys, K head width.
"""

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.kernels import attention_ops as attention
from deepspeed_nmt.kernels.attention_ops import AttentionChoice, additive_mask
from deepspeed_nmt.kernels.choice import Kernels

WAYS: list[AttentionChoice] = ["sdpa", "fused", "auto"]


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    scores = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()


@pytest.mark.parametrize("masked", ["none", "padding", "causal", "per query", "all masked"])
@pytest.mark.parametrize("way", WAYS)
def test_equals_the_formula(way: AttentionChoice, masked: str, device: torch.device) -> None:
    torch.manual_seed(1)
    keys = 6 if masked == "causal" else 9
    q, k, v = (torch.randn(2, 3, n, 8, device=device, requires_grad=True) for n in (6, keys, keys))
    mask = None
    if masked in ("padding", "all masked"):
        mask = torch.arange(keys, device=device) < torch.tensor([[9], [4]], device=device)
        if masked == "all masked":
            mask[1] = False
        mask = mask[:, None, None, :]
    elif masked == "per query":
        mask = torch.rand(2, 1, 6, keys, device=device) < 0.7
        mask[..., 0] = True
    ours = Kernels(attention=way).attention(q, k, v, mask, masked == "causal")
    expected = formula(q, k, v, mask, masked == "causal")
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)
    upstream = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    if masked == "all masked":  # the formula has no gradient for a fully masked query
        assert all(bool(torch.isfinite(g).all()) for g in gradients)
        assert not gradients[0][1].any() and not gradients[2][1].any()
        return
    for one, other in zip(gradients, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_keeps_the_mean(way: AttentionChoice, device: torch.device) -> None:
    torch.manual_seed(3)
    q, k = torch.zeros(64, 8, 32, 4, device=device), torch.zeros(64, 8, 32, 4, device=device)
    out = Kernels(attention=way).attention(q, k, torch.ones_like(k), dropout_p=0.3)
    assert float(out.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(out.std()) == pytest.approx((0.3 / 0.7 / 32) ** 0.5, rel=0.05)


@pytest.mark.parametrize("keys", [8, 13])
def test_an_additive_mask_hides_the_same_keys_and_needs_no_copy(keys: int, device: torch.device) -> None:
    torch.manual_seed(4)
    mask = (torch.arange(keys, device=device) < torch.tensor([[keys], [4]], device=device))[:, None, None, :]
    made = additive_mask(mask, torch.bfloat16)
    assert made.dtype == torch.bfloat16 and made.shape == mask.shape
    assert torch.equal(made == 0.0, mask) and torch.equal(made == -torch.inf, ~mask)
    assert made.stride(-1) == 1 and all(stride % 8 == 0 for stride in made.stride()[:-1])
    q, k, v = (torch.randn(2, 3, n, 8, device=device) for n in (5, keys, keys))
    expected = Kernels(attention="sdpa").attention(q, k, v, mask)
    torch.testing.assert_close(Kernels(attention="sdpa").attention(q, k, v, additive_mask(mask, q.dtype)), expected)


def test_layers_share_one_additive_mask_in_training_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor | None] = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *a, attn_mask, **k: given.append(attn_mask)
    )
    monkeypatch.setattr(Kernels, "device_type", lambda self, x: "cuda")
    kernels, q = Kernels(attention="sdpa"), torch.randn(2, 1, 3, 8)
    masks = [torch.ones(2, 1, 1, 3, dtype=torch.bool) for _ in range(2)]
    for mask in (*masks, *masks):
        kernels.attention(q, q, q, mask)
    first, second, *again = given
    assert first is not second and first is again[0] and second is again[1]
    assert first is not None and first.dtype == q.dtype
    with torch.no_grad():  # a search, whose recorded graphs find other values in the same mask
        kernels.attention(q, q, q, masks[0])
    assert given[-1] is masks[0]
    kept = len(attention._MADE)
    del masks, mask, given[:]
    assert len(attention._MADE) == kept - 2


def test_a_cpu_trains_bf16_attention_in_fp32() -> None:
    q, k, v = (torch.randn(2, 2, 9, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = Kernels(attention="sdpa").attention(q, k, v)
    exact = attention.sdpa(q.float(), k.float(), v.float(), None, False, 0.0)
    assert out.dtype == torch.bfloat16 and torch.equal(out, exact.bfloat16())
    (gradient,) = torch.autograd.grad(out.float().sum(), v)
    assert gradient.dtype == torch.bfloat16
