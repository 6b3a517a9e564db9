"""The plain torch operations against their formulas in float64, and their gradients against finite differences."""

import platform
import resource

import pytest
import torch

from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.choice import DEFAULT


def test_bias_dropout_add_with_and_without_norm() -> None:
    torch.manual_seed(1)
    x, residual = (torch.randn(4, 6, dtype=torch.float64) for _ in range(2))
    bias, weight, shift = (torch.randn(6, dtype=torch.float64) for _ in range(3))
    total = 1.7 * residual + x + bias
    assert torch.allclose(DEFAULT.bias_dropout_add(x, bias, residual, 0.0, 1.7), total, rtol=1e-14)
    mean, variance = total.mean(1, keepdim=True), total.var(1, unbiased=False, keepdim=True)
    expected = (total - mean) / (variance + 1e-5).sqrt() * weight + shift
    joined, normed = DEFAULT.bias_dropout_add_layer_norm(x, bias, residual, weight, shift, 0.0, 1.7, 1e-5)
    assert torch.allclose(joined, total, rtol=1e-14) and torch.allclose(normed, expected, rtol=1e-12)
    gelu = 0.5 * (x + bias) * (1 + torch.erf((x + bias) / 2**0.5))
    assert torch.allclose(DEFAULT.bias_gelu_dropout(x, bias, 0.0), gelu, rtol=1e-12)
    assert torch.equal(DEFAULT.bias_relu_dropout(x, bias, 0.0), (x + bias).clamp(min=0.0))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients(p: float) -> None:
    torch.manual_seed(2)
    x, residual = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias, weight, shift = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def drawn(function: object, *arguments: object) -> torch.Tensor:
        torch.manual_seed(3)
        return function(*arguments)  # type: ignore[operator,no-any-return]

    for function, inputs in (
        (lambda *a: drawn(torch_ops.bias_dropout_add, *a, p, 1.0), (x, bias, residual)),
        (lambda *a: drawn(torch_ops.bias_dropout_add, *a, p, 0.4), (x, bias, residual)),
        (
            lambda *a: drawn(torch_ops.bias_dropout_add_layer_norm, *a, p, 0.4, 1e-5),
            (x, bias, residual, weight, shift),
        ),
        (lambda *a: drawn(torch_ops.bias_relu_dropout, *a, p), (x, bias)),
        (lambda *a: drawn(torch_ops.bias_gelu_dropout, *a, p), (x, bias)),
        (lambda a: drawn(torch_ops.softmax, a[None, None], torch.tensor([True] * 4 + [False]), False, 0.7), (x,)),
        (lambda a: drawn(torch_ops.softmax, a[None, None], None, True, 0.7), (x,)),
    ):
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_masks_have_the_right_rate(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    y = torch_ops.dropout(torch.ones(100_000, dtype=dtype), 0.1)
    assert float((y == 0).double().mean()) == pytest.approx(0.1, abs=0.004)
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.9).to(dtype))}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("score", [-4000.0, 0.0, 4000.0])
def test_a_fully_masked_query_gets_zeros(dtype: torch.dtype, score: float) -> None:
    scores = torch.full((2, 1, 2, 4), score, dtype=dtype, requires_grad=True)
    mask = torch.tensor([True, True, True, False])[None, None, None, :].repeat(2, 1, 1, 1)
    mask[1] = False
    weights = torch_ops.softmax(scores, mask, False, 0.5)
    third = torch.full((3,), 1 / 3, dtype=dtype)
    assert torch.allclose(weights[0, 0, 0, :3], third, rtol=1e-2) and not weights[0, ..., 3].any()
    assert not weights[1].any()
    (gradient,) = torch.autograd.grad(weights, scores, torch.ones_like(weights))
    assert bool(torch.isfinite(gradient).all())


def test_no_rows() -> None:
    assert torch_ops.softmax(torch.empty(0, 2, 3, 4), None, False, 1.0).shape == (0, 2, 3, 4)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory as they will")
def test_memory_that_is_freed_is_kept_for_the_next_update() -> None:
    torch_ops.keep_freed_memory()
    faults = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tensors = [torch.zeros(1 << 21) for _ in range(40)]  # 81,920 pages
        del tensors
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert sum(faults[1:]) < 81_920, "twice that if they were given back"
