"""The interface of an optimizer to engines, checkpoints and planner. The optimizers are in `train/optimizers/`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Config

Groups = list[dict[str, Any]]
"""Groups of parameters with their settings, as torch's optimizers take them."""


class OptimizerConfig(Config):
    """Settings of an optimizer, and what others need to know of it.

    Attributes:
        name: name of the optimizer in its registry.
        states: names of the tensors that it keeps for each trained parameter, of the parameter's shape. A number of
            steps, ``step``, is restored, too.
    """

    states: ClassVar[tuple[str, ...]]

    name: str
    lr: float = Field(default=7e-4, gt=0.0, description="peak learning rate")
    weight_decay: float = Field(
        default=0.0, ge=0.0, description="weight decay of matrices; biases and LayerNorms are exempt"
    )
    clip_norm: float = Field(
        default=1.0, ge=0.0, description="largest norm of the gradient, which is scaled down to it; 0: no clipping"
    )

    @abstractmethod
    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer over groups of parameters, which have their own ``weight_decay``.

        A step with learning rate 0 must leave the parameters as they are.
        """

    def over(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the trained parameters of a module; refuse one that lacks some :attr:`states`."""
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.zeros(1)
        probe = self.build([{"params": [weight], "weight_decay": 0.0}])
        probe.step()
        if missing := [name for name in self.states if not isinstance(probe.state[weight].get(name), Tensor)]:
            raise ConfigError(
                f"optimizer.name={self.name} keeps no {' and no '.join(missing)} with these settings, so no resumed "
                "run could restore it; change the settings, or `states` of the optimizer's class"
            )
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self.weight_decay == 0.0:
            return self.build([{"params": trained, "weight_decay": 0.0}])
        matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
        return self.build(
            [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        )

    def squared_changes(
        self, weights: list[Tensor], states: list[list[Tensor]], group: Mapping[str, Any], lr: float, step: int
    ) -> Tensor | None:
        """Return the sum of squares of each weight's change in the newest step; None if it does not follow from them.

        Args:
            weights: after the step, fp32.
            states: for each name in :attr:`states`, those of the weights after the step.
            group: settings of the weights' group.
            lr: learning rate of the step.
            step: number of the step, from 1; 0 if the optimizer does not count.
        """
        return None
