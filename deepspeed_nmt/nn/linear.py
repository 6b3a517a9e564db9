"""Matrix products.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops

Epilogue = Callable[[Tensor, Tensor | None], Tensor]
"""What is done with a product, given it and a bias that is still to be added, or None."""


class Linear(nn.Linear):
    """x W^T + b, and what follows it: a fused operation adds the bias on its way.

    It runs inside ``forward`` because ZeRO-3 makes a module's parameters whole only there.
    """

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Shape: (..., D) -> (..., E), or what ``then`` makes of that."""
        if then is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is not None and ops.takes_bias(x):
            return then(F.linear(x, self.weight), self.bias)
        return then(F.linear(x, self.weight, self.bias), None)
