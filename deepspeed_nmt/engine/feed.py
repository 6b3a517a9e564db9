"""Micro-batches on the device, each copied while the one before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield micro-batches on a device, in order.

    On a GPU a batch is copied from pinned memory on a stream of its own, one ahead, so neither the CPU nor the
    computation waits for a copy. On a CPU batches are yielded as they are.

    Args:
        batches: micro-batches on the CPU.
        device: of the model.
    """
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)

    def copy(batch: Batch) -> Batch:
        with torch.cuda.stream(copying):
            copied: Batch = pinned(batch).to(device)
        return copied

    coming = copy(batches[0])
    for following in (*batches[1:], None):
        batch = coming
        computing.wait_stream(copying)
        for tensor in tensors_of(batch):
            tensor.record_stream(computing)  # its memory is not reused before the computation has read it
        if following is not None:
            coming = copy(following)
        yield batch


def pinned(value: Any) -> Any:
    """Return a dataclass with its tensors in pinned memory, from which copies to a GPU are asynchronous."""
    moved = {
        name: each.pin_memory() if isinstance(each, Tensor) else pinned(each)
        for name, each in _values_of(value)
        if isinstance(each, Tensor) or is_dataclass(each)
    }
    return replace(value, **moved)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass, and of dataclasses inside it."""
    for _, each in _values_of(value):
        if isinstance(each, Tensor):
            yield each
        elif is_dataclass(each):
            yield from tensors_of(each)


def _values_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a dataclass's fields."""
    yield from ((field.name, getattr(value, field.name)) for field in fields(value))


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of copies to a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
