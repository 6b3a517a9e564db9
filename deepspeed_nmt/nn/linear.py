"""Matrix products, by weights as they are or packed for decoding on a CPU.

Legend: D input width, E output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.kernels.choice import UsesKernels
from deepspeed_nmt.kernels.onednn_ops import PackedWeight
from deepspeed_nmt.kernels.torch_ops import VocabularySlice
from deepspeed_nmt.native.library import FEW_ROWS, Library, Panels

_SMALL = 1 << 19
"""Elements of the largest weight of a layer up to which native code in one thread is as fast as torch in several."""


class Product(NamedTuple):
    """A matrix product, and the bias (E,) that the next operation is to add in its own kernel; None for none."""

    value: Tensor
    bias: Tensor | None

    def total(self) -> Tensor:
        """Return the sum of both. Shape: -> (..., E)."""
        return self.value if self.bias is None else self.value + self.bias


class PackedWeights:
    """Weights of a model that are rearranged for decoding on a CPU, each when it is first used.

    Attributes:
        int8: True if they are rounded to int8, in which native code makes all products.
        native: code for products of few rows, and for steps of decoder layers; None: oneDNN and torch do all.
        steps: steps of decoder layers with these weights, each made by its layer when it is first taken.
    """

    def __init__(self, int8: bool = False, native: Library | None = None) -> None:
        self.steps: dict[nn.Module, Any] = {}
        self.int8 = int8
        self.native = native
        self._packed: dict[tuple[Any, ...], PackedProduct] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeights:
        """Return an empty one: a copied model may be given other weights."""
        return type(self)(self.int8, self.native)

    def of(self, *layers: Any) -> PackedProduct:
        """Return the product by layers that multiply the same input, one below the other; they may have biases."""
        if layers not in self._packed:
            self._packed[layers] = PackedProduct(layers, self.int8, self.native)
        return self._packed[layers]

    def steps_natively(self, rows: int, largest: int) -> bool:
        """Return True if native code makes the step of a layer, given the number of elements of its largest weight.

        A few rows are one thread's. In several oneDNN multiplies them faster, but for small weights all that torch
        does between the products takes longer.
        """
        if self.native is not None and not self.int8 and torch.get_num_threads() > 1 and rows <= FEW_ROWS:
            return largest <= _SMALL
        return multiplies_natively(self.native, rows)


def multiplies_natively(native: Library | None, rows: int) -> bool:
    """Return True if native products of so many rows are faster than oneDNN's in one thread."""
    return native is not None and (rows <= FEW_ROWS or native.is_wide)


