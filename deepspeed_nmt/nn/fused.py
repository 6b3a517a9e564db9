"""Modules whose operations are fused kernels, and the choice of kernels for all those of a model."""

from __future__ import annotations

from torch import nn

from deepspeed_nmt.kernels.choice import DEFAULT, Kernels


class UsesKernels:
    """Mixin of modules whose operations are carried out by :class:`~deepspeed_nmt.kernels.choice.Kernels`.

    Attributes:
        kernels: no part of the module's state; set from outside by :func:`use_kernels`.
    """

    kernels: Kernels = DEFAULT


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Have all operations of a model carried out by these kernels from now on.

    Models made from it afterwards by ``at_exit`` share its modules, and so its kernels.
    """
    for module in model.modules():
        if isinstance(module, UsesKernels):
            module.kernels = kernels
