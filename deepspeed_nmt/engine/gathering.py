"""Gathering of a training state, layer by layer, for checkpoints and validation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel

SHARD_BYTES = 512 * 1024**2
"""Bytes of tensors after which a checkpoint begins another file; they bound the host memory of its writer."""


def checkpoint_bytes(trained: int, frozen: int) -> int:
    """Return the bytes of the tensors in a checkpoint: fp32 weights, and two moments of each trained parameter.

    Args:
        trained: number of trained parameters of the whole model.
        frozen: number of frozen ones.
    """
    return 12 * trained + 4 * frozen


def names_by_layer(model: TranslationModel) -> Iterator[list[str]]:
    """Yield the names of a model's parameters in order: those of a layer together, and those between layers."""
    layer_of = {part: number for number, layer in enumerate(model.all_layers()) for part in layer.parameters()}
    named = model.named_parameters()
    for _, group in itertools.groupby(named, key=lambda each: layer_of.get(each[1])):
        yield [name for name, _ in group]


class HostCopies:
    """Copies of fp32 tensors in the host's memory.

    From a GPU, tensors are copied to one buffer of pinned memory, which is reused, and waited for together.

    Args:
        device: that the tensors are on; they may also be on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors on the CPU."""
        if self._device.type != "cuda":
            return [tensor.clone() for tensor in tensors]
        sizes = [tensor.numel() for tensor in tensors]
        if sum(sizes) > self._pinned.numel():
            self._pinned = torch.empty(sum(sizes), pin_memory=True)
        parts = [
            part.view(tensor.shape)
            for part, tensor in zip(torch.split(self._pinned[: sum(sizes)], sizes), tensors, strict=True)
        ]
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return [part.clone() for part in parts]
