"""Attention within packed sentences against the same sentences one by one.

Legend: P rows, H heads, N positions of a row, K head width.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_nmt.kernels import segments
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.segments import SegmentPair, Segments, has_varlen
from tests.varlen import use_varlen_on_a_cpu

QUERIES, KEYS = [5, 3, 7, 1], [4, 6, 2, 3]
ROWS, HEADS, WIDTH = 2, 3, 8


def pair(device: torch.device, causal: bool = False, tails: tuple[int, int] = (5, 1)) -> SegmentPair:
    queries, keys = (Segments.of(each, sum(each) + tail) for each, tail in zip((QUERIES, KEYS), tails, strict=True))
    queries, keys = (each.to(device) for each in (queries, keys))
    return SegmentPair(queries, queries if causal else keys)


def states(size: int, device: torch.device) -> Tensor:
    # As projections of (P,N,D) are: heads beside each other in memory.
    return torch.randn(ROWS, size, HEADS, WIDTH, device=device).transpose(1, 2).requires_grad_()


def one_by_one(q: Tensor, k: Tensor, v: Tensor, chosen: SegmentPair, causal: bool) -> Tensor:
    """Attend in each sentence of each row by itself; zeros in the tail."""
    out = torch.zeros_like(q)
    starts = [each.starts.tolist() for each in chosen]
    for number in range(len(chosen.queries)):
        (a, b), (c, d) = (each[number : number + 2] for each in starts)
        out[:, :, a:b] = Kernels().attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], None, causal)
    return out


@pytest.mark.parametrize("tails", [(5, 1), (0, 0)])
@pytest.mark.parametrize("way", ["auto", "fused"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_rows_equals_that_of_each_sentence(
    causal: bool, way: str, tails: tuple[int, int], device: torch.device
) -> None:
    torch.manual_seed(1)
    chosen = pair(device, causal, tails)
    size, keys = (each.positions.shape[0] for each in chosen)
    q, k, v = states(size, device), states(keys, device), states(keys, device)
    ours = Kernels(attention=way).attention(q, k, v, chosen, causal)  # type: ignore[arg-type]
    expected = one_by_one(q, k, v, chosen, causal)
    real = sum(QUERIES)
    torch.testing.assert_close(ours[:, :, :real], expected[:, :, :real], rtol=1e-5, atol=1e-6)
    assert bool(torch.isfinite(ours).all())
    upstream = torch.randn_like(ours)
    upstream[:, :, real:] = 0.0  # no gradient comes from the tail
    gradients = (torch.autograd.grad(out, (q, k, v), upstream) for out in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 if device.type == "cpu" else 5e-6)


@pytest.mark.parametrize("tails", [(5, 1), (0, 1), (1, 40)])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "efficient"])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_varlen_equals_that_of_each_sentence(
    causal: bool, flash: bool, tails: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's operators, with kernels for CPUs."""
    torch.manual_seed(2)
    use_varlen_on_a_cpu(monkeypatch, flash)
    cpu = torch.device("cpu")
    chosen = pair(cpu, causal, (tails[1], tails[1]) if causal else tails)
    size, keys = (each.positions.shape[0] for each in chosen)
    q, k, v = states(size, cpu), states(keys, cpu), states(keys, cpu)
    ours = Kernels(attention="sdpa").attention(q, k, v, chosen, causal)
    history = ours.grad_fn
    while history is not None and "Attention" not in history.name():
        history = history.next_functions[0][0]
    assert history is not None and ("Flash" in history.name()) == flash
    real, expected = sum(QUERIES), one_by_one(q, k, v, chosen, causal)
    torch.testing.assert_close(ours[:, :, :real], expected[:, :, :real], rtol=1e-5, atol=1e-6)
    assert bool(torch.isfinite(ours).all()), "the tail is computed as well"
    upstream = torch.randn_like(ours)
    upstream[:, :, real:] = 0.0  # no gradient comes from the tail
    gradients = (torch.autograd.grad(out, (q, k, v), upstream) for out in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(Kernels(attention="sdpa").attention(q, k, v, chosen, causal), ours)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "efficient"])
def test_attention_by_varlen_drops_weights(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    use_varlen_on_a_cpu(monkeypatch, flash)
    segments_of_row = Segments.of([300, 60], 400)
    q, v = torch.zeros(1, 2, 400, 8), torch.ones(1, 2, 400, 8, requires_grad=True)
    out = Kernels().attention(q, q, v, SegmentPair(segments_of_row, segments_of_row), False, 0.3)[0, :, :300]
    assert float(out.detach().mean()) == pytest.approx(1.0, abs=0.02)
    assert float(out.detach().std()) == pytest.approx((0.3 / 0.7 / 300) ** 0.5, rel=0.2)
    (of_values,) = torch.autograd.grad(out.sum(), v)
    assert float(of_values[0, :, :300].sum()) == pytest.approx(float(out.detach().sum()), rel=1e-4), (
        "the same weights"
    )


@pytest.mark.parametrize("capability", [(7, 0), (9, 0)], ids=str)
def test_shapes_and_types_of_varlen_on_a_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's rules of the CUDA operators, without a GPU; without one it cannot make their backward pass."""
    monkeypatch.setattr(segments, "capability_of", lambda device: capability)
    with FakeTensorMode():
        starts, positions = (
            torch.empty(size, dtype=kind, device="cuda") for size, kind in ((6, torch.int32), (24, torch.int64))
        )
        chosen = SegmentPair(Segments(starts, positions, 7, 8), Segments(starts, positions, 6, 16))
        shape = 1, 24, HEADS, WIDTH
        q, k, v = (torch.empty(shape, dtype=torch.float16, device="cuda").transpose(1, 2) for _ in range(3))
        assert has_varlen(q) and not has_varlen(q.float())
        out = segments.attention_by_varlen(q, k, v, chosen, False, 0.1)
        assert out.shape == q.shape and out.dtype == q.dtype and out.device.type == "cuda"


def test_rows_and_tokens_are_converted_into_each_other() -> None:
    chosen = Segments.of([2, 3], 7)
    rows = chosen.to_rows(torch.arange(7), 0)
    assert rows.masked_fill(~chosen.real_positions, -1).tolist() == [[0, 1, -1], [2, 3, 4]]
    assert chosen.from_rows(rows, 0)[:5].tolist() == [0, 1, 2, 3, 4]
    assert chosen.positions.tolist() == [0, 1, 0, 1, 2, 0, 1] and chosen.starts.tolist() == [0, 2, 5, 7]
    assert chosen.bounds(2).tolist() == [0, 2, 5, 7, 9, 12, 14]
    assert (len(chosen), chosen.longest, chosen.widest) == (2, 3, 4)
