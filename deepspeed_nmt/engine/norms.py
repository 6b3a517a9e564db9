"""Norms of an update by parameter: of its gradient, and of the change that it makes to the weights.

They are measured in few updates, on the device, without a copy of weights or gradients. The change follows from
Adam's state after the step. With learning rate r, weight decay d, moments m and v, and t steps so far,

    s = r (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),
    w' = w - s                           (Adam, whose weight decay is part of the gradient)
    w' = (1 - r d) w - s                 (AdamW), thus w' - w = -(s + r d w') / (1 - r d).

Legend: P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepspeed_nmt.parallel.collectives import all_reduce_over_data_ranks
from deepspeed_nmt.parallel.slices import sum_over_slices
from deepspeed_nmt.parallel.world import World

_AT_ONCE = 1 << 22
"""Elements whose changes are computed at once, which bounds the memory that this needs: 16 MiB for each temporary."""


@dataclass(frozen=True)
class Squares:
    """Sums of squares of an update by parameter, over all ranks; those of parameters that are not trained are absent.

    Attributes:
        gradient: of the gradient before clipping, without the loss scale.
        change: of the change of the fp32 weights.
    """

    gradient: dict[str, float]
    change: dict[str, float]


class AdamGroup(NamedTuple):
    """Settings of Adam for a parameter.

    Attributes:
        betas: decays of the moments.
        eps: added to the denominator.
        decay: weight decay that is decoupled from the gradient.
    """

    betas: tuple[float, float]
    eps: float
    decay: float


class AdamPart(NamedTuple):
    """This rank's part of a parameter after a step, in any shape; all tensors are fp32 and of one size.

    Attributes:
        weight: the weight.
        mean: first moment.
        square: second moment.
        group: settings.
    """

    weight: Tensor
    mean: Tensor
    square: Tensor
    group: AdamGroup


def adam_groups(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, AdamGroup]:
    """Return the settings of Adam by parameter."""
    return {parameter: _settings(group) for group in optimizer.param_groups for parameter in group["params"]}


def _settings(group: Mapping[str, Any]) -> AdamGroup:
    return AdamGroup(group["betas"], group["eps"], group["weight_decay"] * group["decoupled_weight_decay"])


@torch.no_grad()
def squares_of(tensors: Sequence[Tensor | None]) -> Tensor:
    """Return the sum of squares of each tensor, 0 where there is none. Shape: -> fp64 (P,)."""
    present = {number: tensor for number, tensor in enumerate(tensors) if tensor is not None}
    if not present:
        return torch.zeros(len(tensors), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(list(present.values()), 2, dtype=torch.float32)).double()
    return _spread(norms.square(), list(present), len(tensors))


@torch.no_grad()
def squared_changes(parts: Sequence[AdamPart | None], lr: float, step: int) -> Tensor:
    """Return the sum of squares of the change of each part in the newest step, 0 where there is none.

    Args:
        parts: of the parameters, on one device.
        lr: learning rate of the step.
        step: number of the step, from 1.

    Shape: -> fp64 (P,)
    """
    numbers: list[int] = []
    squares: list[Tensor] = []
    for group, pieces in _at_once(parts):
        numbers += [number for number, _ in pieces]
        squares.append(_changes([piece for _, piece in pieces], group, lr, step))
    if not squares:
        return torch.zeros(len(parts), dtype=torch.float64)
    return _spread(torch.cat(squares), numbers, len(parts))


def _at_once(parts: Sequence[AdamPart | None]) -> Iterator[tuple[AdamGroup, list[tuple[int, AdamPart]]]]:
    """Yield pieces of parts, with the numbers of the parts, in lists that are computed at once."""
    for group in dict.fromkeys(part.group for part in parts if part is not None):
        found: list[tuple[int, AdamPart]] = []
        elements = 0
        for number, part in enumerate(parts):
            if part is None or part.group != group:
                continue
            columns = [torch.split(tensor.detach().flatten(), _AT_ONCE) for tensor in part[:3]]
            for weight, mean, square in zip(*columns, strict=True):
                found.append((number, AdamPart(weight, mean, square, group)))
                elements += weight.numel()
                if elements >= _AT_ONCE:
                    yield group, found
                    found, elements = [], 0
        if found:
            yield group, found


def _changes(parts: Iterable[AdamPart], group: AdamGroup, lr: float, step: int) -> Tensor:
    """Return the sum of squares of the change of each part. Shape: -> fp64 (parts,)."""
    weights, means, squares, _ = zip(*parts, strict=True)
    corrections = [1.0 - beta**step for beta in group.betas]
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(corrections[1]))
    torch._foreach_add_(denominators, group.eps)
    changes = torch._foreach_div(means, denominators)
    factor, shrunk = lr / corrections[0], lr * group.decay
    if shrunk:
        torch._foreach_add_(changes, weights, alpha=shrunk / factor)
    norms = torch.stack(torch._foreach_norm(changes, 2)).double()
    return (norms * (factor / (1.0 - shrunk))).square()


def _spread(values_N: Tensor, numbers: Sequence[int], count: int) -> Tensor:
    """Add values to zeros at their numbers. Shape: (N,) -> (count,)."""
    total = values_N.new_zeros(count)
    return total.index_add_(0, torch.tensor(numbers, device=values_N.device), values_N)


def whole_squares(
    named: Mapping[str, nn.Parameter], gradient_P: Tensor, change_P: Tensor, sharded: bool, world: World
) -> Squares:
    """Sum squares over the ranks that have parts of the same parameters. All ranks call it together.

    Args:
        named: trained parameters by name.
        gradient_P: sums of squares of this rank's parts of the gradient.
        change_P: the same of the change.
        sharded: True if data-parallel ranks have different parts; False if each has the whole parameter, or the whole
            slice of a tensor-parallel rank.
        world: the ranks.
    """
    squares_2P = torch.stack([gradient_P.to(world.device), change_P.to(world.device)])
    squares_2P = sum_over_slices(squares_2P, list(named.values()), world)
    if sharded:
        all_reduce_over_data_ranks(squares_2P, world)
    gradient, change = squares_2P.tolist()
    return Squares(dict(zip(named, gradient, strict=True)), dict(zip(named, change, strict=True)))
