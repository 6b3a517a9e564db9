"""Calls of apex, with fakes for its compiled modules that check the arguments as apex's own wrappers pass them."""

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.kernels import apex_ops, torch_ops


def rows_per_block(keys: int) -> int:
    """Compute the rows of a block as apex does: 128 threads, at most one warp for each row or for two short rows."""
    width = 1
    while width < keys:
        width *= 2
    return (128 // (width if width < 32 else 32)) * (2 if width <= 128 else 1)


@pytest.fixture(autouse=True)
def _fake_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        assert shape == (x.shape[-1],)
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    def masked(scores: Tensor, hidden: Tensor, scale: float) -> Tensor:
        assert scores.shape[2] > 1 and scores.shape[2] % rows_per_block(scores.shape[3]) == 0
        assert hidden.dtype == torch.uint8 and hidden.shape == (scores.shape[0], 1, *scores.shape[2:])
        return torch.softmax((scores * scale).masked_fill(hidden.bool(), -10000.0), -1)

    def causal(scores: Tensor, scale: float) -> Tensor:
        assert scores.shape[0] % rows_per_block(scores.shape[2]) == 0
        assert scores.dim() == 3 and scores.shape[1] == scores.shape[2]
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        return torch.softmax((scores * scale).masked_fill(~seen, -10000.0), -1)

    def backward(gradient: Tensor, weights: Tensor, scale: float) -> Tensor:
        inner = (gradient * weights).sum(-1, keepdim=True)
        return gradient.sub_(inner).mul_(weights).mul_(scale)  # in place, like apex

    parts = {
        "apex": {},
        "apex.normalization": {},
        "apex.normalization.fused_layer_norm": {"fused_layer_norm_affine": norm},
        "scaled_masked_softmax_cuda": {"forward": masked, "backward": backward},
        "scaled_upper_triang_masked_softmax_cuda": {"forward": causal, "backward": backward},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_layer_norm() -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    assert torch.equal(apex_ops.layer_norm(x, weight, bias, 1e-5), torch_ops.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_softmax_and_its_gradient(causal: bool, masked: bool) -> None:
    torch.manual_seed(1)
    scores = torch.randn(2, 32, 64, 64).half().requires_grad_()
    mask = None
    if masked and not causal:
        mask = torch.arange(64)[None, None, None, :] < torch.tensor([40, 0])[:, None, None, None]
    ours = apex_ops.softmax(scores, mask, causal, 0.5)
    theirs = torch_ops.softmax(scores, mask, causal, 0.5)
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-3)
    upstream = torch.randn_like(ours)
    before = upstream.clone()
    one, other = (torch.autograd.grad(each, scores, upstream)[0] for each in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=5e-3, atol=2e-3)
    assert torch.equal(upstream, before), "apex overwrites its input"
    assert type(ours.grad_fn).__name__ != type(theirs.grad_fn).__name__, "apex computed it"


@pytest.mark.parametrize(
    ("dtype", "keys", "causal", "per_head"),
    [
        (torch.float32, 4, False, False),
        (torch.float16, 4096, False, False),
        (torch.float16, 6, True, False),
        (torch.float16, 4, True, False),
        (torch.float16, 72, False, False),
        (torch.float16, 4, False, True),
    ],
)
def test_unsupported_softmaxes_fall_back_to_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keys: int, causal: bool, per_head: bool
) -> None:
    monkeypatch.setitem(sys.modules, "scaled_masked_softmax_cuda", None)
    monkeypatch.setitem(sys.modules, "scaled_upper_triang_masked_softmax_cuda", None)
    scores = torch.randn(1, 2, 4, keys).to(dtype)
    mask = torch.rand(1, 2, 1, keys) < 0.7 if per_head else None
    assert torch.equal(apex_ops.softmax(scores, mask, causal, 1.0), torch_ops.softmax(scores, mask, causal, 1.0))
