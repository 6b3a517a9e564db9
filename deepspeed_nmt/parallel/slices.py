"""Slices of parameters that tensor-parallel ranks hold, and what is computed over all slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def gather(tensors: Sequence[Tensor], parameters: Sequence[nn.Parameter], world: World) -> list[Tensor]:
    """Return the whole tensors of which the ranks of a tensor-parallel group hold slices, by one all-reduce.

    Collective: all ranks of the group must call it.

    Args:
        tensors: this rank's slices of parameters, or of moments of them, all of one dtype.
        parameters: the parameter of each; the tensor of a replicated one is returned unchanged.
        world: the ranks.
    """
    found = list(tensors)
    sliced = [index for index, parameter in enumerate(parameters) if hasattr(parameter, SLICE)]
    if not sliced:
        return found
    parts: list[Slice] = [getattr(parameters[index], SLICE) for index in sliced]
    shapes = [part.whole_shape(tensors[index]) for index, part in zip(sliced, parts, strict=True)]
    sizes = [shape.numel() for shape in shapes]
    # An all-reduce of slices padded with zeros is exact, and allows slices of different sizes.
    flat = torch.zeros(sum(sizes), dtype=tensors[0].dtype, device=world.device)
    for index, part, shape, whole in zip(sliced, parts, shapes, torch.split(flat, sizes), strict=True):
        found[index] = whole.view(shape)
        part.of(found[index]).copy_(tensors[index])
    dist.all_reduce(flat, group=world.tensor_group)
    return found


def scatter(whole: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this rank's slice of a tensor that has the shape of the whole ``parameter``."""
    return getattr(parameter, SLICE).of(whole) if hasattr(parameter, SLICE) else whole


def total_norm(parameters: list[nn.Parameter], gradients: list[Tensor], world: World) -> Tensor:
    """Compute the norm of the whole gradient, of which each tensor-parallel rank holds slices.

    Collective: all ranks of a tensor-parallel group must call it.

    Args:
        parameters: sliced and replicated parameters.
        gradients: their gradients, in the same order.
        world: the ranks.
    """
    norm: Tensor = torch.nn.utils.get_total_norm(gradients)
    if world.tensor_ranks == 1:
        return norm
    sliced = [g for p, g in zip(parameters, gradients, strict=True) if hasattr(p, SLICE)]
    common = [g for p, g in zip(parameters, gradients, strict=True) if not hasattr(p, SLICE)]
    squares = [torch.nn.utils.get_total_norm(each).double() ** 2 for each in (sliced, common)]
    dist.all_reduce(squares[0], group=world.tensor_group)
    return (squares[0] + squares[1]).sqrt().to(norm.dtype)


def sum_over_slices(values_NP: Tensor, parameters: Sequence[nn.Parameter], world: World) -> Tensor:
    """Sum values of the slices of parameters over the ranks of a tensor-parallel group.

    Collective: all ranks of the group must call it.

    Args:
        values_NP: values of this rank's slices. Those of a replicated parameter are equal on all ranks, and stay so.
        parameters: sliced and replicated ones. Length: P
        world: the ranks.
    """
    if world.tensor_ranks == 1:
        return values_NP
    if world.tensor_rank > 0:
        sliced_P = torch.tensor([hasattr(parameter, SLICE) for parameter in parameters], device=world.device)
        values_NP = values_NP * sliced_P
    dist.all_reduce(values_NP, group=world.tensor_group)
    return values_NP
