"""Megatron-style tensor parallelism (Shoeybi et al. 2019), applied to a model from outside.

The ranks of a tensor-parallel group hold slices of the large matrices and process the same micro-batch:

    attention       query, key and value projections by columns (heads), output projection by rows
    feed-forward    first matrix by columns, second by rows
    embedding       by tokens
    output matrix   by tokens; no rank holds the logits of the whole vocabulary

LayerNorms, biases that are added after an all-reduce, and activations between sub-layers are replicated. A sub-layer
needs two all-reduces: of its output in the forward pass, and of its input's gradient in the backward pass.
Everything that ranks exchange goes through the attribute ``ranks`` of sliced modules.

Dropout masks on replicated activations are drawn from the common generator, so they are equal on all ranks. Inside a
sliced sub-layer each rank draws from a generator of its own. Its seed is drawn from the common one, so recomputation
draws the same masks.

Legend: B batch, T length, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt import randomness
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.torch_ops import VocabularySlice
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection, TokenEmbedding
from deepspeed_nmt.nn.layers import FeedForward
from deepspeed_nmt.nn.linear import Linear, OneRank, Product
from deepspeed_nmt.parallel.world import World

SLICE = "tensor_slice"
"""Name of the attribute that holds the :class:`Slice` of a sliced parameter."""


class Slice:
    """Part of a parameter that a rank holds: ``[start, stop)`` of ``size`` along ``dim``, at most ``largest``."""

    def __init__(self, dim: int, size: int, world: World) -> None:
        self.dim, self.size, self.largest = dim, size, -(-size // world.tensor_ranks)
        # If the ranks do not divide the size, slices differ in size by one, without padding.
        self.start, self.stop = (
            size * place // world.tensor_ranks for place in (world.tensor_rank, world.tensor_rank + 1)
        )

    def of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole tensor, as a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def whole_shape(self, part: Tensor) -> torch.Size:
        """Return the shape of the whole tensor of which ``part`` is a slice."""
        return torch.Size([*part.shape[: self.dim], self.size, *part.shape[self.dim + 1 :]])


def parallelize(model: nn.Module, world: World) -> None:
    """Slice a model, equal on all ranks, in place; with one tensor-parallel rank leave it unchanged.

    A class derived from one of :data:`SLICERS` is sliced as that one, unless it overrides a method in which ranks
    exchange something. A linear layer that cannot be sliced is refused by a ConfigError.
    """
    if world.tensor_ranks == 1:
        return
    ranks = TensorRanks(world)
    for module in list(model.modules()):
        for kind, (slice_weights, methods) in SLICERS.items():
            inherits = (getattr(type(module), name, None) is getattr(kind, name) for name in methods)
            if isinstance(module, kind) and all(inherits):
                slice_weights(module, ranks)
                module.ranks = ranks  # type: ignore[assignment]
    common = {p for module in model.modules() if isinstance(module, PredictionTransform) for p in module.parameters()}
    attentions = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    common |= {parameter for attention in attentions for parameter in attention.own_parameters()[1]}
    common |= {module.bias for module in model.modules() if isinstance(module, RowParallelLinear)}
    for path, module in model.named_modules():
        if isinstance(module, (MultiHeadAttention, FeedForward, nn.Linear)):
            for name, parameter in module.named_parameters():
                if not hasattr(parameter, SLICE) and parameter not in common:
                    raise ConfigError(
                        f"engine.tensor_parallel is {world.tensor_ranks}, but this model's {path}.{name} cannot be "
                        "sliced; use engine.tensor_parallel=1 with engine.ds_config=zero3"
                    )


def _slice_parameter(parameter: Tensor, dim: int, world: World) -> None:
    """Replace a parameter by this rank's slice. A parameter that several modules share is sliced once."""
    if not hasattr(parameter, SLICE):
        part = Slice(dim, parameter.shape[dim], world)
        parameter.data = part.of(parameter.data).clone()
        setattr(parameter, SLICE, part)
        parameter.model_parallel = True  # type: ignore[attr-defined]  # DeepSpeed reads it


