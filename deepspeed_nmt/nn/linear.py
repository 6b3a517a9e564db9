"""Matrix products.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels.products import linear
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
            return linear(x, self.weight, self.bias)
        if self.bias is not None and self.kernels.takes_bias(then.operation, x):
            return then.apply(linear(x, self.weight), self.bias)
        return then.apply(linear(x, self.weight, self.bias), None)


def project(x: Tensor, *layers: Linear) -> Sequence[Tensor]:
    """Apply several layers to the same input; as one matrix product if the kernels prefer that.

    The parameters stay apart, so that state and checkpoints do not depend on this. Under ZeRO-3 they must be gathered
    outside of the layers' own calls.

    Shape: (..., D) -> (..., E) for each layer
    """
    if not layers[0].kernels.joins_products(x):
        return [layer(x) for layer in layers]
    weights: list[Tensor] = [layer.weight for layer in layers]
    widths = [weight.shape[0] for weight in weights]
    biases: list[Tensor] = [
        weights[0].new_zeros(width) if layer.bias is None else layer.bias
        for layer, width in zip(layers, widths, strict=True)
    ]
    return torch.split(linear(x, torch.cat(weights), torch.cat(biases)), widths, dim=-1)
