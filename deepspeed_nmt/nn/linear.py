"""Matrix products.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops


class Epilogue(NamedTuple):
    """What follows a product.

    Attributes:
        operation: of :mod:`deepspeed_nmt.kernels.ops`, which may add the bias on its way.
        apply: gets the product, and a bias that is still to be added, or None.
    """

    operation: str
    apply: Callable[[Tensor, Tensor | None], Tensor]


class Linear(nn.Linear):
    """x W^T + b, and what follows it: a fused operation adds the bias on its way.

    It runs inside ``forward`` because ZeRO-3 makes a module's parameters whole only there.
    """

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Shape: (..., D) -> (..., E), or what ``then`` makes of that."""
        if then is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None and ops.takes_bias(then.operation, x):
            return then.apply(F.linear(x, self.weight), self.bias)
        return then.apply(F.linear(x, self.weight, self.bias), None)
