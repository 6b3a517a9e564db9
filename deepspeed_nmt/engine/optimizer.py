"""The interface of an optimizer to engines, checkpoints and planner. The optimizers are in `train/optimizers/`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from deepspeed_nmt.core.model import Rates, TranslationModel
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Section

Groups = list[dict[str, Any]]
"""Groups of parameters with their settings, as torch's optimizers take them."""


class OptimizerConfig(Section):
    """Settings of an optimizer, and what others need to know of it.

    Attributes:
        name: name of the optimizer in its registry.
        states: names of the tensors that it keeps for each trained parameter, unless :meth:`state_shapes` says
            otherwise. A number of steps, ``step``, is restored, too.
        needs_whole: True if a step depends on more of a parameter than an element, so that ranks must not share it.
    """

    states: ClassVar[tuple[str, ...]]
    needs_whole: ClassVar[bool] = False

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

    def groups(self, module: nn.Module) -> Groups:
        """Return the trained parameters of a module in groups, which have their own ``weight_decay``.

        A group with ``lr_scale`` has that many times the learning rate of an update.

        Raises:
            ConfigError: if parameters have other rates, and the optimizer has no use for them.
        """
        self.refuse_rates(module)
        return self.decayed([parameter for parameter in module.parameters() if parameter.requires_grad])

    def refuse_rates(self, module: nn.Module) -> None:
        """Raise a ConfigError if parameters have learning rates of their own."""
        if any(rates.lr != 1.0 for rates in rates_of(module).values()):
            raise ConfigError(
                f"model.base_dim has rules for the learning rates of Adam, and optimizer.name is {self.name}; use "
                "adam or adamw, or remove model.base_dim"
            )

    def decayed(self, parameters: Sequence[nn.Parameter], rate: float = 1.0, **settings: Any) -> Groups:
        """Return a group with these settings, or two if matrices alone have weight decay; none without parameters."""
        kinds: list[tuple[list[nn.Parameter], float]] = [(list(parameters), 0.0)]
        if self.weight_decay:
            kinds = [([p for p in parameters if p.ndim >= 2], self.weight_decay * rate)]
            kinds.append(([p for p in parameters if p.ndim < 2], 0.0))
        return [{"params": of, "weight_decay": decay, **settings} for of, decay in kinds if of]

    def state_shapes(self, group: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.Size]:
        """Return the shapes of the states of a parameter of a group, by name; by default that of the parameter."""
        return dict.fromkeys(self.states, shape)

    def state_elements(self, module: nn.Module) -> int:
        """Return the number of elements of all states of a module, which may be on the meta device."""
        return sum(
            shape.numel()
            for group in self.groups(module)
            for parameter in group["params"]
            for shape in self.state_shapes(group, parameter.shape).values()
        )

    def over(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the trained parameters of a module; refuse one that lacks some of its states."""
        groups = self.groups(module)
        for group in groups:
            weight = nn.Parameter(torch.zeros([1] * group["params"][0].ndim))
            weight.grad = torch.zeros_like(weight)
            probe = self.build([{**group, "params": [weight]}])
            probe.step()
            names = self.state_shapes(group, weight.shape)
            if missing := [name for name in names if not isinstance(probe.state[weight].get(name), Tensor)]:
                raise ConfigError(
                    f"optimizer.name={self.name} keeps no {' and no '.join(missing)} with these settings, so no "
                    "resumed run could restore it; change the settings, or `states` of the optimizer's class"
                )
        return self.build(groups)

    def squared_change(
        self, weight: Tensor, states: list[Tensor], group: Mapping[str, Any], lr: float, step: int
    ) -> Tensor | None:
        """Return the sum of squares of a weight's change in the newest step; None if it does not follow from these.

        It is not called if :attr:`needs_whole` is set.

        Args:
            weight: after the step, fp32, or a piece of it. Shape: (N,)
            states: after the step, in the order of :attr:`states`. Shape: (N,) each
            step: number of the step, from 1; 0 if the optimizer does not count.

        Returns:
            fp64, without dimensions.
        """
        return None


def rates_of(module: nn.Module) -> dict[nn.Parameter, Rates]:
    """Return the rates of the parameters of all models in a module that have others than 1."""
    models = (part for part in module.modules() if isinstance(part, TranslationModel))
    return {parameter: rates for model in models for parameter, rates in model.rates().items()}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of an update, times the ``lr_scale`` of each group that has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
