"""Normalisation, dropout and the residual connection around a sub-layer.

Legend: D model width.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.nn.fused import UsesKernels
from deepspeed_nmt.nn.linear import Epilogue

NormStyle = Literal["pre", "post", "deepnorm"]


class Joining(NamedTuple):
    """A sub-layer's output to be added to the residual branch x: alpha x + dropout(output + bias).

    Attributes:
        output: (..., D).
        bias: (D,), or None.
        p: probability of dropping an element.
        training: False turns dropout off.
        alpha: weight of the residual branch.
    """

    output: Tensor
    bias: Tensor | None
    p: float
    training: bool
    alpha: float


class LayerNorm(nn.Module, UsesKernels):
    """Layer normalisation (Ba et al. 2016) with statistics in fp32."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor, joining: Joining | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise ``x``.

        Args:
            x: input.
            joining: is added to the residual branch ``x`` first. The sum is returned, too.

        Shape: (..., D) -> (..., D), or with ``joining`` two of them
        """
        if joining is None:
            return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        output, bias, p, training, alpha = joining
        return self.kernels.bias_dropout_add_layer_norm(
            output, bias, x, self.weight, self.bias, p, training, alpha, self.eps
        )


class Dropout(nn.Module):
    """Dropout whose masks are cheap on a CPU."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training. Shape: any -> the same."""
        return ops.dropout(x, self.p, self.training)


class Residual(nn.Module, UsesKernels):
    """The residual connection around a sub-layer f.

    - pre:      x + dropout(f(norm(x)))
    - post:     norm(x + dropout(f(x)))
    - deepnorm: norm(alpha x + dropout(f(x)))   (Wang et al. 2022)

    Used in two halves, so that a sub-layer f can take further arguments: ``x = f(res.pre_norm(x), res.epilogue(x))``.
    f calls the epilogue inside its last matrix product, so that a fused kernel adds that product's bias. If the
    epilogue is given the connection of the sub-layer that follows, the kernel computes the ``pre_norm`` of that, too.

    Args:
        dim: model width D.
        style: one of the three above.
        dropout_p: probability of dropping an element of the sub-layer's output.
        alpha: weight of the residual branch, for deepnorm.
        eps: of the LayerNorm.

    Attributes:
        watch: called with every output of the sub-layer, before dropout; None: not called.
    """

    def __init__(self, dim: int, style: NormStyle, dropout_p: float, alpha: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        assert style == "deepnorm" or alpha == 1.0
        self.norm = LayerNorm(dim, eps)
        self.dropout_p = dropout_p
        self.style = style
        self.alpha = alpha
        self.watch: Callable[[Tensor], None] | None = None
        self._ready: tuple[weakref.ref[Tensor], Tensor] | None = None  # a sum, and its norm from the same kernel

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer: normalised in pre-norm, else ``x``. Shape: (..., D) -> (..., D)."""
        if self.style != "pre":
            return x
        ready, self._ready = self._ready, None
        if ready is not None and ready[0]() is x:
            return ready[1]
        normed: Tensor = self.norm(x)
        return normed

    def epilogue(self, x: Tensor, following: Residual | None = None) -> Epilogue:
        """Return the epilogue that adds a sub-layer's output to its input ``x``. Shape of both: (..., D).

        Args:
            x: input of the sub-layer, before ``pre_norm``.
            following: the connection around the next sub-layer. Its ``pre_norm`` of the sum costs no further kernel
                then.
        """
        joins = "bias_dropout_add_layer_norm"
        # Without dropout, and if nobody watches the output, this is a plain sum.
        residual = x if self.watch is None and self.alpha == 1.0 else None
        if self.style != "pre":
            return Epilogue(joins, lambda output, bias: self.add(x, output, bias), None, residual, self.norm)
        if following is not None and self.kernels.takes_bias(joins, x):
            return Epilogue(joins, lambda output, bias: self._add_and_norm(x, output, bias, following))
        return Epilogue("bias_dropout_add", lambda output, bias: self.add(x, output, bias), None, residual)

    def add(self, x: Tensor, output: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add the sub-layer's output, plus its bias, to its input. Shape: (..., D), (..., D), (D,) -> (..., D)."""
        self._show(output, bias)
        if self.style == "pre":
            return self.kernels.bias_dropout_add(output, bias, x, self.dropout_p, self.training)
        normed: Tensor = self.norm(x, Joining(output, bias, self.dropout_p, self.training, self.alpha))[1]
        return normed

    def _add_and_norm(self, x: Tensor, output: Tensor, bias: Tensor | None, following: Residual) -> Tensor:
        """Compute the sum, as :meth:`add` does, and the ``pre_norm`` of it by ``following``, which keeps that."""
        self._show(output, bias)
        total: Tensor
        total, normed = following.norm(x, Joining(output, bias, self.dropout_p, self.training, self.alpha))
        following._keep(total, normed)
        return total

    def _keep(self, total: Tensor, normed: Tensor) -> None:
        """Keep the norm of a sum for :meth:`pre_norm`; without such a call, until the sum is freed."""

        def forget(_: weakref.ref[Tensor]) -> None:
            self._ready = None

        self._ready = weakref.ref(total, forget), normed

    def _show(self, output: Tensor, bias: Tensor | None) -> None:
        if self.watch is not None:
            self.watch(output if bias is None else output + bias)
