"""Triton's kernels against the references, on a GPU or in Triton's interpreter, which lacks bf16.

Legend: N rows, D width, B batch, H heads, T queries, S keys, V vocabulary.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.kernels import choice, torch_ops
from deepspeed_nmt.kernels.choice import OPERATIONS
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.kernels.torch_ops import ChunkResult, ChunkRows

triton_ops = pytest.importorskip("deepspeed_nmt.kernels.triton_ops", reason="needs triton")

TRITONS = [operation for operation, backends in OPERATIONS.items() if "triton" in backends]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
ERROR = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", TRITONS)
def test_results_and_gradients_equal_the_references(operation: str, dtype: torch.dtype, device: torch.device) -> None:
    ours, theirs = getattr(triton_ops, operation), getattr(torch_ops, operation)
    assert choice.compare(operation, ours, theirs, device, dtype) < ERROR[dtype]


@pytest.mark.parametrize("operation", TRITONS)
def test_the_comparison_finds_a_small_error(operation: str, device: torch.device) -> None:
    theirs = getattr(torch_ops, operation)

    def wrong(*arguments: Any) -> Any:
        result = theirs(*arguments)
        if isinstance(result, ChunkResult):
            return result._replace(gradients=[g * 1.01 for g in result.gradients])
        return tuple(x * 1.01 for x in result) if isinstance(result, tuple) else result * 1.01

    assert choice.compare(operation, wrong, theirs, device, torch.float32) > ERROR[torch.float32]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (5, 7), (18, 64), (1, 1000), (5, 2500)])
def test_any_number_of_rows_of_any_width(rows: int, width: int, device: torch.device) -> None:
    torch.manual_seed(width)
    x, residual = (torch.randn(rows, width, device=device) for _ in range(2))
    weight, bias, shift = (torch.randn(width, device=device) for _ in range(3))
    pairs = [
        [ops.layer_norm(x, weight, bias, 1e-5) for ops in (triton_ops, torch_ops)],
        [ops.bias_dropout_add(x, shift, residual, 0.0, 0.5) for ops in (triton_ops, torch_ops)],
        [ops.bias_relu_dropout(x, None, 0.0) for ops in (triton_ops, torch_ops)],
        [
            ops.bias_dropout_add_layer_norm(x, None, residual, weight, bias, 0.0, 2.0, 1e-5)[1]
            for ops in (triton_ops, torch_ops)
        ],
    ]
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_statistics_are_in_fp32(device: torch.device) -> None:
    """The squares and the sum of these inputs overflow in fp16."""
    x = (torch.randn(3, 1024, device=device) * 300 + 500).half()
    weight, bias = torch.ones(1024, device=device).half(), torch.zeros(1024, device=device).half()
    normed = triton_ops.layer_norm(x, weight, bias, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (1024,))
    torch.testing.assert_close(normed.double(), expected, rtol=2e-3, atol=2e-3)


OPERATIONS_WITH_DROPOUT = {
    "bias_dropout_add": lambda x, p: triton_ops.bias_dropout_add(x, None, torch.zeros_like(x), p, 1.0),
    "bias_relu_dropout": lambda x, p: triton_ops.bias_relu_dropout(x, None, p),
    "bias_gelu_dropout": lambda x, p: triton_ops.bias_gelu_dropout(x + 6.0, None, p),
}


@pytest.mark.parametrize("operation", OPERATIONS_WITH_DROPOUT)
def test_dropout_has_its_rate_and_the_gradient_the_same_mask(operation: str, device: torch.device) -> None:
    torch.manual_seed(4)
    p = 0.3
    x = torch.full((40, 500), 2.0, device=device, requires_grad=True)
    y = OPERATIONS_WITH_DROPOUT[operation](x, p)
    dropped = y == 0
    assert float(dropped.double().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / x.numel()) ** 0.5)
    assert float(y.detach().max()) == pytest.approx(float(y.detach()[~dropped].min()), rel=1e-6), (
        "all kept elements have the same scale"
    )
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad == 0, dropped)
    torch.testing.assert_close(x.grad[~dropped], torch.full_like(x.grad[~dropped], 1 / (1 - p)))
    rows = dropped.double()
    assert abs(float(torch.corrcoef(torch.stack([rows[:-1].flatten(), rows[1:].flatten()]))[0, 1])) < 0.04
    assert abs(float(torch.corrcoef(torch.stack([rows[:, :-1].flatten(), rows[:, 1:].flatten()]))[0, 1])) < 0.04


def test_dropout_inside_the_norm_has_the_mask_of_its_gradient(device: torch.device) -> None:
    """The gradient is zero at dropped elements only, and the backward pass draws the same mask again."""
    torch.manual_seed(6)
    x = torch.randn(9, 130, device=device, requires_grad=True)
    residual, weight = torch.randn(9, 130, device=device), torch.ones(130, device=device)
    arguments = (None, residual, weight, torch.zeros_like(weight), 0.4, 1.0, 1e-5)
    total, normed = triton_ops.bias_dropout_add_layer_norm(x, *arguments)
    (gradient,) = torch.autograd.grad((normed * torch.randn_like(normed)).sum(), x)
    kept = (gradient != 0).float() / 0.6
    expected = torch_ops.layer_norm(residual + x * kept, weight, torch.zeros_like(weight), 1e-5)
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, residual + x * kept)
    assert 0.5 < float((kept > 0).float().mean()) < 0.7
    neighbours = torch.corrcoef(torch.stack([kept[:, :-1].flatten(), kept[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 4 / kept.numel() ** 0.5


def test_the_sum_and_its_norm_each_have_a_gradient_or_none(device: torch.device) -> None:
    torch.manual_seed(7)
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((5, 9), (9,), (5, 9), (9,), (9,))]
    upstream = torch.randn(2, 5, 9, device=device)
    for used in ([0], [1], [0, 1]):
        gradients = []
        for ops in (triton_ops, torch_ops):
            results = ops.bias_dropout_add_layer_norm(*inputs, 0.0, 1.5, 1e-5)
            loss = sum((results[number] * upstream[number]).sum() for number in used)
            gradients.append(torch.autograd.grad(loss, inputs, materialize_grads=True))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 1, 1, 9), (1, 1, 5, 9), (2, 3, 5, 9), (2, 1, 5, 1)])
def test_softmax_accepts_any_mask_that_can_be_broadcast(shape: tuple[int, ...], device: torch.device) -> None:
    torch.manual_seed(7)
    scores = torch.randn(2, 3, 5, 9, device=device, requires_grad=True)
    mask = torch.rand(shape, device=device) < 0.6
    weights = triton_ops.softmax(scores, mask, False, 0.7)
    expected = torch_ops.softmax(scores, mask, False, 0.7)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    blind = ~mask.expand(2, 3, 5, 9).any(-1)
    assert not weights[blind].any() and not torch.isnan(weights).any()
    upstream = torch.randn_like(weights)
    ours, theirs = (torch.autograd.grad(each, scores, upstream)[0] for each in (weights, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not ours[blind].any()


def test_strided_inputs(device: torch.device) -> None:
    x = torch.randn(12, 10, device=device).t()
    weight, bias = torch.randn(12, device=device), torch.randn(12, device=device)
    ours = triton_ops.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(ours, torch_ops.layer_norm(x, weight, bias, 1e-5), rtol=1e-5, atol=1e-5)
    scores = torch.randn(2, 5, 3, 9, device=device).transpose(1, 2)
    mask = (torch.rand(9, 2, 1, 1, device=device) < 0.7).permute(1, 2, 3, 0)
    torch.testing.assert_close(
        triton_ops.softmax(scores, mask, False, 1.0), torch_ops.softmax(scores, mask, False, 1.0)
    )


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device, requires_grad=True)
    y = triton_ops.bias_relu_dropout(x, torch.zeros(8, device=device), 0.1)
    y.sum().backward()
    assert y.shape == (0, 8) and x.grad is not None
    assert triton_ops.softmax(torch.empty(0, 2, 3, 4, device=device), None, True, 1.0).shape == (0, 2, 3, 4)


def test_nan_is_propagated(device: torch.device) -> None:
    x = torch.tensor([[float("nan"), -1.0, 2.0, float("-inf")]], device=device, requires_grad=True)
    y = triton_ops.bias_relu_dropout(x, None, 0.0)
    assert torch.isnan(y[0, 0]) and y[0, 1:].tolist() == [0.0, 2.0, 0.0]
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, float("nan")))
    assert torch.isnan(gradient[0, 0]) and torch.isnan(gradient[0, 2]) and gradient[0, 1] == 0.0


class Neighbours:
    """Threads of one process that hold slices of a vocabulary and reduce like ranks."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._given: list[Tensor] = []

    def combine(self, x: Tensor, how: Any) -> None:
        self._given.append(x.clone())
        self._barrier.wait()
        total = how(torch.stack(self._given))
        self._barrier.wait()
        x.copy_(total)
        if self._barrier.wait() == 0:
            self._given.clear()
        self._barrier.wait()

    def sum(self, x: Tensor) -> None:
        self.combine(x, lambda all_of_them: all_of_them.sum(0))

    def max(self, x: Tensor) -> None:
        self.combine(x, lambda all_of_them: all_of_them.max(0).values)


