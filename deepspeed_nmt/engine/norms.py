"""Norms of an update by parameter: of its gradient, and of the change that it makes to the weights.

They are measured in few updates, on the device, without a copy of weights or gradients. The change follows from the
optimizer's state after the step, as :meth:`OptimizerConfig.squared_change` says.

Legend: P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.parallel.collectives import all_reduce_over_data_ranks, await_ranks
from deepspeed_nmt.parallel.tensor import sum_over_slices
from deepspeed_nmt.parallel.world import World

_AT_ONCE = 1 << 22
"""Elements of a parameter whose change is computed at once: 16 MiB for each temporary."""


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
    total = norms.new_zeros(len(tensors))
    total[list(present)] = norms.square()
    return total


@torch.no_grad()
def squared_changes(optimizer: OptimizerConfig, parts: Sequence[Part | None], lr: float, step: int) -> Tensor | None:
    """Return the sums of squares of the parts' changes, fp64 (P,), 0 where there is none; None if unknown.

    Long parts are taken piece by piece, which bounds the memory.
    """
    if optimizer.needs_whole:  # its steps do not follow from pieces of states
        return None
    sums: dict[int, Tensor] = {}
    for number, part in enumerate(parts):
        if part is None:
            continue
        columns = [torch.split(tensor.detach().flatten(), _AT_ONCE) for tensor in (part.weight, *part.states)]
        for weight, *states in zip(*columns, strict=True):
            rate = lr * part.group.get("lr_scale", 1.0)
            square = optimizer.squared_change(weight, states, part.group, rate, step)
            if square is None:
                return None
            sums[number] = sums[number] + square if number in sums else square
    if not sums:
        return torch.zeros(len(parts), dtype=torch.float64)
    total = next(iter(sums.values())).new_zeros(len(parts))
    total[list(sums)] = torch.stack(list(sums.values()))
    return total


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
