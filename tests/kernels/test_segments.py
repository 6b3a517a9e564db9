"""Attention within packed sentences against the same sentences one by one.

Legend: P rows, H heads, N positions of a row, K head width.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.attention.varlen as varlen_module
from torch import Tensor

from deepspeed_nmt.kernels import segments
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.segments import SegmentPair, Segments

QUERIES, KEYS = [5, 3, 7, 1], [4, 6, 2, 3]
ROWS, HEADS, WIDTH = 2, 3, 8


def pair(device: torch.device, causal: bool = False, tails: tuple[int, int] = (5, 1)) -> SegmentPair:
    queries, keys = (Segments.of(each, sum(each) + tail) for each, tail in zip((QUERIES, KEYS), tails, strict=True))
    queries, keys = (each.to(device) for each in (queries, keys))
    return SegmentPair(queries, queries if causal else keys)


def states(size: int, device: torch.device) -> Tensor:
    # As projections of (P,N,D) are: heads beside each other in memory.
    return torch.randn(ROWS, size, HEADS, WIDTH, device=device).transpose(1, 2).requires_grad_()


@contextmanager
def replaced(function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch's function, which exists on GPUs alone."""
    with mock.patch.object(varlen_module, "varlen_attn", function):
        segments._parameters.cache_clear()
        yield
    segments._parameters.cache_clear()


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
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tails", [(5, 1), (0, 0)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_varlen_passes_the_bounds_of_all_rows(causal: bool, tails: tuple[int, int]) -> None:
    """A stand-in for torch's function, which exists on GPUs alone, attends between the bounds that it is given."""
    torch.manual_seed(2)
    chosen = pair(torch.device("cpu"), causal, tails)
    size, keys = (each.positions.shape[0] for each in chosen)
    q, k, v = states(size, torch.device("cpu")), states(keys, torch.device("cpu")), states(keys, torch.device("cpu"))

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *most: int, is_causal: bool = False
    ) -> Tensor:
        assert starts_q.dtype == starts_k.dtype == torch.int32 and q.shape[1:] == (HEADS, WIDTH)
        assert starts_q[-1] == len(q) and starts_k[-1] == len(k) == len(v)
        out = torch.full_like(q, torch.nan)
        for number in range(len(starts_q) - 1):
            (a, b), (c, d) = (each[number : number + 2].tolist() for each in (starts_q, starts_k))
            assert 0 <= b - a <= most[0] and 0 <= d - c <= most[1]
            if c == d:
                out[a:b] = 0.0  # as FlashAttention without keys
                continue
            heads = (x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d]))
            out[a:b] = Kernels().attention(*heads, None, is_causal)[0].transpose(0, 1)
        return out

    with replaced(varlen):
        ours = segments.attention_by_varlen(q, k, v, chosen, causal)
    real = sum(QUERIES)
    expected = one_by_one(q, k, v, chosen, causal)[:, :, :real]
    torch.testing.assert_close(ours[:, :, :real], expected, rtol=1e-5, atol=1e-6)
    assert bool(torch.isfinite(ours).all()), "the tail is computed as well"


@pytest.mark.parametrize("causal", [True, False])
def test_the_arguments_of_varlen_follow_its_signature(causal: bool) -> None:
    given: dict[str, object] = {}

    def older(q: Tensor, *others: object, is_causal: bool = False) -> Tensor:
        given.update(is_causal=is_causal)
        return q

    def newer(q: Tensor, *others: object, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        given.update(window_size=window_size)
        return q

    x = states(21, torch.device("cpu"))
    for function, expected in (
        (older, {"is_causal": causal}),
        (newer, {"window_size": (-1, 0 if causal else -1)}),
    ):
        given.clear()
        with replaced(function):
            segments.attention_by_varlen(x, x, x, pair(torch.device("cpu"), causal=True), causal)
        assert given == expected
    assert {"is_causal", "window_size"} & set(inspect.signature(varlen_module.varlen_attn).parameters)


def test_rows_and_tokens_are_converted_into_each_other() -> None:
    chosen = Segments.of([2, 3], 7)
    rows = chosen.to_rows(torch.arange(7), 0)
    assert rows.masked_fill(~chosen.real_positions, -1).tolist() == [[0, 1, -1], [2, 3, 4]]
    assert chosen.from_rows(rows, 0)[:5].tolist() == [0, 1, 2, 3, 4]
    assert chosen.positions.tolist() == [0, 1, 0, 1, 2, 0, 1] and chosen.starts.tolist() == [0, 2, 5, 7]
    assert chosen.bounds(2).tolist() == [0, 2, 5, 7, 9, 12, 14]
    assert (len(chosen), chosen.longest, chosen.widest) == (2, 3, 4)
