"""Muon: orthogonalised momentum for the matrices of layers, AdamW for all else.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; scaled as Liu et al., "Muon is
Scalable for LLM Training", 2025, do, so that the learning rate and the weight decay are those of AdamW. For a matrix
W of m rows and n columns with gradient G, momentum mu, learning rate r and weight decay d,

    B <- mu B + (1 - mu) G,
    W <- (1 - r d) W - 0.2 sqrt(max(m, n)) r NS(mu B + (1 - mu) G),

where NS makes the singular values about 1 by five steps of a Newton-Schulz iteration. It is torch's, in bfloat16 on
every device, so two layouts whose gradients differ by rounding agree less closely than with AdamW. Embeddings, the
output projection, biases, norms and whatever else is no matrix of a layer have AdamW with the same learning rate.

A matrix whose gradient is zero, such as that of a sub-layer that was dropped in an update, is left alone then: NS has
no scale, so its old momentum would move it as far as a gradient does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from typing_extensions import override

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.engine.eager import eager
from deepspeed_nmt.engine.optimizer import Groups
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.train.optimizers.adam import AdamWConfig


class MuonConfig(AdamWConfig):
    """Muon for the matrices of layers; ``beta1``, ``beta2`` and ``eps`` are those of AdamW for all else."""

    needs_whole: ClassVar[bool] = True

    name: Literal["muon"] = "muon"  # type: ignore[assignment]
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0, description="decay of the gradient's running mean in Muon")

    @override
    def groups(self, module: nn.Module) -> Groups:
        """Return the groups of Muon, which have ``muon`` set, and those of AdamW.

        Raises:
            ConfigError: if no layer has a matrix that is trained, or parameters have rates of their own.
        """
        self.refuse_rates(module)
        models = [part for part in module.modules() if isinstance(part, TranslationModel)]
        in_layers = {p for model in models for layer in model.all_layers() for p in layer.parameters()}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter in in_layers and parameter.ndim == 2]
        if not matrices:
            raise ConfigError("optimizer.name=muon is for matrices of layers, and none is trained; use adamw")
        others = [parameter for parameter in trained if parameter not in set(matrices)]
        return [*self.decayed(matrices, muon=True), *self.decayed(others, muon=False)]

    @override
    def state_shapes(self, group: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape} if group["muon"] else super().state_shapes(group, shape)

    @override
    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return eager(MuonWithAdamW)(groups, self)


class MuonWithAdamW(torch.optim.Optimizer):
    """Torch's Muon and AdamW, each over its groups, as one optimizer: groups and states are theirs, too."""

    def __init__(self, groups: Groups, config: MuonConfig) -> None:
        super().__init__(groups, {"lr": config.lr})
        kinds: dict[bool, Groups] = {True: [], False: []}
        for group in self.param_groups:
            kinds[group["muon"]].append(group)
        self._parts: list[torch.optim.Optimizer] = []
        if kinds[True]:
            settings: dict[str, Any] = {"momentum": config.momentum, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(eager(torch.optim.Muon)(kinds[True], lr=config.lr, **settings))
        if kinds[False]:
            self._parts.append(AdamWConfig.build(config, kinds[False]))
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step of both; one that has no states yet makes them by its first step."""
        hidden = (p for group in self.param_groups if group["muon"] for p in group["params"])
        matrices = [p for p in hidden if self.state.get(p) and p.grad is not None]
        used = torch.stack([matrix.grad.any() for matrix in matrices]).tolist() if matrices else []
        unused = {p: p.grad for p, is_used in zip(matrices, used, strict=True) if not is_used}
        for matrix in unused:
            matrix.grad = None
        for part in self._parts:
            part.step()
        for matrix, gradient in unused.items():
            matrix.grad = gradient
