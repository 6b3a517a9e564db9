"""Time that the host needs to launch an update's work, of which a small GPU batch is mostly made.

The rows *operation* are loops over one operation, in microseconds a call: without waiting for the GPU (`host_us`),
and with (`all_us`). Where both are equal the GPU waits for the host. The rows *phase* are milliseconds a micro-batch
of 1,024 tokens, so small that a GPU hardly counts: BIG 6+6, the forward pass, the backward pass too, and the whole
update, also without Python's garbage collector, with the backward pass in the calling thread, and with torch's own
kernels. `slowest` names the operations on which the host spends most of an update.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Bench, Values, write_corpus
from timing import seconds_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from training import BIG, Memory, Training, sample_of, training

from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.transfer import on_device
from deepspeed_nmt.kernels.choice import Kernels, use_kernels
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.kernels.segments import SegmentPair, Segments, attention_by_varlen, has_varlen

CALLS, ROUNDS, TOKENS, NAMED = 1000, 9, 1024, 15
Once = Callable[[], object]


class Nothing(torch.autograd.Function):
    """A function of Python whose passes launch nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def operations(bench: Bench) -> Iterator[tuple[str, Once]]:
    """Yield operations on small tensors by name."""
    dtype, device = DTYPES[bench.half], bench.device
    square = torch.randn(64, 64, dtype=dtype, device=device)
    x, residual, upstream = (torch.randn(256, 1024, dtype=dtype, device=device) for _ in range(3))
    bias = torch.randn(1024, dtype=dtype, device=device)
    kernels = Kernels()
    yield "add in place", lambda: square.add_(1)
    yield "allocation", lambda: torch.empty_like(square)
    yield "product", lambda: square @ square
    yield "seed of dropout", lambda: int(torch.randint(2**31 - 1, ()))
    yield "bias_dropout_add", lambda: kernels.bias_dropout_add(x, bias, residual, 0.1, 1.0)
    yield "bias_relu_dropout", lambda: kernels.bias_relu_dropout(x, bias, 0.1)
    q = torch.randn(1, 4, 400, 64, dtype=dtype, device=device)
    if has_varlen(q):
        segments = Segments.of([300, 60], 400).to(device)
        yield "varlen attention", lambda: attention_by_varlen(q, q, q, SegmentPair(segments, segments), False)
    leaves = [each.clone().requires_grad_() for each in (x, bias, residual)]
    weight = square.clone().requires_grad_()
    yield "product, both passes", lambda: torch.autograd.grad(square @ weight, weight, square)
    yield "nothing, both passes", lambda: torch.autograd.grad(Nothing.apply(weight), weight, square)
    yield (
        "bias_dropout_add, both passes",
        lambda: torch.autograd.grad(kernels.bias_dropout_add(*leaves, 0.1, 1.0), leaves, upstream),
    )
    if kernels.backend("bias_dropout_add", x) == "triton":
        from deepspeed_nmt.kernels import triton_kernels, triton_ops

        y, partial = torch.empty_like(x), torch.empty(1, 64, 1024, device=device)
        flags = triton_ops._flags(bias, residual, 0.1, 512, 4) | {"ACTIVATION": triton_ops.IDENTITY}
        numbers = (256, 1024, 1, 1.0, 0.1, 5)
        tensors = (upstream, None, bias, y, None, partial)
        yield (
            "launch of its backward kernel",
            lambda: triton_ops._launch(
                triton_kernels.pointwise_backward, (64, 2), *tensors, *numbers, **{**flags, "HAS_RESIDUAL": False}
            ),
        )
        yield "launch of its column sums", lambda: triton_ops._summed(partial, [dtype])


def loop(once: Once, bench: Bench) -> Values:
    """Return the mean time of a call in a loop, and with the GPU's work."""
    for _ in range(20):
        once()
    count = 10 if bench.tiny else CALLS
    spent = 0.0

    def calls() -> None:
        nonlocal spent
        begun = time.perf_counter()
        for _ in range(count):
            once()
        spent = time.perf_counter() - begun

    everything = seconds_of(calls, bench.device)
    return {"host_us": 1e6 * spent / count, "all_us": 1e6 * everything / count}


def phases(run: Training, bench: Bench) -> Iterator[tuple[str, Callable[[], Values]]]:
    """Yield parts of an update by name, each with a function that measures it."""
    batches, tokens = sample_of(next(run.loader.updates(Cursor(), 1)), bench)
    moved = list(on_device(batches, bench.device))
    module = run.engine.module

    def update() -> object:
        return run.engine.update(batches, tokens, 1e-5)

    def forward() -> None:
        for batch in moved:
            module(batch)

    def evaluated() -> None:
        with torch.no_grad():
            forward()

    def both() -> None:
        for batch in moved:
            module(batch).loss.backward()
        module.zero_grad(set_to_none=True)

    def of(once: Once) -> Callable[[], Values]:
        def measured() -> Values:
            once()
            once()
            spent = statistics.median(seconds_of(once, bench.device) for _ in range(1 if bench.tiny else ROUNDS))
            return {"ms": 1e3 * spent / len(batches)}

        return measured

    def uncollected() -> Values:
        gc.disable()
        try:
            return of(update)()
        finally:
            gc.enable()

    def in_this_thread() -> Values:
        with torch.autograd.set_multithreading_enabled(False):
            return of(update)()

    def by_torch() -> Values:
        use_kernels(module.model, Kernels.only("torch"))
        try:
            return of(update)()
        finally:
            use_kernels(module.model, Kernels())

    yield "forward without gradients", of(evaluated)
    yield "forward", of(forward)
    yield "forward and backward", of(both)
    yield "update", of(update)
    yield "update, no garbage collector", uncollected
    yield "update, backward in this thread", in_this_thread
    yield "update, torch's kernels", by_torch
    yield "profile of an update", lambda: slowest(update, len(batches))
    yield "update after a profile", of(update)


def slowest(update: Once, count: int) -> Values:
    """Return the operations on which the host spends most of an update."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        update()
    spent, calls = Counter[str](), Counter[str]()
    for event in found.events():
        spent[event.name] += event.self_cpu_time_total
        calls[event.name] += 1
    listed = (f"{spent[name] / count:.0f} us in {calls[name]} of {name[:60]}" for name, _ in spent.most_common(NAMED))
    return {"ms": 1e-3 * spent.total() / count, "slowest": "; ".join(listed)}


def run(bench: Bench) -> None:
    """Measure operations, then the phases of an update."""
    for name, once in operations(bench):
        bench.measure(lambda once=once: loop(once, bench), what="operation", of=name)
    variant = replace(BIG, micro_tokens=None if bench.tiny else TOKENS, precision=bench.half)
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 400 if bench.tiny else 20_000, bench.vocabulary)
        with training(variant, corpus, bench, Memory.of(bench.device)) as made:
            for name, measured in phases(made, bench):
                bench.measure(measured, what="phase", of=name)
