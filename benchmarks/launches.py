"""Kernels launched and bytes moved by a layer in training on a GPU, counted without one.

    python benchmarks/launches.py [--norm pre] [--tokens 8192]

It needs Triton, which defines the kernels; CUDA builds of torch include it, for others `pip install triton`.

One micro-batch of a BIG Transformer (16-bit weights, dropout 0.1) runs forward and backward on the meta device, with
the kernels that are expected on an H100. A layer's count is the difference between two models of which one has one
layer more. The rules:

- An operation that writes a tensor is one kernel, and moves each of its tensors once. A tensor that it changes in
  place is read and written. Views and allocations are none.
- A matrix product with its bias is one kernel. Its bytes do not count: they are those "outside of matrix products".
- Attention is FlashAttention by segments, which needs no mask: one kernel forward, three backward (the sums of
  dO O, the gradients, and their conversion to 16 bit). It counts as a matrix product. The backward pass of torch's
  memory-efficient kernel is one kernel, but a mask in bool takes three to five small ones more each time.
- The backward pass of torch's LayerNorm is two kernels, each of which reads the gradient and the input.
- The gradients of parameters are those of an update's first micro-batch, which are kept and not added to older ones.

Work on the CPU, such as drawing dropout's seeds, is not counted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels import attention
from deepspeed_nmt.kernels.backends import is_installed
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.fused import use_kernels

DIM, FFN, HEADS, LENGTH, VOCABULARY = 1024, 4096, 16, 32, 1000
H100 = (9, 0)
ATTENTION = {"forward": 1, "backward": 3}
"""Kernels of FlashAttention."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten._addmm_activation}
_ALLOCATIONS = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_}
"""Operations that do not read the tensor that they change."""


@dataclass(frozen=True)
class Count:
    """Kernels launched and bytes moved outside of matrix products, in the forward and the backward pass."""

    forward: int
    backward: int
    forward_bytes: float
    backward_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes moved in both passes."""
        return self.forward_bytes + self.backward_bytes

    def minus(self, other: Count, tokens: int) -> Count:
        """Return the difference to ``other``, with bytes a token."""
        return Count(
            self.forward - other.forward,
            self.backward - other.backward,
            (self.forward_bytes - other.forward_bytes) / tokens,
            (self.backward_bytes - other.backward_bytes) / tokens,
        )


class Launches(TorchDispatchMode):
    """Counter of the kernels and bytes of everything on the meta device inside its ``with`` block.

    Attributes:
        phase: "forward" or "backward", to be set by the caller.
        kernels: kernels launched, by phase.
        bytes: bytes moved outside of matrix products, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.kernels = {"forward": 0, "backward": 0}
        self.bytes = {"forward": 0, "backward": 0}

    def launch(self, tensors: Iterator[Tensor], kernels: int = 1, product: bool = False) -> None:
        """Count an operation that reads or writes these tensors, each as often as it is given."""
        self.kernels[self.phase] += kernels
        if not product:
            self.bytes[self.phase] += sum(map(_size, tensors))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = list(_tensors([*args, *kwargs.values()])), list(_tensors([result]))
        operation = func.overloadpacket
        if all(each.device.type != "meta" for each in outputs) or operation in _ALLOCATIONS:
            return result
        if not func._schema.is_mutable and _shares_memory(inputs, outputs):
            return result
        if operation in _OVERWRITES:
            inputs = inputs[1:]
        if operation is _aten.native_layer_norm_backward:
            gradient, x = inputs[:2]
            self.launch(iter([*inputs, gradient, x, *outputs]), kernels=2)
        else:
            self.launch(iter([*inputs, *outputs]), product=operation in _PRODUCTS)
        return result

    @contextmanager
    def counting(self) -> Iterator[Launches]:
        """Count what runs in the block, including Triton's kernels and attention."""
        from deepspeed_nmt.kernels import triton_ops  # imports Triton

        def launch(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
            self.launch(_tensors(arguments))

        def attend(*_: Any, **__: Any) -> None:
            self.launch(iter(()), ATTENTION[self.phase], product=True)

        with (
            mock.patch.object(triton_ops, "_launch", launch),
            mock.patch.object(attention, "_multiply", attend),
            self,
        ):
            yield self


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, which can be sequences of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those of an expanded one are there once."""
    numbers = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in numbers if stride != 0)


def _shares_memory(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {each.untyped_storage()._cdata for each in inputs}
    return any(each.untyped_storage()._cdata in storages for each in outputs)


def _batch(tokens: int) -> Batch:
    def of(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    rows = tokens // LENGTH
    return Batch(
        source_BS=of(rows, LENGTH),
        target_input_BT=of(rows, LENGTH),
        target_output_BT=of(rows, LENGTH),
        sentence_ids_B=of(rows),
        source_tokens=tokens,
        target_tokens=tokens,
        pad=0,
        update=UpdateInfo(seed=1, number=1, tokens=tokens, sentences=rows),
    )


def count(layers: tuple[int, int], tokens: int, **settings: Any) -> Count:
    """Count a micro-batch of a Transformer with this many encoder and decoder layers and further settings."""
    vocabulary = Vocabulary(VOCABULARY)
    shape = {"dim": DIM, "ffn_dim": FFN, "heads": HEADS, "encoder_layers": layers[0], "decoder_layers": layers[1]}
    with torch.device("meta"):
        model = build_transformer(TransformerConfig(**{**shape, **settings}), vocabulary).to(torch.bfloat16)
    use_kernels(model, Kernels().planned_for(H100))
    module = TrainModule(model, Objective(LabelSmoothed(0.1, vocabulary.pad))).train()
    with Launches().counting() as found:
        loss = module(_batch(tokens)).loss
        found.phase = "backward"
        loss.backward()
    return Count(*found.kernels.values(), *found.bytes.values())


def count_layers(tokens: int = 8192, **settings: Any) -> tuple[Count, Count]:
    """Count an encoder layer and a decoder layer, with bytes a token.

    Args:
        tokens: target tokens, and as many source tokens, of the micro-batch.
        settings: of the model, besides those of BIG.
    """
    base = count((2, 2), tokens, **settings)
    return (
        count((3, 2), tokens, **settings).minus(base, tokens),
        count((2, 3), tokens, **settings).minus(base, tokens),
    )


def main() -> None:
    """Print the counts of an encoder and a decoder layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the micro-batch (default: %(default)s)")
    parser.add_argument("--norm", choices=("pre", "post", "deepnorm"), default="pre", help="(default: %(default)s)")
    parser.add_argument("--activation", choices=("relu", "gelu"), default="relu", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.tokens < LENGTH:
        parser.error(f"--tokens must be at least {LENGTH}, the length of a sentence, but is {arguments.tokens}")
    if not is_installed("softmax", "triton"):
        parser.error("this needs Triton, which is not installed; run `pip install triton`")
    sys.stdout.write("layer      kernels  forward + backward    kB a token  forward + backward\n")
    layers = count_layers(arguments.tokens, norm=arguments.norm, activation=arguments.activation)
    for name, found in zip(("encoder", "decoder"), layers, strict=True):
        kernels = f"{found.forward + found.backward:>7}  {found.forward} + {found.backward}"
        moved = f"{found.forward_bytes / 1e3:.1f} + {found.backward_bytes / 1e3:.1f}"
        sys.stdout.write(f"{name:<10} {kernels:<28}  {found.bytes / 1e3:>9.1f}  {moved}\n")


if __name__ == "__main__":
    main()
