"""Layers that ``torch.compile`` compiles for training.

Nothing is compiled, and no compiler imported, before a layer is run or :func:`check_compiler` called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_nmt.errors import ConfigError, first_line
from deepspeed_nmt.kernels.segments import SegmentPair, is_flash
from deepspeed_nmt.nn.layers import Context, DecoderBlock

_VARIANTS = 64
"""Bound on the variants of a class's code, after which torch would silently run it uncompiled. By default 8, fewer
than the sets of passes that may skip a sub-layer."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have layers compiled when they are first run in training; those of a class share their code.

    Only ``forward`` is compiled: parameters keep their names, and hooks, by which ZeRO-3 gathers parameters, run
    outside of it. Before layers that are recomputed are run, :func:`check_compiler` must have been called.
    """
    torch._dynamo.config.recompile_limit = _VARIANTS
    # A fact about the machine, which compiled code cannot look up: its compiler calls the function once.
    torch.compiler.assume_constant_result(is_flash)  # type: ignore[no-untyped-call]
    forwards: dict[type[nn.Module], Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in forwards:
            forwards[kind] = _in_training(kind.forward)
        layer.forward = MethodType(forwards[kind], layer)


def check_compiler(device: torch.device) -> None:
    """Compile a function for a device, or raise ConfigError."""
    try:
        own = os.getpid()  # makes the code new, so that the compiler runs, rather than torch's cache
        compiled = torch.compile(lambda x: x.sin() + own)
        # The first derivative that is compiled saves tensors of the compiler's own. In a layer that is recomputed,
        # whose saved tensors are counted, that would be an error.
        compiled(torch.zeros(8, device=device, requires_grad=True)).sum().backward()
    except Exception as problem:  # of torch, a compiler or a driver
        remedy = "set engine.compile=off"
        if "compiler" in f"{type(problem).__name__} {problem}".lower():
            remedy = f"install a C++ compiler, or {remedy}"
        raise ConfigError(
            f"torch.compile, which engine.compile=layers needs, fails on {device.type} ({first_line(problem)}); "
            f"{remedy}"
        ) from problem


def _in_training(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``forward`` of layers that is compiled in training."""
    compiled = torch.compile(forward)

    @wraps(forward)
    def run(layer: nn.Module, x: Tensor, context: Context, *rest: Any, **options: Any) -> Any:
        if not layer.training:
            return forward(layer, x, context, *rest, **options)
        for part in layer.modules():
            if isinstance(part, DecoderBlock):
                context = part.choose(context)
        _mark_sentences(context)
        return compiled(layer, x, context, *rest, **options)

    return run


def _mark_sentences(context: Context) -> None:
    """Have the compiler expect any number of sentences in a micro-batch from the first one on."""
    for mask in (context.mask, context.target_mask):
        if isinstance(mask, SegmentPair):
            for side in mask:
                torch._dynamo.maybe_mark_dynamic(side.starts, 0)
