"""Tests that need a GPU. `tests/kernels` also runs there, with the kernels compiled instead of interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.attention_ops import AttentionChoice
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import capability_of, has_bf16
from deepspeed_nmt.parallel.hardware import prepare_gpu
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import build, loader_of, methods, train, write_corpus

pytestmark = pytest.mark.gpu
DTYPES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
LINEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of products: the rounding of their sums alone is 3.6e-3 and 2.55e-2, on a CPU as on a GPU."""


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    prepare_gpu(torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", choice.OPERATIONS)
def test_the_chosen_backend_is_correct_on_this_gpu(operation: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    if dtype == torch.bfloat16 and not has_bf16(capability_of(device)):
        pytest.skip("this GPU has no bf16")
    kernels, x = Kernels(), torch.empty(0, dtype=dtype, device=device)
    assert kernels.backend(operation, x) == choice.preferred_on_gpu(
        operation, torch.cuda.get_device_capability(), dtype
    )
    found, expected = kernels.implementation(operation, x), choice.load(operation, "torch")
    bounds = LINEAR if operation == "linear" else DTYPES
    assert choice.compare(operation, found, expected, device, dtype) < bounds[dtype]


@pytest.mark.parametrize("method", methods())
def test_losses_on_a_gpu_equal_those_on_a_cpu(method: str, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    curves = {}
    ways: list[tuple[str, str, AttentionChoice]] = [
        ("cpu", "torch", "sdpa"),
        ("cuda", "torch", "sdpa"),
        ("cuda", "triton", "sdpa"),
        ("cuda", "triton", "fused"),
    ]
    for device, backend, attention in ways:
        world = World(0, 1, 0, torch.device(device))
        engine = build(method, "plain", world, tmp_path, kernels=Kernels(backend, attention))
        loss = train(engine, loader_of(tmp_path, world), world, 1, 10, Cursor())["loss"]
        curves[device, backend, attention] = loss
    for curve in curves.values():
        assert curve == pytest.approx(curves["cpu", "torch", "sdpa"], abs=1e-5, rel=0)


def test_a_fully_masked_query_gets_zeros_from_every_kernel() -> None:
    mask = torch.zeros(2, 1, 1, 32, dtype=torch.bool, device="cuda")
    mask[0] = True
    for dtype in (torch.float32, torch.float16):
        q = torch.randn(2, 4, 16, 64, dtype=dtype, device="cuda", requires_grad=True)
        k, v = (torch.randn(2, 4, 32, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
        ways: tuple[AttentionChoice, ...] = ("auto", "sdpa", "fused")
        for how in ways:
            out = Kernels(attention=how).attention(q, k, v, mask)
            gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
            assert not out[1].any() and bool(torch.isfinite(out).all()), how
            assert all(bool(torch.isfinite(g).all()) for g in gradients), how
