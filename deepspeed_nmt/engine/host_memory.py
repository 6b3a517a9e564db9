"""Host memory: how much of it is available, and a buffer for copies of the training state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.console import logger

_BYTES = 4
"""Bytes of an element: weights and moments are copied as fp32."""


def available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory in bytes that this process can still take.

    It is the least of what the system has left and what the control groups of the process leave it: a container, or a
    job of SLURM. A number too large to matter is returned where neither is known.

    Args:
        root: root of the file system that describes them.
    """
    found = [1 << 62]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) << 10)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            found += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            found += _left(root / "sys/fs/cgroup/memory", path, *files)
    return max(0, min(found))


def _left(top: Path, path: str, limit_file: str, usage_file: str) -> Iterator[int]:
    """Yield the bytes that a control group and those around it leave.

    Inside a container the path may be that of the host; then only the top is there.
    """
    group = top / path.lstrip("/")
    for directory in (group, *group.parents):
        limit, usage = _lines(directory / limit_file), _lines(directory / usage_file)
        if limit and usage and limit[0].isdigit():
            cached = [
                line.split()[1] for line in _lines(directory / "memory.stat") if line.startswith("inactive_file ")
            ]
            yield int(limit[0]) - int(usage[0]) + int(cached[0] if cached else 0)
        if directory == top:
            return


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class HostBuffer:
    """Buffer for copies of fp32 tensors in host memory. It is allocated once, and each copy replaces the one before.

    For a GPU its pages are locked, so that the GPU copies at its full speed.

    Args:
        elements: number of elements of all tensors together.
        device: that the tensors are on; some may also be on the CPU.

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
            error = int(_cuda_runtime().cudaHostRegister(self._flat.data_ptr(), self.bytes, 0))
            self._locked = error == 0
            if not self._locked:
                logger.warning(
                    "host memory for checkpoints could not be locked (CUDA error %d): copies are slower", error
                )

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        return _BYTES * self._flat.numel()

    def begin(self) -> None:
        """Begin a new copy, which overwrites the one before."""
        self._used = 0

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors, as parts of the buffer; from a GPU they are complete after :meth:`wait`."""
        sizes = [tensor.numel() for tensor in tensors]
        room = self._flat[self._used : self._used + sum(sizes)]
        self._used += sum(sizes)
        parts = [part.view(tensor.shape) for part, tensor in zip(torch.split(room, sizes), tensors, strict=True)]
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        return parts

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
