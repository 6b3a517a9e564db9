"""Megatron-style tensor parallelism (Shoeybi et al. 2019), applied to a model from outside.

Neighbouring ranks hold slices of the large matrices and work on the same micro-batch:

    attention       queries, keys, values by heads (columns), output by rows
    feed-forward    first matrix by columns, second by rows
    embedding       by tokens; also the output matrix, whose logits no rank ever holds whole

LayerNorms, and the biases that are added after a sum over ranks, are held by every rank, and so are the activations
between sub-layers. A sub-layer needs two sums over the ranks: of its output, and in the backward pass of the gradient
of its input. Each primitive has a plan in :data:`PLANS`; a model made of them needs to know nothing of this.

Dropout: masks on activations that every rank holds come from the same stream and are equal; inside a sliced sub-layer
a rank draws from a stream of its own, seeded from the common one, so that recomputation draws the same again.

Legend: B batch, T length, D model width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt import randomness
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection, TokenEmbedding
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.linear import Epilogue, Linear
from deepspeed_nmt.parallel.world import World

SLICE = "tensor_slice"
"""Attribute of a parameter that is sliced: its :class:`Slice`."""


class Slice:
    """What part of a parameter a rank holds: ``[start, stop)`` of ``size`` along ``dim``."""

    def __init__(self, dim: int, size: int, world: World) -> None:
        self.dim, self.size = dim, size
        # Sizes differ by at most one where the ranks do not divide them: nothing is padded.
        self.start, self.stop = (
            size * place // world.tensor_ranks for place in (world.tensor_rank, world.tensor_rank + 1)
        )

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part; a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


def gather(tensor: Tensor, parameter: nn.Parameter, world: World) -> Tensor:
    """The whole of what neighbours hold slices of, such as ``parameter`` or its moments. All must ask together."""
    if not hasattr(parameter, SLICE):
        return tensor
    part: Slice = getattr(parameter, SLICE)
    shape = [part.size if dim == part.dim else size for dim, size in enumerate(tensor.shape)]
    # A sum with zeros changes no bits, and needs no equal sizes.
    whole = torch.zeros(shape, dtype=tensor.dtype, device=world.device)
    part.of(whole).copy_(tensor)
    dist.all_reduce(whole, group=world.tensor_group)
    return whole


def scatter(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """This rank's part of what is as large as the whole of ``parameter``."""
    return getattr(parameter, SLICE).of(whole) if hasattr(parameter, SLICE) else whole


def total_norm(parameters: list[nn.Parameter], gradients: list[Tensor], world: World) -> Tensor:
    """Norm of the whole gradient, of which neighbours hold slices. Shape: -> scalar"""
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    if world.tensor_ranks == 1:
        return norm
    sliced = [g for p, g in zip(parameters, gradients, strict=True) if hasattr(p, SLICE)]
    common = [g for p, g in zip(parameters, gradients, strict=True) if not hasattr(p, SLICE)]
    squares = [torch.nn.utils.get_total_norm(each).double() ** 2 for each in (sliced, common)]
    dist.all_reduce(squares[0], group=world.tensor_group)
    return (squares[0] + squares[1]).sqrt().to(norm.dtype)


class ModelParallelUnit:
    """The grid of ranks, as DeepSpeed asks for it (``mpu``)."""

    def __init__(self, world: World) -> None:
        self._world = world

    def get_model_parallel_rank(self) -> int:
        return self._world.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self._world.tensor_ranks

    def get_model_parallel_group(self) -> Any:
        return self._world.tensor_group

    def get_data_parallel_rank(self) -> int:
        return self._world.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self._world.data_ranks

    def get_data_parallel_group(self) -> Any:
        return self._world.data_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


