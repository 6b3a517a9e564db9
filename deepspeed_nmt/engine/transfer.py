"""Copies between host and device: micro-batches on their way to a GPU, the training state on its way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.batch import Batch


def on_device(batches: Sequence[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield micro-batches on a device, in order.

    On a GPU a batch is copied from pinned memory on a stream of its own, one ahead, so neither the CPU nor the
    computation waits for a copy.
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
    moved = {}
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            moved[field.name] = part.pin_memory()
        elif is_dataclass(part):
            moved[field.name] = pinned(part)
    return replace(value, **moved)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a dataclass, and of dataclasses inside it."""
    for field in fields(value):
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            yield part
        elif is_dataclass(part):
            yield from tensors_of(part)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class HostBuffer:
    """Buffer for copies of fp32 tensors in host memory. It is allocated once, and each copy replaces the one before.

    For a GPU its pages are locked, so that the GPU copies at its full speed.

    Raises:
        RuntimeError: if the host has no room for it.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._device = device
        self._flat = torch.empty(elements).zero_()  # takes its pages now, not while training waits
        self._used = 0
        self._locked = False
        if device.type == "cuda" and elements:
            # torch's own pinned memory is rounded up to a power of two.
            error = int(_cuda_runtime().cudaHostRegister(self._flat.data_ptr(), self._flat.nbytes, 0))
            self._locked = error == 0
            if not self._locked:
                logger.warning(
                    "host memory for checkpoints could not be locked (CUDA error %d): copies are slower", error
                )

    def begin(self) -> None:
        """Begin a new copy, which overwrites the one before."""
        self._used = 0

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors, as parts of the buffer; from a GPU they are complete after :meth:`wait`."""
        sizes = [tensor.numel() for tensor in tensors]
        parts = torch.split(self._flat[self._used : self._used + sum(sizes)], sizes)
        self._used += sum(sizes)
        copies = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        return copies

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Release the memory."""
        if self._locked:
            _cuda_runtime().cudaHostUnregister(self._flat.data_ptr())
            self._locked = False
        self._flat = torch.empty(0)
