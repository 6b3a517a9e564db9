"""Kernels launched and bytes moved by a layer in training on a GPU, counted without one.

    python benchmarks/run.py launches [--norm pre post] [--tokens 8192] [--layout packed padded]

It needs Triton, which defines the kernels; CUDA builds of torch include it, for others `pip install triton`.

Two micro-batches of a BIG Transformer (16-bit weights, dropout 0.1) run forward and backward in the plain engine on
the meta device, with the kernels that are expected on an H100. The first one's gradients become those of the update,
the second one's are added to them, as those of all later ones. Gradients of several layers are added together, so a
layer's count is the difference between two models of which one has eight layers more, divided by eight. The rules:

- An operation that writes a tensor is one kernel, and moves each of its tensors once. A tensor that it changes in
  place is read and written. Views and allocations are none.
- A matrix product with its bias is one kernel. Its bytes do not count: they are those "outside of matrix products".
- An operation on lists of tensors is one kernel for every 320 pieces of 65,536 elements, or every 64 tensors.
- Attention counts as a matrix product. Without a mask, and in the packed layout, it is FlashAttention: one kernel
  forward, three backward (the sums of dO O, the gradients, and their conversion to 16 bit). With a mask it is torch's
  memory-efficient kernel: one forward, one backward.
- The backward pass of torch's LayerNorm is two kernels, each of which reads the gradient and the input.

Work on the CPU, such as drawing dropout's seeds, is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from records import Results, Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.optimizer import Groups
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.kernels import attention_ops as kernels_of_attention
from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.choice import Kernels, is_installed, use_kernels
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers.adam import AdamConfig

DIM, FFN, HEADS, LENGTH, VOCABULARY = 1024, 4096, 16, 32, 1000
H100 = (9, 0)
MORE_LAYERS = 8
FLASH, EFFICIENT = (1, 3), (1, 1)
"""Kernels of attention, forward and backward."""
PIECE, PIECES, LIST = 65536, 320, 64
"""Elements of a piece, and pieces and tensors of a list, that one kernel takes."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten._addmm_activation}
_ALLOCATIONS = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_LISTS = {_aten._foreach_copy_, _aten._foreach_add_}
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_, _aten._foreach_copy_}
"""Operations that do not read the tensor that they change."""


@dataclass(frozen=True)
class Count:
    """Kernels launched and bytes moved outside of matrix products, in the forward and the backward pass."""

    forward: float
    backward: float
    forward_bytes: float
    backward_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes moved in both passes."""
        return self.forward_bytes + self.backward_bytes

    def layer(self, other: Count, tokens: int) -> Count:
        """Return the mean of the layers that ``other`` lacks, with bytes a token."""
        return Count(
            (self.forward - other.forward) / MORE_LAYERS,
            (self.backward - other.backward) / MORE_LAYERS,
            (self.forward_bytes - other.forward_bytes) / MORE_LAYERS / tokens,
            (self.backward_bytes - other.backward_bytes) / MORE_LAYERS / tokens,
        )


class MetaAdamConfig(AdamConfig):
    """Adam without torch's fused kernel, which meta tensors do not have."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return torch.optim.Adam(groups)