class PackedProduct:
    """x W^T + b of layers: in int8 by native code, else by that or oneDNN, whichever is faster for so many rows."""

    def __init__(self, layers: Sequence[Any], int8: bool, native: Library | None) -> None:
        self._layers, self._int8, self._native = layers, int8, native

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply. Shape: (..., D) -> (..., E)."""
        panels = self.native(x.numel() // x.shape[-1]) if x.dtype == torch.float32 else None
        return self._by_onednn(x) if panels is None else panels(x)

    def native(self, rows: int) -> Panels | None:
        """Return the weights by which native code multiplies so many rows in fp32; None if oneDNN is faster."""
        is_able = torch.get_num_threads() == 1 and multiplies_natively(self._native, rows)
        return self.panels if self._int8 or is_able else None

    @cached_property
    def panels(self) -> Panels:
        """The weights as native code multiplies by them."""
        assert self._native is not None
        return Panels(self._native, *joined(self._layers), self._int8)

    @cached_property
    def _by_onednn(self) -> PackedWeight:
        return PackedWeight(*joined(self._layers))


class UsesPackedWeights:
    """Mixin of modules that multiply by a weight.

    Attributes:
        packed: weights to use in its place in eval mode; no part of the module's state; see :func:`pack_weights`.
    """

    packed: PackedWeights | None = None


def pack_weights(model: nn.Module, int8: bool = False, native: Library | None = None) -> None:
    """Have a model in eval mode, fp32 or bf16, multiply by rearranged weights, for decoding on a CPU.

    ``int8`` rounds them and the inputs of products, needs ``native`` code, and refuses weights that are not finite.
    ``native`` code needs fp32. If the model's own weights change, call it again.
    """
    assert native is not None or not int8, "int8 is native"
    if int8 and (name := next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)):
        raise CheckpointError(f"{name} has NaN or infinity, so the checkpoint is damaged; translate with another one")
    use_weights(model, PackedWeights(int8, native))


def use_weights(model: nn.Module, weights: PackedWeights | None) -> None:
    """Have a model multiply by rearranged weights; None: by its own again."""
    for module in model.modules():
        if isinstance(module, UsesPackedWeights):
            module.packed = weights


def packing_of(model: nn.Module) -> PackedWeights | None:
    """Return the rearranged weights of a model; None if it uses its own."""
    packed = (part.packed for part in model.modules() if isinstance(part, UsesPackedWeights))
    return next((weights for weights in packed if weights is not None), None)


class OneRank:
    """The ranks that hold slices of a module's weights: this one alone, with whole weights.

    :class:`deepspeed_nmt.parallel.tensor.TensorRanks` are several.
    """

    def copy(self, x: Tensor) -> Tensor:
        """Return a replicated input of sliced products, whose gradient is summed over ranks."""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over ranks of a result that each computes from its slices; it is replicated."""
        return x

    def lookup(self, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        """Look up rows of an embedding matrix. Shape: (B,T), (V,D) -> (B,T,D)."""
        return F.embedding(tokens_BT, weight_VD)

    def vocabulary(self, weight_VD: Tensor) -> VocabularySlice | None:
        """Return the slice of the vocabulary whose rows of an output matrix this rank holds; None if it holds all."""
        return None

    def drawing(self, p: float) -> AbstractContextManager[None]:
        """Draw masks of sliced activations by a generator of this rank in the block, if ``p`` is above 0."""
        return nullcontext()


class Sliceable:
    """Mixin of modules that tensor parallelism slices.

    Attributes:
        ranks: those that hold slices; no part of the module's state; set from outside by
            :func:`deepspeed_nmt.parallel.tensor.parallelize`.
    """

    ranks = OneRank()


class Linear(nn.Linear, UsesKernels, UsesPackedWeights):
    """x W^T + b."""

    def forward(self, x: Tensor) -> Tensor:
        """Project. Shape: (..., D) -> (..., E)."""
        if self.packed is not None:
            return self.packed.of(self)(x)
        return self.kernels.linear(x, self.weight, self.bias)

    def product(self, x: Tensor, operation: str = "bias_dropout_add") -> Product:
        """Project without hooks, and leave the bias to an operation that follows and adds it in its own kernel."""
        if self.packed is None and self.bias is not None and self.kernels.takes_bias(operation, x):
            return Product(self.kernels.linear(x, self.weight), self.bias)
        return Product(self.forward(x), None)


def project(x: Tensor, *layers: Linear) -> Sequence[Tensor]:
    """Apply several layers to the same input; as one matrix product if they are packed, or the kernels prefer that.

    Under ZeRO-3 the parameters must be gathered outside of the layers' own calls.
    """
    first, widths = layers[0], [layer.weight.shape[0] for layer in layers]
    if first.packed is not None:
        return torch.split(first.packed.of(*layers)(x), widths, dim=-1)
    if not first.kernels.joins_products(x):
        return [layer(x) for layer in layers]
    return torch.split(first.kernels.linear(x, *joined(layers)), widths, dim=-1)


def joined(layers: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """Return weights and biases of layers as those of one; of several, with zeros for a missing bias."""
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    biases: list[Tensor] = [
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias for layer in layers
    ]
    return torch.cat([layer.weight for layer in layers]), torch.cat(biases)