def parallelize(model: nn.Module, world: World) -> None:
    """Slice a whole model, the same on every rank, in place. One rank leaves it as it is.

    Raises:
        ConfigError: if heads or inner width cannot be divided, or a part of the model has no plan.
    """
    if world.tensor_ranks == 1:
        return
    for module in list(model.modules()):
        plan = PLANS.get(type(module))
        if plan is not None:
            plan(module, world)
    common = {part for module in model.modules() if isinstance(module, COMMON) for part in module.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module not in common and not hasattr(module.weight, SLICE):
            raise ConfigError(
                f"engine.tensor_parallel is {world.tensor_ranks}, but this model's {name} has no plan for being "
                "sliced; use engine.tensor_parallel=1 with engine.ds_config=zero3"
            )


def _slice(parameter: Tensor, dim: int, world: World) -> None:
    """Keep this rank's part of a parameter. One that modules share is sliced once."""
    if not hasattr(parameter, SLICE):
        part = Slice(dim, parameter.shape[dim], world)
        parameter.data = part.of(parameter.data).clone()
        setattr(parameter, SLICE, part)
        parameter.model_parallel = True  # type: ignore[attr-defined]  # how DeepSpeed asks


def _by_columns(linear: nn.Linear, world: World) -> None:
    _slice(linear.weight, 0, world)
    if linear.bias is not None:
        _slice(linear.bias, 0, world)


def _by_rows(linear: nn.Linear, world: World) -> None:
    _slice(linear.weight, 1, world)
    _become(linear, _RowParallelLinear, world)


def _become(module: nn.Module, kind: type[nn.Module], world: World) -> None:
    module.__class__ = kind
    module.world = world  # type: ignore[assignment]


def _plan_attention(module: nn.Module, world: World) -> None:
    assert isinstance(module, MultiHeadAttention)
    heads = module.q_proj.out_features // module.head_dim
    if heads % world.tensor_ranks:
        raise ConfigError(
            f"engine.tensor_parallel must divide the model's heads, but is {world.tensor_ranks} with {heads} heads"
        )
    for linear in (module.q_proj, module.k_proj, module.v_proj):
        _by_columns(linear, world)
    _by_rows(module.out_proj, world)
    _become(module, _ParallelAttention, world)


def _plan_feed_forward(module: nn.Module, world: World) -> None:
    assert isinstance(module, FeedForward)
    if module.up_proj.out_features % world.tensor_ranks:
        raise ConfigError(
            f"engine.tensor_parallel must divide the model's ffn_dim, but is {world.tensor_ranks} with "
            f"{module.up_proj.out_features}"
        )
    _by_columns(module.up_proj, world)
    _by_rows(module.down_proj, world)
    _become(module, _ParallelFeedForward, world)


def _plan_embedding(module: nn.Module, world: World) -> None:
    assert isinstance(module, (TokenEmbedding, LearnedEmbedding))
    _slice(module.weight, 0, world)
    _become(module, _ParallelEmbedding if isinstance(module, TokenEmbedding) else _ParallelLearnedEmbedding, world)


def _plan_projection(module: nn.Module, world: World) -> None:
    assert isinstance(module, Projection)
    _slice(module.weight, 0, world)
    if module.bias is not None:
        _slice(module.bias, 0, world)
    _become(module, _ParallelProjection, world)


PLANS: dict[type[nn.Module], Callable[[nn.Module, World], None]] = {
    MultiHeadAttention: _plan_attention,
    FeedForward: _plan_feed_forward,
    TokenEmbedding: _plan_embedding,
    LearnedEmbedding: _plan_embedding,
    Projection: _plan_projection,
}
COMMON: tuple[type[nn.Module], ...] = (PredictionTransform,)
"""Modules that every rank holds whole, as it does what they read and make."""


class _RowParallelLinear(Linear):
    world: World

    def forward(self, x: Tensor, then: Epilogue | None = None) -> Tensor:
        partial_sum = F.linear(x, self.weight)
        whole: Tensor = _Sum.apply(partial_sum, self.world.tensor_group)  # type: ignore[no-untyped-call]
        if then is not None:
            return then.apply(whole, self.bias)
        return whole if self.bias is None else whole + self.bias


class _ParallelAttention(MultiHeadAttention):
    world: World

    def heads(self, query_BTD: Tensor, memory_BSD: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        itself = query_BTD is memory_BSD
        query_BTD = _copy(query_BTD, self.world)
        memory_BSD = query_BTD if itself else _copy(memory_BSD, self.world)
        with _own_masks(self.training and self.dropout_p > 0.0, self.world):
            return super().heads(query_BTD, memory_BSD, mask, causal)


class _ParallelFeedForward(FeedForward):
    world: World

    def inner(self, x: Tensor) -> Tensor:
        with _own_masks(self.training and self.dropout_p > 0.0, self.world):
            return super().inner(_copy(x, self.world))


class _ParallelLookup:
    world: World
    weight: nn.Parameter

    def lookup(self, tokens_BT: Tensor) -> Tensor:
        part: Slice = getattr(self.weight, SLICE)
        local_BT = tokens_BT - part.start
        elsewhere_BT = (local_BT < 0) | (local_BT >= part.stop - part.start)
        found_BTD = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), self.weight)
        found_BTD = found_BTD.masked_fill(elsewhere_BT.unsqueeze(-1), 0.0)
        whole: Tensor = _Sum.apply(found_BTD, self.world.tensor_group)  # type: ignore[no-untyped-call]
        return whole


class _ParallelEmbedding(_ParallelLookup, TokenEmbedding):
    pass


class _ParallelLearnedEmbedding(_ParallelLookup, LearnedEmbedding):
    pass


class _ParallelProjection(Projection):
    world: World

    def forward(self, states: Any, consume: Callable[..., Any] | None = None) -> Any:
        assert consume is not None, "no rank holds whole rows of logits"
        vocabulary = _Vocabulary(getattr(self.weight, SLICE), self.world.tensor_group)
        return super().forward(states, partial(consume, vocabulary=vocabulary))


class _Vocabulary:
    """The rows of the output matrix that this rank holds; see :class:`deepspeed_nmt.kernels.rows.VocabularySlice`."""

    def __init__(self, part: Slice, group: Any) -> None:
        self.start, self.size = part.start, part.size
        self._group = group

    def sum(self, x: Tensor) -> None:
        _add_up(x, self._group)

    def max(self, x: Tensor) -> None:
        if x.device.type != "meta":
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)


class _Sum(torch.autograd.Function):
    """Forward: the sum over neighbours. Backward: the gradient, which they all hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        _add_up(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Copy(torch.autograd.Function):
    """Forward: what all neighbours hold. Backward: the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        _add_up(total, ctx.group)
        return total, None


def _add_up(x: Tensor, group: Any) -> None:
    """In place, over a group. On the meta device, where a model is counted, there is nobody to ask."""
    if x.device.type != "meta":
        dist.all_reduce(x, group=group)


def _copy(x: Tensor, world: World) -> Tensor:
    copied: Tensor = _Copy.apply(x, world.tensor_group)  # type: ignore[no-untyped-call]
    return copied


@contextlib.contextmanager
def _own_masks(needed: bool, world: World) -> Iterator[None]:
    """Draw from a stream of this rank's own inside, and go on with the common one after."""
    if not needed:
        yield
        return
    common = int(torch.randint(2**62, ()))
    cuda = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(randomness.key(common, randomness.Purpose.TENSOR_RANK, world.tensor_rank) >> 1)
        yield
