"""Hashes of gradients, to find where two runs part that should be the same to the bit."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from deepspeed_nmt.files import append_line

_NAN = 12345.0
"""Number that stands for NaN in a digest."""


def digest_of(tensors: Iterable[Tensor], digest: int = 0) -> int:
    """Return the CRC-32 of the values of tensors, continuing from ``digest``; all NaNs are alike."""
    for tensor in tensors:
        # There are many NaNs, and which of them a sum has may depend on the order of its terms.
        numbers = tensor.detach().nan_to_num(nan=_NAN, posinf=math.inf, neginf=-math.inf).flatten()
        digest = zlib.crc32(numbers.view(torch.uint8).cpu().numpy().tobytes(), digest)
    return digest


class GradientHashes:
    """Writer of a JSON object a line for each micro-batch of a rank, and one for the reduced gradient of each update.

    A line has ``update``, ``micro_batch`` (null for the reduced gradient) and ``gradients``: by parameter the CRC-32
    of what the micro-batch's backward pass alone has given, or of this rank's part after the reduction.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], file: Path) -> None:
        self._file, self._update = file, 0
        self._digests: dict[str, int] = {}
        for name, parameter in parameters.items():
            parameter.register_hook(partial(self._take, name))  # type: ignore[no-untyped-call]

    def begin(self, update: int) -> None:
        """Begin a micro-batch; gradients of other backward passes do not count."""
        self._update = update
        self._digests.clear()

    def write(self, micro_batch: int | None) -> None:
        """Write the line of a micro-batch."""
        hashes = {name: f"{digest:08x}" for name, digest in sorted(self._digests.items())}
        line = {"update": self._update, "micro_batch": micro_batch, "gradients": hashes}
        append_line(self._file, json.dumps(line))

    def write_reduced(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Write the line of the reduced gradient, of which this rank may hold no part."""
        self._digests = {name: digest_of([part]) for name, part in gradients.items() if part is not None}
        self.write(None)

    def _take(self, name: str, gradient: Tensor) -> None:
        self._digests[name] = digest_of([gradient], self._digests.get(name, 0))