def _slice_rows_of(module: Any, ranks: TensorRanks) -> None:
    """Slice an embedding, an output matrix and its bias, or the outputs of a linear layer, by rows of the matrix."""
    _slice_parameter(module.weight, 0, ranks.world)
    if getattr(module, "bias", None) is not None:
        _slice_parameter(module.bias, 0, ranks.world)


def _slice_attention(attention: Any, ranks: TensorRanks) -> None:
    heads = attention.q_proj.out_features // attention.head_dim
    _slice_columns(ranks, heads, f"{heads} heads", attention.q_proj, attention.k_proj, attention.v_proj)
    for parameter in attention.own_parameters()[0]:
        _slice_parameter(parameter, 0, ranks.world)
    attention.out_proj = RowParallelLinear(attention.out_proj, ranks)


def _slice_feed_forward(network: Any, ranks: TensorRanks) -> None:
    width = network.up_proj.out_features
    _slice_columns(ranks, width, f"ffn_dim {width}", network.up_proj)
    network.down_proj = RowParallelLinear(network.down_proj, ranks)


def _slice_columns(ranks: TensorRanks, units: int, named: str, *layers: Any) -> None:
    if units % ranks.world.tensor_ranks:
        raise ConfigError(
            f"engine.tensor_parallel is {ranks.world.tensor_ranks}, which does not divide the model's {named}"
        )
    for layer in layers:
        _slice_rows_of(layer, ranks)


SLICERS: dict[type[nn.Module], tuple[Callable[[Any, TensorRanks], None], tuple[str, ...]]] = {
    MultiHeadAttention: (_slice_attention, ("forward", "heads", "project", "weights")),
    FeedForward: (_slice_feed_forward, ("forward", "inner")),
    TokenEmbedding: (_slice_rows_of, ("forward",)),
    LearnedEmbedding: (_slice_rows_of, ("forward",)),
    Projection: (_slice_rows_of, ("forward",)),
}
"""Functions that slice the weights of a module, by its class, and the methods in which ranks exchange something."""


class RowParallelLinear(Linear):
    """Linear layer sliced by input features (rows of A in Y = XA): partial sums, an all-reduce, then the bias."""

    def __init__(self, linear: Linear, ranks: TensorRanks) -> None:
        super().__init__(linear.in_features, linear.out_features, device="meta")
        _slice_parameter(linear.weight, 1, ranks.world)
        self.weight, self.bias = linear.weight, linear.bias
        self.kernels, self.training = linear.kernels, linear.training
        self.group = ranks.world.tensor_group

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x).total()

    @override
    def product(self, x: Tensor, operation: str = "bias_dropout_add") -> Product:
        whole: Tensor = _Sum.apply(self.kernels.linear(x, self.weight), self.group)  # type: ignore[no-untyped-call]
        return Product(whole, self.bias)


class TensorRanks(OneRank):
    """The ranks of a tensor-parallel group."""

    def __init__(self, world: World) -> None:
        self.world = world

    @override
    def copy(self, x: Tensor) -> Tensor:
        return _Copy.apply(x, self.world.tensor_group)  # type: ignore[no-any-return,no-untyped-call]

    @override
    def mean(self, x: Tensor) -> Tensor:
        return _Sum.apply(x / self.world.tensor_ranks, self.world.tensor_group)  # type: ignore[no-any-return,no-untyped-call]

    @override
    def lookup(self, tokens_BT: Tensor, weight_VD: Tensor) -> Tensor:
        part: Slice = getattr(weight_VD, SLICE)
        local_BT = tokens_BT - part.start
        elsewhere_BT = (local_BT < 0) | (local_BT >= part.stop - part.start)
        embedded_BTD = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), weight_VD)
        embedded_BTD = embedded_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0.0)
        return _Sum.apply(embedded_BTD, self.world.tensor_group)  # type: ignore[no-any-return,no-untyped-call]

    @override
    def vocabulary(self, weight_VD: Tensor) -> VocabularySlice:
        return _Vocabulary(getattr(weight_VD, SLICE), self.world.tensor_group)

    @override
    @contextlib.contextmanager
    def drawing(self, p: float) -> Iterator[None]:
        if p == 0.0:
            yield
            return
        world = self.world
        common = int(torch.randint(2**62, ()))
        with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
            torch.manual_seed(randomness.key(common, randomness.Purpose.TENSOR_RANK, world.tensor_rank) >> 1)
            yield


