"""Updates in plain torch: one process, or data-parallel ranks that all-reduce their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import LossOutput, TrainModule
from deepspeed_nmt.engine.accumulation import COLLECTED_BYTES, GradientSums
from deepspeed_nmt.engine.base import (
    MOMENTS,
    Engine,
    EngineScalars,
    LossScale,
    OnMicroBatch,
    SavedState,
    UpdateResult,
    Wanted,
    add_sums,
    ignore_micro_batch,
    not_finite,
    seed_dropout,
)
from deepspeed_nmt.engine.feed import on_device
from deepspeed_nmt.engine.norms import AdamPart, Squares, adam_groups, squared_changes, squares_of, whole_squares
from deepspeed_nmt.kernels.precision import DTYPES, Precision
from deepspeed_nmt.parallel.collectives import all_reduce_in_buckets
from deepspeed_nmt.parallel.slices import gather, scatter, total_norm
from deepspeed_nmt.parallel.world import World


class PlainEngine(Engine):
    """Engine with the whole model and its Adam state on every rank.

    In 16-bit precision the model has 16-bit weights. The optimizer has fp32 copies of them, the *masters*, and fp32
    gradients, to which each micro-batch adds its own. After a step the weights are the rounded masters. In fp32 the
    weights are their own masters.

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
        self._groups = adam_groups(optimizer)
        # Frozen weights are saved from these copies; the model's are rounded.
        self._frozen: dict[str, Tensor] = {}
        self._sums: GradientSums | None = None
        self._masters = self._named if precision == "fp32" else self._narrow(DTYPES[precision])
        self._scale = LossScale(2.0**16, 1000) if precision == "fp16" else LossScale(1.0, 0)

    @override
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: int,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
        measure: bool = False,
    ) -> UpdateResult:
        sums: dict[str, Tensor] = {}
        scale = self._scale.value
        for index, batch in enumerate(on_device(micro_batches, self.device)):
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
        squares: Squares | None = None
        if not skipped:
            measured_P = squares_of(gradients) / scale**2 if measure else None
            factor = min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm > 0.0 else 1.0
            if factor / scale != 1.0:
                torch._foreach_mul_(gradients, factor / scale)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._step()
            if measured_P is not None:
                changes_P = squared_changes([self._part(name) for name in self._named], lr, self._steps())
                squares = whole_squares(self._named, measured_P, changes_P, sharded=False, world=self._world)
        self._optimizer.zero_grad(set_to_none=True)
        self._scale.record(overflow=skipped)
        return UpdateResult(sums, norm, skipped, scale, culprits, squares)

    @override
    def probe(self, batch: Batch) -> None:
        self._empty_step()  # allocates Adam's moments, and gradients as of earlier micro-batches
        self._backward(batch.to(self.device), 0.0)
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()

    @override
    def scalars(self) -> EngineScalars:
        steps = [int(state["step"]) for state in self._optimizer.state.values()]
        return EngineScalars(max(steps, default=0), self._scale.value, self._scale.good_updates)

    @override
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        self._empty_step()
        self._optimizer.zero_grad(set_to_none=True)
        for name, parameter in self._named.items():
            state = self._optimizer.state[self._masters[name]]
            for which in MOMENTS:
                state[which].copy_(scatter(saved.moment(name, which), parameter))
            state["step"].fill_(scalars.optimizer_step)
        if self._precision == "fp16":
            self._scale.value, self._scale.good_updates = scalars.loss_scale, scalars.good_updates

    def _narrow(self, dtype: torch.dtype) -> dict[str, nn.Parameter]:
        """Round the model's weights to ``dtype``, give the optimizer their masters, and return those by name."""
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in self.module.model.named_parameters():
            if parameter.requires_grad:
                masters[parameter] = nn.Parameter(parameter.detach())
            else:
                self._frozen[name] = parameter.detach().cpu()
        for group in self._optimizer.param_groups:
            group["params"] = [masters[parameter] for parameter in group["params"]]
        self.module.to(dtype)  # the masters keep the fp32 tensors
        # A CPU has no launches to save, and collecting moves more bytes.
        self._sums = GradientSums(masters, 0 if self.device.type == "cpu" else COLLECTED_BYTES)
        return {name: masters[parameter] for name, parameter in self._named.items()}

    def _backward(self, batch: Batch, factor: float) -> LossOutput:
        """Run a micro-batch on the device and accumulate the gradient of ``factor`` times its loss."""
        self.module.train()
        seed_dropout(batch, self._world.data_rank)
        output: LossOutput = self.module(batch)
        (output.loss * factor).backward()  # type: ignore[no-untyped-call]
        if self._sums is not None:
            self._sums.flush()
        return output

    def _step(self) -> None:
        """Take a step of the optimizer, and round the new masters to the model's weights."""
        self._optimizer.step()
        if self._masters is not self._named:
            with torch.no_grad():
                torch._foreach_copy_(list(self._named.values()), list(self._masters.values()))

    def _steps(self) -> int:
        """Return the number of steps that Adam has taken; it is the same for all parameters."""
        return int(next(iter(self._optimizer.state.values()))["step"])

    def _part(self, name: str) -> AdamPart:
        master = self._masters[name]
        moments = [self._optimizer.state[master][which] for which in MOMENTS]
        return AdamPart(master, moments[0], moments[1], self._groups[self._named[name]])

    def _empty_step(self) -> None:
        """Create the optimizer's state by a step that changes no weight. Gradients are zero afterwards."""
        for master in self._masters.values():
            master.grad = torch.zeros_like(master)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
        self._optimizer.step()

    @override
    def _moments_of(self, name: str) -> Sequence[str]:
        return MOMENTS if self._masters.get(name) in self._optimizer.state else ()

    @override
    def _gather(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        parameters = dict(self.module.model.named_parameters())
        tensors = [
            self._optimizer.state[self._masters[name]][which]
            if which in MOMENTS
            else self._frozen.get(name, self._masters.get(name, parameters[name])).detach()
            for name, which in wanted
        ]
        return gather(tensors, [parameters[name] for name, _ in wanted], self._world)

    def _gradients(self) -> list[Tensor]:
        """Return every master's gradient: zero, not None, if the update did not use it, so that moments decay."""
        gradients = []
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients
