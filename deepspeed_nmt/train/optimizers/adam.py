"""Adam (Kingma and Ba, 2015), and AdamW with decoupled weight decay (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Rates
from deepspeed_nmt.engine.eager import eager
from deepspeed_nmt.engine.optimizer import Groups, OptimizerConfig, rates_of
from deepspeed_nmt.errors import ConfigError


class AdamConfig(OptimizerConfig):
    """Adam, by torch's fused kernels."""

    kernels: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    decoupled: ClassVar[bool] = False
    """True if weight decay is no part of the gradient."""
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    name: Literal["adam"] = "adam"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="decay of the gradient's running mean")
    beta2: float = Field(default=0.98, ge=0.0, lt=1.0, description="decay of the squared gradient's running mean")
    eps: float = Field(default=1e-9, gt=0.0, description="added to the denominator")

    @override
    def groups(self, module: nn.Module) -> Groups:
        """Return the trained parameters in groups of equal :class:`Rates`, two of each if only matrices decay."""
        rates, kinds = rates_of(module), dict[Rates, list[nn.Parameter]]()
        if self.weight_decay and not self.decoupled and set(rates.values()) - {Rates()}:
            raise ConfigError(
                f"model.norm=completep has rules for a weight decay apart from the gradient, and optimizer.name="
                f"{self.name} makes it a part of that; use adamw, or optimizer.weight_decay=0"
            )
        for parameter in module.parameters():
            if parameter.requires_grad:
                kinds.setdefault(rates.get(parameter, Rates()), []).append(parameter)
        return [
            group
            for own, parameters in kinds.items()
            for group in self.decayed(parameters, own.weight_decay, eps=self.eps * own.eps, lr_scale=own.lr)
        ]

    @override
    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return eager(self.kernels)(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)

    @override
    def squared_change(
        self, weight: Tensor, states: list[Tensor], group: Mapping[str, Any], lr: float, step: int
    ) -> Tensor:
        """Return the sum of squares of a weight's change.

        With learning rate r, weight decay d, moments m and v, and t steps so far,

            s = r (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps),
            w' = w - s                           (Adam, whose weight decay is part of the gradient)
            w' = (1 - r d) w - s                 (AdamW), thus w' - w = -(s + r d w') / (1 - r d).
        """
        mean, square = states
        corrections = [1.0 - beta**step for beta in group["betas"]]
        change = mean / square.sqrt().div_(math.sqrt(corrections[1])).add_(group["eps"])
        factor, shrunk = lr / corrections[0], lr * group["weight_decay"] * self.decoupled
        if shrunk:
            change.add_(weight, alpha=shrunk / factor)
        norm: Tensor = torch.linalg.vector_norm(change).double() * (factor / (1.0 - shrunk))
        return norm.square()


class AdamWConfig(AdamConfig):
    """AdamW, by torch's fused kernels."""

    kernels: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    decoupled: ClassVar[bool] = True

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