class _Vocabulary:
    """Rows of the output matrix that this rank holds; a :class:`deepspeed_nmt.kernels.torch_ops.VocabularySlice`."""

    def __init__(self, part: Slice, group: Any) -> None:
        self.start, self.size, self.largest = part.start, part.size, part.largest
        self._group = group

    def sum(self, x: Tensor) -> None:
        _all_reduce(x, self._group)

    def max(self, x: Tensor) -> None:
        _all_reduce(x, self._group, dist.ReduceOp.MAX)


class _Sum(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        _all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Copy(torch.autograd.Function):
    """Identity in the forward pass, all-reduce of the gradient in the backward pass (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        _all_reduce(total, ctx.group)
        return total, None


class Exchange:
    """Bytes that ranks would reduce: the group of models on the meta device, where the planner measures them."""

    bytes = 0


def _all_reduce(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor over a group in place; on the meta device count it only."""
    if x.device.type != "meta":
        dist.all_reduce(x, op=op, group=group)
    elif isinstance(group, Exchange):
        group.bytes += x.nbytes


def gather(tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter], world: World) -> list[Tensor]:
    """Return the whole tensors of which the ranks of a tensor-parallel group hold slices, by one all-reduce.

    The tensors are parts of ``parameters``, or of moments of them, in one dtype; replicated ones stay as they are.
    """
    wholes = list(tensors)
    sliced = [index for index, parameter in enumerate(parameters) if hasattr(parameter, SLICE)]
    if not sliced:
        return wholes
    parts: list[Slice] = [getattr(parameters[index], SLICE) for index in sliced]
    shapes = [part.whole_shape(tensors[index]) for index, part in zip(sliced, parts, strict=True)]
    sizes = [shape.numel() for shape in shapes]
    # An all-reduce of slices padded with zeros is exact, and allows slices of different sizes.
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=world.device)
    for index, part, shape, whole in zip(sliced, parts, shapes, torch.split(flat, sizes), strict=True):
        wholes[index] = whole.view(shape)
        part.of(wholes[index]).copy_(tensors[index])
    dist.all_reduce(flat, group=world.tensor_group)
    return wholes


def scatter(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's slice of a tensor that has the shape of the whole ``parameter``."""
    return getattr(parameter, SLICE).of(whole) if hasattr(parameter, SLICE) else whole


def total_norm(parameters: list[nn.Parameter], gradients: list[Tensor], world: World) -> Tensor:
    """Compute the norm of the whole gradient, of which each tensor-parallel rank holds slices. Collective."""
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    if world.tensor_ranks == 1:
        return norm
    sliced = [g for p, g in zip(parameters, gradients, strict=True) if hasattr(p, SLICE)]
    common = [g for p, g in zip(parameters, gradients, strict=True) if not hasattr(p, SLICE)]
    # The norm of no gradients is on the CPU, as of a model whose trained parameters are all replicated.
    norms = [torch.nn.utils.get_total_norm(part).to(world.device) for part in (sliced, common)]
    squares = [part.double() ** 2 for part in norms]
    dist.all_reduce(squares[0], group=world.tensor_group)
    return (squares[0] + squares[1]).sqrt().to(norm.dtype)


def sum_over_slices(values_NP: Tensor, parameters: Sequence[nn.Parameter], world: World) -> Tensor:
    """Sum values of the slices of P parameters over a tensor-parallel group; those of replicated ones stay."""
    if world.tensor_ranks == 1:
        return values_NP
    if world.tensor_rank > 0:
        sliced_P = torch.tensor([hasattr(parameter, SLICE) for parameter in parameters], device=world.device)
        values_NP = values_NP * sliced_P
    dist.all_reduce(values_NP, group=world.tensor_group)
    return values_NP
