"""Fused operations: time of each backend's kernels without launches, bandwidth, and error.

Every available backend (torch, torch.compile, Triton, apex, Liger) runs the forward and backward pass of every
operation. The bandwidth of an operation is the least data that it must read and write, divided by its time; the
first row is that of a copy. The GPU's cache is flushed before each measurement. Errors are relative to float64. The
last row, the fastest of torch, Triton and apex for each operation, belongs in
`deepspeed_nmt.kernels.choice.MEASURED`; operations for which no time was left are missing there, and chosen by
expectation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Bench, DeviceTimer, Values
from torch import Tensor

from deepspeed_nmt.kernels import choice, torch_ops
from deepspeed_nmt.kernels.choice import Kernels, compare
from deepspeed_nmt.kernels.cross_entropy import chunk_rows
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.kernels.torch_ops import ChunkResult, ChunkRows

ROWS, DIM, ROUNDS = 8192, 1024, 15
DROPOUT = 0.1
Run = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Case:
    """An operation and its inputs.

    Attributes:
        inputs: floating-point tensors that require gradients.
        call: function that applies a backend's function to the inputs.
        moved: least number of elements to read and write, forward and backward.
    """

    inputs: list[Tensor]
    call: Callable[..., Any]
    moved: int


def cases(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Yield every operation by name, with the shapes of a model."""
    torch.manual_seed(1)
    device = bench.device

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    rows, dim = (64, 64) if bench.tiny else (ROWS, DIM)
    vocab, size = bench.vocabulary.size, rows * dim
    yield "layer_norm", Case([of(rows, dim), of(dim), of(dim)], lambda f, x, w, b: f(x, w, b, 1e-5), 5 * size)
    yield "branch_layer_norm", Case([of(rows, dim), of(dim), of(dim)], lambda f, x, w, b: f(x, w, b, 1e-5), 6 * size)
    yield (
        "bias_dropout_add",
        Case([of(rows, dim), of(dim), of(rows, dim)], lambda f, x, b, r: f(x, b, r, DROPOUT, 1.0), 6 * size),
    )
    yield (
        "bias_dropout_add_layer_norm",
        Case(
            [of(rows, dim), of(dim), of(rows, dim), of(dim), of(dim)],
            lambda f, x, b, r, w, s: f(x, b, r, w, s, DROPOUT, 1.0, 1e-5),
            9 * size,
        ),
    )
    for name in ("bias_relu_dropout", "bias_gelu_dropout"):
        yield name, Case([of(rows, 4 * dim), of(4 * dim)], lambda f, x, b: f(x, b, DROPOUT), 5 * 4 * size)
    length = 64
    mask = torch.arange(length, device=device) < torch.randint(40, length, (rows // length, 1), device=device)
    scores = (rows // length, dim // 64, length, length)
    yield (
        "softmax",
        Case([of(*scores)], lambda f, x: f(x, mask[:, None, None, :], False, 0.125), 5 * rows * length * dim // 64),
    )
    like = torch.empty(0, dtype=dtype, device=device)
    chunk = min(rows, chunk_rows(vocab, like, Kernels()))
    targets = torch.randint(0, vocab, (chunk,), device=device)
    everywhere = torch.ones(chunk, dtype=torch.bool, device=device)
    asked = ChunkRows(targets, everywhere, torch.ones(chunk, device=device), 0.1, vocab, 0.0, None)
    yield (
        "cross_entropy",
        Case(
            [of(chunk, vocab)],
            lambda f, z: f([z.detach().clone()], asked, True),
            5 * chunk * vocab,
        ),
    )


def others(operation: str, bench: Bench) -> dict[str, Callable[..., Any]]:
    """Return other implementations to compare with: torch.compile, and Liger if it is installed."""
    if not bench.on_gpu:
        return {}
    found: dict[str, Callable[..., Any]] = {"compile": torch.compile(getattr(torch_ops, operation))}
    if operation == "layer_norm":
        try:
            liger = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        except ImportError:
            return found
        found["liger"] = liger.apply
    return found


def passes(case: Case, function: Callable[..., Any]) -> Run:
    """Return a function that runs forward and backward pass and returns the result and the gradients."""
    with torch.no_grad():
        like = case.call(function, *case.inputs)
    if isinstance(like, ChunkResult):  # cross-entropy returns its gradient with the result
        return lambda: [case.call(function, *case.inputs).gradients[0]]
    upstream = [torch.randn_like(each) for each in _listed(like)]

    def once() -> Sequence[Tensor]:
        results = _listed(case.call(function, *case.inputs))
        return [*results, *torch.autograd.grad(results, case.inputs, upstream)]

    return once


def _listed(result: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def measure(
    operation: str, backend: str, case: Case, function: Callable[..., Any], timer: DeviceTimer, rounds: int
) -> Values:
    """Time one backend of an operation, and compare it with float64 unless it is only there for comparison."""
    dtype = case.inputs[0].dtype
    spent = timer.milliseconds(passes(case, function), rounds)
    values: dict[str, object] = {"ms": spent, "gb_per_s": case.moved * dtype.itemsize / spent / 1e6}
    if backend in choice.OPERATIONS[operation]:
        values["error"] = compare(operation, function, getattr(torch_ops, operation), timer.device, dtype)
    return values


def run(bench: Bench) -> None:
    """Measure all backends of all operations."""
    dtype, rounds = DTYPES[bench.half], 2 if bench.tiny else ROUNDS
    timer = DeviceTimer(bench.device)
    copied = torch.empty(2**16 if bench.tiny else 2**28, dtype=dtype, device=bench.device)

    def copy() -> Values:
        spent = timer.milliseconds(copied.clone, rounds)
        return {"ms": spent, "gb_per_s": 2 * copied.numel() * copied.itemsize / spent / 1e6}

    bench.measure(copy, operation="copy", backend="torch")
    fastest: dict[str, str] = {}
    for operation, case in cases(bench, dtype):
        ours: dict[str, Callable[..., Any]] = {
            each: choice.load(operation, each)
            for each in choice.OPERATIONS[operation]
            if choice.obstacle(operation, each, bench.device, dtype) is None
        }
        taken = {}
        for each, function in {**ours, **others(operation, bench)}.items():
            one = partial(measure, operation, each, case, function, timer, rounds)
            values = bench.measure(one, operation=operation, backend=each)
            if values and each in ours:
                taken[each] = float(str(values["ms"]))
        if taken:
            fastest[operation] = min(taken, key=lambda each, taken=taken: taken[each])  # type: ignore[misc]
    if bench.on_gpu:
        key = f"{torch.cuda.get_device_capability(bench.device)}: {{{dtype}: {fastest}}}"
        bench.measure(lambda: {"measured": key}, in_any_case=True, operation="all", backend="fastest")
