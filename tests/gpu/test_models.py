"""What only a GPU can show. `tests/kernels` runs there as well, with the kernels compiled instead of interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_nmt.data.loader import Cursor
from deepspeed_nmt.kernels import attention, dispatch, trial
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.selftest.models import build, loader_of, methods, train, write_corpus

pytestmark = pytest.mark.gpu
DTYPES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", dispatch.OPERATIONS)
def test_what_is_chosen_here_works_here(operation: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bf16")
    dispatch.use("auto")
    x = torch.empty(0, dtype=dtype, device=device)
    assert dispatch.backend(operation, x) == dispatch.preferred(operation, torch.cuda.get_device_capability(), dtype)
    found, expected = dispatch.implementation(operation, x), dispatch._load(operation, "torch")
    assert trial.compare(operation, found, expected, device, dtype) < DTYPES[dtype]


@pytest.mark.parametrize("method", methods())
def test_a_gpu_trains_as_a_cpu_does(method: str, tmp_path: Path) -> None:
    write_corpus(tmp_path)
    curves = {}
    for device, kernels, how in (
        ("cpu", "torch", "sdpa"),
        ("cuda", "torch", "sdpa"),
        ("cuda", "triton", "sdpa"),
        ("cuda", "triton", "fused"),
    ):
        dispatch.use(kernels)
        attention.use(how)  # type: ignore[arg-type]
        world = World(0, 1, 0, torch.device(device))
        engine = build(method, "plain", world, tmp_path)
        curves[device, kernels, how] = train(engine, loader_of(tmp_path, world), world, 1, 10, Cursor())["loss"]
    dispatch.use("auto")
    attention.use("auto")
    for curve in curves.values():
        assert curve == pytest.approx(curves["cpu", "torch", "sdpa"], abs=1e-5, rel=0)


def test_a_query_that_sees_nothing_gets_zeros_from_every_kernel() -> None:
    mask = torch.zeros(2, 1, 1, 32, dtype=torch.bool, device="cuda")
    mask[0] = True
    for dtype in (torch.float32, torch.float16):
        q = torch.randn(2, 4, 16, 64, dtype=dtype, device="cuda", requires_grad=True)
        k, v = (torch.randn(2, 4, 32, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(2))
        for how in ("auto", "sdpa", "fused"):
            attention.use(how)  # type: ignore[arg-type]
            out = attention.attention(q, k, v, mask)
            gradients = torch.autograd.grad(out.float().sum(), (q, k, v))
            assert not out[1].any() and bool(torch.isfinite(out).all()), how
            assert all(bool(torch.isfinite(g).all()) for g in gradients), how
    attention.use("auto")