class Part:
    """One slice."""

    def __init__(self, neighbours: Neighbours, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.sum, self.max = neighbours.sum, neighbours.max


PREDICTIONS = pytest.mark.parametrize(("predictions", "taught"), [(1, None), (2, None), (2, "kl"), (2, "symmetric")])


@PREDICTIONS
def test_slices_of_a_vocabulary_give_the_result_of_the_whole(
    predictions: int, taught: str | None, device: torch.device
) -> None:
    torch.manual_seed(8)
    size, cut = 31, 12
    logits = [torch.randn(5, size, device=device) * 4 for _ in range(predictions)]
    targets = torch.tensor([3, 30, 11, 12, 0], device=device)
    weights = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0], device=device)
    everywhere = torch.ones(5, dtype=torch.bool, device=device)
    whole = torch_ops.cross_entropy(
        [z.clone() for z in logits], ChunkRows(targets, everywhere, weights, 0.1, size, 0.7, None, taught), True
    )
    neighbours, found = Neighbours(2), {}

    def work(start: int, stop: int) -> None:
        here = (targets >= start) & (targets < stop)
        index = torch.where(here, targets - start, 0)
        rows = ChunkRows(index, here, weights, 0.1, size, 0.7, Part(neighbours, start, size), taught)
        found[start] = triton_ops.cross_entropy([z[:, start:stop].contiguous() for z in logits], rows, True)

    lock = threading.Lock()
    launch = triton_ops._launch

    def one_at_a_time(*arguments: Any, **options: Any) -> None:
        with lock:  # the interpreter patches Triton's language while it runs a kernel
            launch(*arguments, **options)

    triton_ops._launch = one_at_a_time
    try:
        threads = [threading.Thread(target=work, args=ends) for ends in ((0, cut), (cut, size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        triton_ops._launch = launch
    for part in found.values():
        torch.testing.assert_close(part.loss_N, whole.loss_N, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part.nll_N, whole.nll_N, rtol=1e-5, atol=1e-5)
        if predictions == 2:
            torch.testing.assert_close(part.divergence_N, whole.divergence_N, rtol=1e-5, atol=1e-5)
    assert len(whole.gradients) == len(found[0].gradients) == (1 if taught else predictions)
    for number in range(len(whole.gradients)):
        joined = torch.cat([found[0].gradients[number], found[cut].gradients[number]], dim=1)
        torch.testing.assert_close(joined, whole.gradients[number], rtol=1e-5, atol=1e-6)


@PREDICTIONS
def test_the_loss_pads_an_odd_vocabulary_to_aligned_rows(
    predictions: int, taught: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the products write into the padding, here NaN, reaches neither results nor gradients."""
    rows_of_logits: list[Tensor] = []
    row_kernels = triton_ops.cross_entropy

    def between_nan(logits: list[Tensor], rows: ChunkRows, with_gradient: bool) -> ChunkResult:
        for z in logits:
            assert z.shape == (5, 75) and z.stride() == (128, 1)
            z.as_strided((5, 53), (128, 1), 75).fill_(torch.nan)
        rows_of_logits.extend(logits)
        return row_kernels(logits, rows, with_gradient)

    torch.manual_seed(6)
    states = [torch.randn(5, 8, device=device, requires_grad=True) for _ in range(predictions)]
    weight = torch.randn(75, 8, device=device, requires_grad=True)
    bias = torch.randn(75, device=device, requires_grad=True)
    targets = torch.tensor([0, 3, 74, 0, 11], device=device)

    def loss_and_gradients(backend: str) -> list[Tensor]:
        loss, nll, divergence = projected_cross_entropy(
            states, weight, targets, 0.1, 0, 0.5, bias=bias, kernels=choice.Kernels.only(backend), taught=taught
        )
        inputs = [weight, bias, *states[: 1 if taught else 2]]
        return [loss.detach(), nll, divergence, *torch.autograd.grad(loss, inputs)]

    expected = loss_and_gradients("torch")
    monkeypatch.setattr(choice.Kernels, "device_type", lambda self, x: "cuda")
    monkeypatch.setattr(triton_ops, "cross_entropy", between_nan)
    for ours, theirs in zip(loss_and_gradients("triton"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(rows_of_logits) == predictions
    assert not any(z.as_strided((5, 53), (128, 1), 75).any() for z in rows_of_logits[: 1 if taught else 2])


def test_the_meta_device_saves_the_same_tensors_and_launches_nothing() -> None:
    x = torch.empty(8, 64, device="meta", requires_grad=True)
    weight = torch.empty(64, device="meta", requires_grad=True)
    _, y = triton_ops.bias_dropout_add_layer_norm(x, weight, x, weight, weight, 0.1, 1.0, 1e-5)
    triton_ops.bias_gelu_dropout(y, weight, 0.1).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and weight.grad is not None
