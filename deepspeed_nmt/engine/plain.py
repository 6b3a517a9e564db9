"""Updates in plain torch: one process, or data-parallel ranks that all-reduce their gradients."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import LossOutput, TrainModule
from deepspeed_nmt.engine.base import (
    MOMENTS,
    Engine,
    EngineScalars,
    LossScale,
    OnMicroBatch,
    ParameterState,
    SavedState,
    UpdateResult,
    add_sums,
    ignore_micro_batch,
    not_finite,
    seed_dropout,
)
from deepspeed_nmt.engine.config import DTYPES, Precision
from deepspeed_nmt.parallel.collectives import all_reduce_in_buckets
from deepspeed_nmt.parallel.tensor import gather, scatter, total_norm
from deepspeed_nmt.parallel.world import World


class PlainEngine(Engine):
    """Engine with fp32 weights and Adam state on every rank; 16-bit precisions by autocast.

    Args:
        module: model and objective with their weights loaded; moved to the device of ``world``.
        optimizer: torch's Adam over the module's parameters.
        clip_norm: maximum norm of the gradient; 0 disables clipping.
        precision: of the forward and backward pass.
        world: the ranks.
    """

    def __init__(
        self,
        module: TrainModule,
        optimizer: torch.optim.Optimizer,
        clip_norm: float,
        precision: Precision,
        world: World,
    ) -> None:
        self.module = module.to(world.device)
        self.device = world.device
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._precision = precision
        self._world = world
        self._named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        self._scale = LossScale(2.0**16, 1000) if precision == "fp16" else LossScale(1.0, 0)

    @override
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: int,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
    ) -> UpdateResult:
        sums: dict[str, Tensor] = {}
        scale = self._scale.value
        for index, batch in enumerate(micro_batches):
            on_micro_batch(index)
            output = self._backward(batch, scale / target_tokens)
            add_sums(sums, {"loss": output.loss, "nll": output.nll, **output.metrics})
        gradients = self._gradients()
        all_reduce_in_buckets(gradients, self._world)
        norm = float(total_norm(list(self._named.values()), gradients, self._world)) / scale
        skipped = not math.isfinite(norm)
        culprits: tuple[str, ...] = ()
        if skipped and (explain or scale == 1.0):
            culprits = not_finite(dict(zip(self._named, gradients, strict=True)))
        if not skipped:
            factor = min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm > 0.0 else 1.0
            if factor / scale != 1.0:
                torch._foreach_mul_(gradients, factor / scale)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._scale.record(overflow=skipped)
        return UpdateResult(sums, norm, skipped, scale, culprits)

    @override
    def probe(self, batch: Batch) -> None:
        self._empty_step()  # allocates Adam's moments, and gradients as of earlier micro-batches
        self._backward(batch, 0.0)
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()

    @override
    def parameters(self) -> Iterator[ParameterState]:
        for name, parameter in self.module.model.named_parameters():
            yield ParameterState(name, self._whole(parameter.detach(), parameter))

    @override
    def state(self) -> Iterator[ParameterState]:
        for name, parameter in self.module.model.named_parameters():
            state = self._optimizer.state.get(parameter, {})
            moments = {which: self._whole(state[which], parameter) for which in MOMENTS if which in state}
            yield ParameterState(name, self._whole(parameter.detach(), parameter), moments)

    @override
    def scalars(self) -> EngineScalars:
        steps = [int(state["step"]) for state in self._optimizer.state.values()]
        return EngineScalars(max(steps, default=0), self._scale.value, self._scale.good_updates)

    @override
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        self._empty_step()
        self._optimizer.zero_grad(set_to_none=True)
        for name, parameter in self._named.items():
            state = self._optimizer.state[parameter]
            for which in MOMENTS:
                state[which].copy_(scatter(saved.moment(name, which), parameter))
            state["step"].fill_(scalars.optimizer_step)
        if self._precision == "fp16":
            self._scale.value, self._scale.good_updates = scalars.loss_scale, scalars.good_updates

    def _backward(self, batch: Batch, factor: float) -> LossOutput:
        """Run a micro-batch and accumulate the gradient of ``factor`` times its loss."""
        self.module.train()
        seed_dropout(batch, self._world.data_rank)
        with self._autocast():
            output: LossOutput = self.module(batch.to(self.device))
        (output.loss * factor).backward()  # type: ignore[no-untyped-call]
        return output

    def _empty_step(self) -> None:
        """Create the optimizer's state by a step that changes no weight. Gradients are zero afterwards."""
        for parameter in self._named.values():
            parameter.grad = torch.zeros_like(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()

    def _whole(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """Gather a parameter or a moment of it over tensor-parallel ranks, as fp32 on the CPU."""
        return gather(tensor, parameter, self._world).float().cpu()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the forward pass has the engine's precision."""
        if self._precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self._precision])

    def _gradients(self) -> list[Tensor]:
        """Return every parameter's gradient: zero, not None, if the update did not use it, so that moments decay."""
        gradients = []
        for parameter in self._named.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients
