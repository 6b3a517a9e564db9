"""Norms of an update by parameter: of its gradient, and of the change that it makes to the weights.

They are measured in few updates, on the device, without a copy of weights or gradients. The change follows from the
optimizer's state after the step, as :meth:`OptimizerConfig.squared_changes` says.

Legend: P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.parallel.collectives import all_reduce_over_data_ranks, await_ranks
from deepspeed_nmt.parallel.tensor import sum_over_slices
from deepspeed_nmt.parallel.world import World

_AT_ONCE = 1 << 22
"""Elements whose changes are computed at once, which bounds the memory that this needs: 16 MiB for each temporary."""


@dataclass(frozen=True)
class Squares:
    """Sums of squares of an update by parameter, over all ranks; those of parameters that are not trained are absent.

    Attributes:
        gradient: of the gradient before clipping, without the loss scale.
        change: of the change of the fp32 weights; empty if the optimizer cannot say.
    """

    gradient: dict[str, float]
    change: dict[str, float]


class Part(NamedTuple):
    """This rank's part of a parameter after a step, its optimizer states, and the settings of its group.

    All tensors are fp32 and of one size, in any shape.
    """

    weight: Tensor
    states: tuple[Tensor, ...]
    group: Mapping[str, Any]


@torch.no_grad()
def squares_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each tensor, 0 where there is none. Shape: -> fp64 (P,)."""
    present = {number: tensor for number, tensor in enumerate(tensors) if tensor is not None}
    if not present:
        return torch.zeros(len(tensors), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(list(present.values()), 2, dtype=torch.float32)).double()
    return _spread(norms.square(), list(present), len(tensors))


@torch.no_grad()
def squared_changes(optimizer: OptimizerConfig, parts: Sequence[Part | None], lr: float, step: int) -> Tensor | None:
    """Return the sums of squares of the parts' changes, fp64 (P,), 0 where there is none; None if unknown."""
    if optimizer.needs_whole:  # its steps do not follow from pieces of states
        return None
    total_P: Tensor | None = None
    for numbers, pieces in _at_once(parts):
        weights = [piece.weight for piece in pieces]
        states = [list(column) for column in zip(*(piece.states for piece in pieces), strict=True)]
        group = pieces[0].group
        changes = optimizer.squared_changes(weights, states, group, lr * group.get("lr_scale", 1.0), step)
        if changes is None:
            return None
        spread_P = _spread(changes, numbers, len(parts))
        total_P = spread_P if total_P is None else total_P + spread_P
    return torch.zeros(len(parts), dtype=torch.float64) if total_P is None else total_P


def _at_once(parts: Sequence[Part | None]) -> Iterator[tuple[list[int], list[Part]]]:
    """Yield pieces of parts of one group that are computed at once, with the numbers of their parts."""
    groups = {id(part.group): part.group for part in parts if part is not None}
    for group in groups.values():
        numbers: list[int] = []
        pieces: list[Part] = []
        elements = 0
        for number, part in enumerate(parts):
            if part is None or part.group is not group:
                continue
            columns = [torch.split(tensor.detach().flatten(), _AT_ONCE) for tensor in (part.weight, *part.states)]
            for weight, *states in zip(*columns, strict=True):
                numbers.append(number)
                pieces.append(Part(weight, tuple(states), group))
                elements += weight.numel()
                if elements >= _AT_ONCE:
                    yield numbers, pieces
                    numbers, pieces, elements = [], [], 0
        if pieces:
            yield numbers, pieces


def _spread(values_N: Tensor, numbers: Sequence[int], count: int) -> Tensor:
    """Add values to zeros at their numbers. Shape: (N,) -> (count,)."""
    total = values_N.new_zeros(count)
    return total.index_add_(0, torch.tensor(numbers, device=values_N.device), values_N)


def whole_squares(
    named: Mapping[str, nn.Parameter], gradient_P: Tensor, change_P: Tensor | None, sharded: bool, world: World
) -> Squares:
    """Sum squares over the ranks that have parts of the same parameters. All ranks call it together.

    ``sharded`` is True if data-parallel ranks have different parts; False if each has the whole parameter, or the
    whole slice of a tensor-parallel rank.
    """
    measured = [gradient_P] if change_P is None else [gradient_P, change_P]
    squares_2P = torch.stack([values_P.to(world.device) for values_P in measured])
    squares_2P = sum_over_slices(squares_2P, list(named.values()), world)
    if sharded:
        all_reduce_over_data_ranks(squares_2P, world)
    by_name = [dict(zip(named, values, strict=True)) for values in await_ranks(squares_2P.tolist)]
    return Squares(by_name[0], by_name[1] if len(by_name) > 1 else {})
