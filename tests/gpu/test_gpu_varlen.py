"""Attention within packed sentences by torch's kernel, against attention by rows.

The reference computes in fp32 on the same rounded inputs. Both ways are compared with it in 16 bit: the kernel may be
some times as wrong as attention by rows. A token of another sentence would be wrong by about 1.

Legend: P rows, H heads, N positions of a row, K head width.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.kernels import choice, segments
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.segments import (
    SegmentPair,
    Segments,
    attention_by_rows,
    attention_by_varlen,
    has_varlen,
)
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import build, loader_of, train, write_corpus

pytestmark = pytest.mark.gpu
HEADS = 3
QUERIES, KEYS = [5, 200, 7, 1, 130], [4, 64, 257, 1, 33]
"""Lengths of sentences, some of which take several blocks of the kernel."""
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def device(flash: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.device:
    """Return a GPU that has the kernel."""
    if torch.cuda.get_device_capability() < (8, 0) and (flash or dtype == torch.bfloat16):
        pytest.skip("needs sm_80")
    return torch.device("cuda", torch.cuda.current_device())


def pair(causal: bool, tails: tuple[int, int], on: torch.device) -> SegmentPair:
    queries, keys = (Segments.of(each, sum(each) + tail) for each, tail in zip((QUERIES, KEYS), tails, strict=True))
    queries, keys = (each.to(on) for each in (queries, keys))
    return SegmentPair(queries, queries if causal else keys)


def states(rows: int, segments: Segments, width: int, dtype: torch.dtype) -> Tensor:
    # As projections of (P,N,D) are: heads beside each other in memory.
    shape = rows, segments.positions.shape[0], HEADS, width
    return torch.randn(shape, device=segments.starts.device).to(dtype).transpose(1, 2)


def by_rows(q: Tensor, k: Tensor, v: Tensor, chosen: SegmentPair, causal: bool) -> Tensor:
    kernels = Kernels.only("torch")
    return attention_by_rows(q, k, v, chosen, causal, 0.0, kernels.attention)


def results(way: str, inputs: list[Tensor], upstream: Tensor, chosen: SegmentPair, causal: bool) -> list[Tensor]:
    """Return the attention and the gradients of queries, keys and values."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in inputs]
    function = attention_by_varlen if way == "varlen" else by_rows
    out = function(*leaves, chosen, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


@pytest.mark.parametrize("tails", [(5, 3), (0, 0), (3, 0), (0, 2), (300, 300)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "cross"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 64), (2, 8), (1, 40), (1, 128)])
def test_flash_attention_equals_attention_by_rows(
    rows: int, width: int, dtype: torch.dtype, causal: bool, tails: tuple[int, int]
) -> None:
    check(rows, width, dtype, causal, tails, device())


@pytest.mark.parametrize("tails", [(5, 3), (1, 1), (300, 300)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "cross"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 64), (2, 8), (1, 40), (1, 128)])
def test_memory_efficient_attention_equals_attention_by_rows(
    rows: int,
    width: int,
    dtype: torch.dtype,
    causal: bool,
    tails: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segments, "is_flash", lambda device: False)
    check(rows, width, dtype, causal, tails, device(False, dtype))


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "efficient"])
def test_varlen_drops_weights(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "is_flash", lambda device: flash)
    on = device(flash, torch.float16)
    row = Segments.of([300, 60], 400).to(on)
    q = torch.zeros(1, 4, 400, 64, dtype=torch.float16, device=on)
    v = torch.ones_like(q, requires_grad=True)
    out = attention_by_varlen(q, q, v, SegmentPair(row, row), False, 0.3)[0, :, :300].float()
    assert float(out.detach().mean()) == pytest.approx(1.0, abs=0.02)
    assert float(out.detach().std()) == pytest.approx((0.3 / 0.7 / 300) ** 0.5, rel=0.2)
    (of_values,) = torch.autograd.grad(out.sum(), v)
    assert float(of_values.float().sum()) == pytest.approx(float(out.detach().sum()), rel=1e-2), "the same weights"


def check(rows: int, width: int, dtype: torch.dtype, causal: bool, tails: tuple[int, int], on: torch.device) -> None:
    """Compare attention by the kernel, and its gradients, with that by rows."""
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    chosen = pair(causal, tails, on)
    inputs = [states(rows, each, width, dtype) for each in (chosen.queries, chosen.keys, chosen.keys)]
    assert has_varlen(inputs[0])
    queries, keys = sum(QUERIES), sum(QUERIES if causal else KEYS)
    upstream = torch.randn_like(inputs[0])
    upstream[:, :, queries:] = 0.0  # no gradient comes from the tail
    ours, reference = (results(way, inputs, upstream, chosen, causal) for way in ("varlen", "rows"))
    expected = results("rows", [x.float() for x in inputs], upstream, chosen, causal)
    names, sizes = ("attention", "of queries", "of keys", "of values"), (queries, queries, keys, keys)
    for name, size, found, other, exact in zip(names, sizes, ours, reference, expected, strict=True):
        assert bool(torch.isfinite(found).all()), f"{name}: the tail must be finite"
        wrong, allowed = (float((x[:, :, :size].float() - exact[:, :, :size]).abs().max()) for x in (found, other))
        assert wrong <= 4.0 * allowed + ROUNDING[dtype], name
        if name != "attention":
            assert not found[:, :, size:].any(), f"{name}: the tail has no gradient"


@pytest.mark.parametrize("method", ["vanilla", "deep_decoder"])
def test_packed_batches_in_16_bit_attend_by_varlen(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`selftest` compares such an engine, so its models must take the kernel."""
    called: list[bool] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, chosen: SegmentPair, causal: bool, dropout_p: float) -> Tensor:
        called.append(causal)
        return attention_by_varlen(q, k, v, chosen, causal, dropout_p)

    monkeypatch.setattr(choice, "attention_by_varlen", counted)
    world = World(0, 1, 0, device())
    write_corpus(tmp_path)
    curves = []
    for engine in ("plain", "plain:bf16+packed"):
        assert not called
        trained = build(method, engine, world, tmp_path)
        curves.append(train(trained, loader_of(tmp_path, world, engine), world, 1, 10, Cursor())["loss"])
    assert set(called) == {False, True}
    assert curves[1] == pytest.approx(curves[0], rel=0.05)
