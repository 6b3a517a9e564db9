"""Attention forward and backward: kernels of torch over many shapes, as training has them, and over a single one.

Padded micro-batches nearly all have shapes of their own. `first_ms` is the mean time of a call, launches and plans
included, over up to 200 different shapes; `again_ms` the same over the same shapes once more, when all plans are
cached; `one_ms` over as many calls with one of the shapes. `kernel_ms` is the time of that one's kernels alone.
"torch's choice" is that of a process that has not been told anything, `ours` that of `Kernels.attention`. `varlen`
attends to the same sentences packed end to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from harness import Bench, DeviceTimer, Skipped, Values, sentence_lengths
from timing import seconds_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.update_order import Window
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.kernels.segments import SegmentPair, Segments, attention_by_varlen, has_varlen

SHAPES, HEADS, TINY_HEADS, WIDTH = 200, 16, 2, 64
KINDS = ("encoder", "decoder", "cross")
BACKENDS: dict[str, list[SDPBackend] | None] = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cuDNN": [SDPBackend.CUDNN_ATTENTION],
    "math": [SDPBackend.MATH],
    "torch's choice": [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    "ours": None,
    "varlen": None,
}


@dataclass(frozen=True)
class Sentences:
    """Lengths of the sentences of a micro-batch."""

    queries: list[int]
    keys: list[int]


def micro_batches(kind: str, count: int, tokens: int) -> list[Sentences]:
    """Return micro-batches of the synthetic corpus, each of a shape of its own."""
    source, target = (lengths.astype(np.int32) for lengths in sentence_lengths(200 * count))
    config = BatchConfig(update_tokens=8 * tokens, micro_tokens=tokens)
    rows = np.arange(len(source))
    number = max(1, int(target.sum()) // config.update_tokens)
    updates = Window.divided(rows, (source, target), number, config.update_tokens, 1)
    source, target = updates.source, updates.target
    sides = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}[kind]
    found: dict[tuple[int, ...], Sentences] = {}
    for number in range(len(updates)):
        for group in divide_update(updates[number], source, target, 1, config)[0]:
            queries, keys = (side[group].tolist() for side in sides)
            found.setdefault((len(group), max(queries), max(keys)), Sentences(queries, keys))
    return list(found.values())[:count]


def padded_call(
    kind: str, backend: str, sentences: Sentences, dtype: torch.dtype, bench: Bench
) -> Callable[[], object]:
    """Return a function that attends over padded sentences, forward and backward."""
    rows, heads = len(sentences.queries), TINY_HEADS if bench.tiny else HEADS

    def states(length: int) -> Tensor:
        made = torch.randn(rows, length, heads, WIDTH, dtype=dtype, device=bench.device).transpose(1, 2)
        return made.requires_grad_()

    keys, longest = torch.tensor(sentences.keys, device=bench.device), max(sentences.keys)
    q, k, v = states(max(sentences.queries)), states(longest), states(longest)
    causal = kind == "decoder"
    mask = None if causal else (torch.arange(longest, device=bench.device) < keys[:, None])[:, None, None]
    upstream, kernels, chosen = torch.randn_like(q), Kernels(), BACKENDS[backend]

    def once() -> object:
        if chosen is None:
            out = kernels.attention(q, k, v, mask, causal)
        else:
            with sdpa_kernel(chosen):
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), upstream)

    return once


def packed_call(kind: str, sentences: Sentences, dtype: torch.dtype, bench: Bench) -> Callable[[], object]:
    """Return a function that attends over sentences packed end to end, forward and backward."""
    if not bench.on_gpu:
        raise Skipped("varlen attention needs a GPU")

    def side(lengths: list[int], count: int) -> tuple[Segments, list[Tensor]]:
        # A row as training has it: a multiple of 8, with a tail.
        size = sum(lengths) // 8 * 8 + 8
        shape = (1, size, HEADS, WIDTH)
        made = [torch.randn(shape, dtype=dtype, device=bench.device).transpose(1, 2) for _ in range(count)]
        segments = Segments.of(lengths, size).to(bench.device)
        return segments, [each.requires_grad_() for each in made]

    segments_q, (q,) = side(sentences.queries, 1)
    segments_k, (k, v) = side(sentences.keys, 2)
    if not has_varlen(q):
        raise Skipped("varlen attention has no kernel for this precision or width")
    pair, upstream = SegmentPair(segments_q, segments_k), torch.randn_like(q)

    def once() -> object:
        out = attention_by_varlen(q, k, v, pair, kind == "decoder")
        return torch.autograd.grad(out, (q, k, v), upstream)

    return once


def measure(kind: str, backend: str, dtype: torch.dtype, bench: Bench, budget_s: float) -> Values:
    """Measure a backend, and return the columns of the table."""
    count, tokens = (3, 200) if bench.tiny else (SHAPES, 16384)
    shapes = micro_batches(kind, count, tokens)
    begun = time.monotonic()

    def mean_ms(chosen: list[Sentences], part: float) -> tuple[float, int]:
        """Return the mean time of a call, and the number of calls that were made before the time ran out."""
        spent = done = 0.0
        for sentences in chosen:
            if backend == "varlen":
                once = packed_call(kind, sentences, dtype, bench)
            else:
                once = padded_call(kind, backend, sentences, dtype, bench)
            spent += seconds_of(once, bench.device)
            done += 1
            if time.monotonic() - begun > part * budget_s:
                break
        return 1e3 * spent / done, int(done)

    middle = sorted(shapes, key=lambda each: len(each.queries) * max(each.queries))[len(shapes) // 2]
    mean_ms([middle], 1.0)  # loads the libraries
    first, done = mean_ms([each for each in shapes if each is not middle], 0.5)
    again, _ = mean_ms([each for each in shapes if each is not middle][:done], 0.7)
    one, _ = mean_ms([middle] * done, 0.9)
    if backend == "varlen":
        call = packed_call(kind, middle, dtype, bench)
    else:
        call = padded_call(kind, backend, middle, dtype, bench)
    kernel = DeviceTimer(bench.device).milliseconds(call, 2 if bench.tiny else 15)
    positions = sum(len(each.queries) * max(each.queries) for each in shapes) / len(shapes)
    return {
        "shapes": done,
        "positions": positions,
        "first_ms": first,
        "again_ms": again,
        "one_ms": one,
        "kernel_ms": kernel,
    }


def run(bench: Bench) -> None:
    """Measure all backends on all kinds of attention."""
    dtype = DTYPES[bench.half]
    left = len(KINDS) * len(BACKENDS)
    for kind in KINDS:
        for backend in BACKENDS:

            def one(kind: str = kind, backend: str = backend, budget: float = bench.seconds_left / left) -> Values:
                if backend in ("flash", "memory-efficient", "cuDNN") and not bench.on_gpu:
                    raise Skipped(f"{backend} attention needs a GPU")
                if backend == "flash" and kind != "decoder":
                    raise Skipped("flash attention takes no mask")
                return measure(kind, backend, dtype, bench, budget)

            bench.measure(one, attention=kind, backend=backend, precision=bench.half)
            left -= 1
