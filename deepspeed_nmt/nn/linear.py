"""Matrix products.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.nn.fused import UsesKernels


class Epilogue(NamedTuple):
    """An operation that follows a matrix product, and may add its bias in the same kernel.

    Attributes:
        operation: name of a method of :class:`~deepspeed_nmt.kernels.choice.Kernels`.
        apply: takes the product, and a bias that is still to be added, or None.
    """

    operation: str
    apply: Callable[[Tensor, Tensor | None], Tensor]


class Linear(nn.Linear, UsesKernels):
    """x W^T + b, followed by an epilogue.

    The epilogue runs inside ``forward`` because ZeRO-3 gathers a module's parameters only there.
    """

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Project, then apply the epilogue. Shape: (..., D) -> (..., E), or that of the epilogue's result."""
        if then is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None and self.kernels.takes_bias(then.operation, x):
            return then.apply(F.linear(x, self.weight), self.bias)
        return then.apply(F.linear(x, self.weight, self.bias), None)
