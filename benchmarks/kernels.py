"""Fused operations on a GPU: error relative to float64, time of each backend, and share of the copy bandwidth.

    python benchmarks/kernels.py [--rows 8192] [--dim 1024] [--vocab 32000] [--dtype bf16] [--json FILE]

Every available backend (torch, torch.compile, Triton, apex, Liger) runs the forward and backward pass of every
operation; the backends take turns. The bandwidth of an operation is the least data that it must read and write,
divided by its time; it is printed as a share of the bandwidth of a copy in the same run. The GPU's cache is flushed
before each measurement. The last line, the fastest of torch, Triton and apex for each operation, belongs in
`deepspeed_nmt.kernels.backends.MEASURED`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.engine.config import DTYPES
from deepspeed_nmt.kernels import backends, torch_ops
from deepspeed_nmt.kernels.rows import ChunkRows

ROUNDS = 15
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
    call: Callable[..., Tensor]
    moved: int


def cases(arguments: argparse.Namespace, dtype: torch.dtype) -> Iterator[tuple[str, Case]]:
    """Yield every operation by name, with the shapes of a model."""
    torch.manual_seed(1)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    rows, dim, vocab, size = arguments.rows, arguments.dim, arguments.vocab, arguments.rows * arguments.dim
    yield "layer_norm", Case([of(rows, dim), of(dim), of(dim)], lambda f, x, w, b: f(x, w, b, 1e-5), 5 * size)
    yield (
        "bias_dropout_add",
        Case([of(rows, dim), of(dim), of(rows, dim)], lambda f, x, b, r: f(x, b, r, DROPOUT, 1.0), 6 * size),
    )
    yield (
        "bias_dropout_add_layer_norm",
        Case(
            [of(rows, dim), of(dim), of(rows, dim), of(dim), of(dim)],
            lambda f, x, b, r, w, s: f(x, b, r, w, s, DROPOUT, 1.0, 1e-5),
            8 * size,
        ),
    )
    for name in ("bias_relu_dropout", "bias_gelu_dropout"):
        yield name, Case([of(rows, 4 * dim), of(4 * dim)], lambda f, x, b: f(x, b, DROPOUT), 5 * 4 * size)
    length = 64
    mask = torch.arange(length, device="cuda") < torch.randint(40, length, (rows // length, 1), device="cuda")
    scores = (rows // length, dim // 64, length, length)
    yield (
        "softmax",
        Case([of(*scores)], lambda f, x: f(x, mask[:, None, None, :], False, 0.125), 5 * rows * length * dim // 64),
    )
    chunk = 512
    targets = torch.randint(0, vocab, (chunk,), device="cuda")
    everywhere = torch.ones(chunk, dtype=torch.bool, device="cuda")
    asked = ChunkRows(targets, everywhere, torch.ones(chunk, device="cuda"), 0.1, vocab, 0.0, None)
    yield (
        "cross_entropy",
        Case(
            [of(chunk, vocab)],
            lambda f, z: f([z.detach().clone()], asked, True),
            5 * chunk * vocab,
        ),
    )


def others(operation: str) -> dict[str, Callable[..., Any]]:
    """Return other implementations to compare with: torch.compile, and Liger if it is installed."""
    found: dict[str, Callable[..., Any]] = {"compile": torch.compile(getattr(torch_ops, operation))}
    if operation == "layer_norm":
        try:
            liger = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        except ImportError:
            return found
        found["liger"] = liger.apply
    return found


def run(case: Case, function: Callable[..., Any]) -> Run:
    """Return a function that runs forward and backward pass and returns the result and the gradients."""
    with torch.no_grad():
        like = case.call(function, *case.inputs)
    if not isinstance(like, Tensor):  # cross-entropy returns its gradient with the result
        return lambda: [case.call(function, *case.inputs).gradients[0]]  # type: ignore[attr-defined]
    upstream = torch.randn_like(like)

    def once() -> Sequence[Tensor]:
        result = case.call(function, *case.inputs)
        return [result, *torch.autograd.grad(result, case.inputs, upstream)]

    return once


def milliseconds(once: Run, flush: Tensor) -> float:
    """Return the GPU time of one run, after a flush of the cache."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    once()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def error(operation: str, function: Callable[..., Any], dtype: torch.dtype) -> float:
    """Return the largest difference from the reference in float64, without dropout."""
    from deepspeed_nmt.kernels.trial import compare

    return compare(operation, function, getattr(torch_ops, operation), torch.device("cuda"), dtype)


def main() -> None:
    """Measure the operations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="number of tokens (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=1024, help="width of the model (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=32_000, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="(default: bf16; on older GPUs fp16)")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a CUDA device is required, but torch finds none")
    capability = torch.cuda.get_device_capability()
    name = arguments.dtype or ("bf16" if capability >= (8, 0) else "fp16")
    dtype = DTYPES[name]
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    whole = torch.empty(arguments.rows * arguments.dim * 8, dtype=dtype, device="cuda")
    copies = [milliseconds(lambda: [whole.clone()], flush) for _ in range(ROUNDS)]
    bandwidth = 2 * whole.numel() * whole.itemsize / statistics.median(copies) / 1e6
    write = sys.stdout.write
    write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {name}; a copy moves {bandwidth:.0f} GB/s\n")
    table: list[dict[str, Any]] = []
    fastest: dict[str, str] = {}
    for operation, case in cases(arguments, dtype):
        ours: dict[str, Callable[..., Any]] = {
            each: backends.load(operation, each)
            for each in backends.OPERATIONS[operation]
            if backends.obstacle(operation, each, torch.device("cuda"), dtype) is None
        }
        runs = {each: run(case, function) for each, function in {**ours, **others(operation)}.items()}
        taken: dict[str, list[float]] = {each: [] for each in runs}
        for number in range(ROUNDS + 2):
            for each, once in runs.items():
                elapsed = milliseconds(once, flush)
                if number > 1:  # the first ones compile
                    taken[each].append(elapsed)
        middle = {each: statistics.median(times) for each, times in taken.items()}
        fastest[operation] = min(ours, key=lambda each, m=middle: m[each])  # type: ignore[misc]
        for each, spent in middle.items():
            share = case.moved * dtype.itemsize / spent / 1e6 / bandwidth
            off = f"{error(operation, ours[each], dtype):.1e}" if each in ours else "-"
            table.append({"operation": operation, "backend": each, "ms": spent, "share": share, "error": off})
            ratio = middle["torch"] / spent
            write(f"{operation:<28} {each:<8} {spent:8.3f} ms {ratio:5.2f} x torch {share:6.1%} of copy, ")
            write(f"error {off}\n")
    write(f"{capability}: {{torch.{str(dtype).removeprefix('torch.')}: {fastest}}},\n")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"bandwidth": bandwidth, "rows": table, "fastest": fastest}, file, indent=1)


if __name__ == "__main__":
    main()