class Launches(TorchDispatchMode):
    """Counter of the kernels and bytes of everything on the meta device inside its ``with`` block.

    Attributes:
        phase: "forward" or "backward", to be set by :meth:`follow` or the caller.
        kernels: kernels launched, by phase.
        bytes: bytes moved outside of matrix products, by phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "forward"
        self.clear()

    def clear(self) -> None:
        """Begin to count."""
        self.kernels = {"forward": 0, "backward": 0}
        self.bytes = {"forward": 0, "backward": 0}

    def follow(self, module: nn.Module) -> None:
        """Set the phase when the module's forward pass begins and ends."""

        def enter(phase: str) -> None:
            self.phase = phase

        module.register_forward_pre_hook(lambda *_: enter("forward"))
        module.register_forward_hook(lambda *_: enter("backward"))

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
        if operation in _LISTS:
            changed = [] if operation in _OVERWRITES else list(args[0])
            self.launch(iter([*inputs, *changed]), kernels=_list_kernels(args[0]))
            return result
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

        def attention(real: Any, kernels_of: Any) -> Any:
            def attend(q: Tensor, k: Tensor, v: Tensor, seen: Any, *rest: Any) -> Tensor:
                forward, backward = kernels_of(seen)
                self.launch(iter(()), forward, product=True)
                out: Tensor = real(q, k, v, seen, *rest)
                if out.requires_grad:
                    out.register_hook(lambda _: self.launch(iter(()), backward, product=True))
                return out

            return attend

        packed = attention(choice.planned_attention, lambda seen: FLASH)
        padded = attention(choice.sdpa, lambda mask: FLASH if mask is None else EFFICIENT)
        with (
            mock.patch.object(triton_ops, "_launch", launch),
            mock.patch.object(kernels_of_attention, "_multiply", lambda *_, **__: None),
            mock.patch.object(choice, "planned_attention", packed),
            mock.patch.object(choice, "sdpa", padded),
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


def _list_kernels(tensors: Sequence[Tensor]) -> int:
    """Return the number of kernels of an operation on lists, the first of which has these tensors."""
    kernels = pieces = held = 0
    for tensor in tensors:
        held += 1
        for rest in range(-(-tensor.numel() // PIECE) - 1, -1, -1):
            pieces += 1
            if pieces == PIECES or (held == LIST and not rest):
                kernels, pieces, held = kernels + 1, 0, int(rest > 0)
    return kernels + (pieces > 0)


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements; those of an expanded one are there once."""
    numbers = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in numbers if stride != 0)


def _shares_memory(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {each.untyped_storage()._cdata for each in inputs}
    return any(each.untyped_storage()._cdata in storages for each in outputs)


def _batch(tokens: int, layout: str) -> Batch:
    rows = tokens // LENGTH
    shape = (1, rows * LENGTH) if layout == "packed" else (rows, LENGTH)

    def of(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int64, device="meta")

    segments = Segments.of([LENGTH] * rows, rows * LENGTH).to(torch.device("meta"))
    # One source position of a padded batch counts as padding: batches without any are rare.
    return Batch(
        source_BS=of(*shape),
        target_input_BT=of(*shape),
        target_output_BT=of(*shape),
        sentence_ids_B=of(rows),
        source_tokens=tokens - (layout == "padded"),
        target_tokens=tokens,
        pad=0,
        update=UpdateInfo(seed=1, number=1, tokens=tokens, sentences=rows),
        source_segments=segments if layout == "packed" else None,
        target_segments=segments if layout == "packed" else None,
    )


def count(layers: tuple[int, int], tokens: int, layout: str, **settings: Any) -> tuple[Count, Count]:
    """Count the first and the second micro-batch of an update of a Transformer.

    Args:
        layers: numbers of encoder and decoder layers.
        tokens: target tokens, and as many source tokens, of a micro-batch.
        layout: of the micro-batches.
        settings: of the model, besides those of BIG.
    """
    vocabulary = Vocabulary(VOCABULARY)
    shape = {"dim": DIM, "ffn_dim": FFN, "heads": HEADS, "encoder_layers": layers[0], "decoder_layers": layers[1]}
    with torch.device("meta"):
        model = build_transformer(TransformerConfig(**{**shape, **settings}), vocabulary)
    use_kernels(model, Kernels().planned_for(H100))
    module = TrainModule(model, Objective(LabelSmoothed(0.1, vocabulary.pad)))
    engine = PlainEngine(module, MetaAdamConfig(), "bf16", World(0, 1, 0, torch.device("meta")))
    counts = []
    with Launches().counting() as found:
        found.follow(module)
        for _ in range(2):
            found.clear()
            engine._backward(_batch(tokens, layout), 1.0)
            counts.append(Count(*found.kernels.values(), *found.bytes.values()))
    return counts[0], counts[1]


def count_layers(tokens: int = 8192, layout: str = "packed", **settings: Any) -> dict[str, tuple[Count, Count]]:
    """Count a layer of each side in the first and the second micro-batch of an update, with bytes a token.

    Arguments are those of :func:`count`.
    """
    base = count((1, 1), tokens, layout, **settings)
    more = 1 + MORE_LAYERS
    sides = {"encoder": (more, 1), "decoder": (1, more)}
    found = {}
    for side, layers in sides.items():
        first, second = count(layers, tokens, layout, **settings)
        found[side] = first.layer(base[0], tokens), second.layer(base[1], tokens)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, known, default in (
        ("norm", ("pre", "post", "deepnorm"), ["pre", "post"]),
        ("layout", ("packed", "padded"), ["packed", "padded"]),
        ("activation", ("relu", "gelu"), ["relu"]),
    ):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=default, help="(default: %(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of the micro-batch (default: 8192)")


def run(arguments: argparse.Namespace) -> Results:
    """Count an encoder and a decoder layer."""
    if min(arguments.tokens) < LENGTH:
        sys.exit(f"--tokens is {min(arguments.tokens)}, which is below {LENGTH}, the length of a sentence")
    if not is_installed("softmax", "triton"):
        sys.exit("Triton is not installed; run `pip install triton`")
    options = (arguments.norm, arguments.layout, arguments.activation, arguments.tokens)
    rows: list[dict[str, object]] = []
    for norm, layout, activation, tokens in itertools.product(*options):
        for side, counts in count_layers(tokens, layout, norm=norm, activation=activation).items():
            row: dict[str, object] = {"layer": f"{side}, {norm}-norm", "layout": layout, "tokens": tokens}
            for which, found in zip(("first", "later"), counts, strict=True):
                row[f"kernels: {which}"] = [found.forward, found.backward]
                row[f"kB a token: {which}"] = found.bytes / 1e3
            rows.append(row if arguments.activation == ["relu"] else {**row, "activation": activation})
    formats = {f"kernels: {which}": "{:.0f} + {:.1f}" for which in ("first", "later")}
    formats |= {f"kB a token: {which}": "{:.1f}" for which in ("first", "later")}
    return Results(tables={"layers": Table.of(rows, formats)})
