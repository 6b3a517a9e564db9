"""Matrix products.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels.packed import Activation, JoinedWeight, PackedWeight
from deepspeed_nmt.kernels.products import linear
from deepspeed_nmt.nn.decoding import DecoderStep
from deepspeed_nmt.nn.fused import UsesKernels

if TYPE_CHECKING:
    from deepspeed_nmt.nn.layers import DecoderLayer


class Epilogue(NamedTuple):
    """An operation that follows a matrix product, and may add its bias in the same kernel.

    Attributes:
        operation: name of a method of :class:`~deepspeed_nmt.kernels.choice.Kernels`.
        apply: takes the product, and a bias that is still to be added, or None.
        activation: the function that it applies without dropout, for products that can apply it themselves.
        residual: what it adds without dropout, for products that can add it themselves; None if not a plain sum.
        finish: what it does to that sum; None if it returns it.
    """

    operation: str
    apply: Callable[[Tensor, Tensor | None], Tensor]
    activation: Activation | None = None
    residual: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None


class Weighted(Protocol):
    """A module with a weight (E,D), and a bias (E,) or None."""

    weight: Any
    bias: Any

    def __hash__(self) -> int: ...


class PackedWeights:
    """Weights of a model that are rearranged for decoding on a CPU, each when it is first used.

    Args:
        int8: True to round them to int8.
    """

    def __init__(self, int8: bool = False) -> None:
        self._int8 = int8
        self._packed: dict[tuple[Weighted, ...], PackedWeight | JoinedWeight] = {}
        self._steps: dict[nn.Module, DecoderStep] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeights:
        """Return an empty one: a copied model may be given other weights."""
        return type(self)(self._int8)

    def of(self, *layers: Weighted) -> PackedWeight | JoinedWeight:
        """Return the weights of layers that multiply the same input, one below the other."""
        if layers not in self._packed:
            weight, bias = joined(layers) if len(layers) > 1 else (layers[0].weight, layers[0].bias)
            self._packed[layers] = self._pack(weight, bias)
        return self._packed[layers]

    def step(self, layer: DecoderLayer) -> DecoderStep:
        """Return the step of a decoder layer with its packed weights."""
        step = self._steps.get(layer)
        if step is None:
            step = self._steps[layer] = DecoderStep(layer, self)
        return step

    def apply(self, layer: Linear, x: Tensor, then: Epilogue | None) -> Tensor:
        """Project, then apply the epilogue, without dropout. Shape: (..., D) -> that of the epilogue's result."""
        multiply = self.of(layer)
        if then is None:
            return multiply(x)
        if then.activation is not None:
            return multiply(x, then.activation)
        if then.residual is None:
            return then.apply(multiply(x), None)
        found = multiply(x, residual=then.residual)
        return found if then.finish is None else then.finish(found)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight | JoinedWeight:
        return PackedWeight(weight, bias, self._int8)


class JoinedWeights(PackedWeights):
    """Weights for the steps of decoder layers on a GPU: those that multiply the same input are one matrix."""

    def _pack(self, weight: Tensor, bias: Tensor | None) -> JoinedWeight:
        return JoinedWeight(weight, bias)


class UsesPackedWeights:
    """Mixin of modules that multiply by a weight.

    Attributes:
        packed: weights to use in its place in eval mode; no part of the module's state; see :func:`pack_weights`.
    """

    packed: PackedWeights | None = None


def pack_weights(model: nn.Module, int8: bool = False) -> None:
    """Have a model multiply by rearranged weights from now on, for decoding on a CPU.

    The model must be in eval mode. Its weights stay as they are; if they change, call it again.

    Args:
        model: the model, in fp32 or bf16.
        int8: True to round the weights to int8.
    """
    _use(model, PackedWeights(int8))


def unpack_weights(model: nn.Module) -> None:
    """Have a model multiply by its own weights again."""
    _use(model, None)


def _use(model: nn.Module, weights: PackedWeights | None) -> None:
    for module in model.modules():
        if isinstance(module, UsesPackedWeights):
            module.packed = weights


class Linear(nn.Linear, UsesKernels, UsesPackedWeights):
    """x W^T + b, followed by an epilogue.

    The epilogue runs inside ``forward`` because ZeRO-3 gathers a module's parameters only there.
    """

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        """Project, then apply the epilogue. Shape: (..., D) -> (..., E), or that of the epilogue's result."""
        if self.packed is not None:
            return self.packed.apply(self, x, then)
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
    if layers[0].packed is not None:
        return torch.split(layers[0].packed.of(*layers)(x), [layer.out_features for layer in layers], dim=-1)
    if not layers[0].kernels.joins_products(x):
        return [layer(x) for layer in layers]
    return torch.split(linear(x, *joined(layers)), [layer.weight.shape[0] for layer in layers], dim=-1)


def joined(layers: Sequence[Weighted]) -> tuple[Tensor, Tensor]:
    """Return weights and biases of layers as those of one, with zeros for a missing bias."""
    biases: list[Tensor] = [
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias for layer in layers
    ]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases)
