"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023) as a toy optimizer: one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.engine.optimizer import Groups, OptimizerConfig
from deepspeed_nmt.registry import Entry


class LionConfig(OptimizerConfig):
    """Settings of Lion."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    name: Literal["lion"] = "lion"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="share of the mean in the step")
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0, description="decay of the gradient's running mean")

    @override
    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return Lion(groups, {"lr": self.lr, "betas": (self.beta1, self.beta2)})


class Lion(torch.optim.Optimizer):
    """Lion: w <- (1 - r d) w - r sign(beta1 m + (1 - beta1) g), m <- beta2 m + (1 - beta2) g."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    mean: Tensor = state.setdefault("exp_avg", torch.zeros_like(weight))
                    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                    weight.sub_(group["lr"] * mean.lerp(weight.grad, 1.0 - beta1).sign())
                    mean.lerp_(weight.grad, 1.0 - beta2)


ENTRY = Entry("lion", LionConfig, LionConfig.over)
