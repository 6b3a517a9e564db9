"""Size of a checkpoint, and of the files that it is divided into."""

from __future__ import annotations

SHARD_BYTES = 512 * 1024**2
"""Bytes of tensors after which a checkpoint begins another file; they bound the host memory of its writer."""


def checkpoint_bytes(trained: int, frozen: int) -> int:
    """Return the bytes of the tensors in a checkpoint: fp32 weights, and two moments of each trained parameter.

    Args:
        trained: number of trained parameters of the whole model.
        frozen: number of frozen ones.
    """
    return 12 * trained + 4 * frozen
