"""Updates in plain torch: one process, or data-parallel ranks that all-reduce their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import LossOutput, TrainModule
from deepspeed_nmt.engine.contract import (
    WEIGHT,
    Engine,
    EngineScalars,
    OnGradient,
    OnMicroBatch,
    SavedState,
    TensorKey,
    UpdateResult,
    not_finite,
)
from deepspeed_nmt.engine.norms import Part, Squares, squared_changes, squares_of, whole_squares
from deepspeed_nmt.engine.optimizer import OptimizerConfig, set_lr
from deepspeed_nmt.kernels.precision import DTYPES, Precision
from deepspeed_nmt.parallel.collectives import all_reduce_in_buckets, await_ranks, begin_alike
from deepspeed_nmt.parallel.tensor import gather, scatter, total_norm
from deepspeed_nmt.parallel.world import World

_GOOD_UPDATES = 1000
"""Updates without overflow after which the loss scale is doubled."""


class PlainEngine(Engine):
    """Engine with the whole model and its optimizer's state on every rank.

    In 16-bit precision the model has 16-bit weights. The optimizer has fp32 copies of them, the *masters*, and fp32
    gradients, to which each micro-batch adds its own. After a step the weights are the rounded masters. In fp32 the
    weights are their own masters.

    Its constructor moves the module to the device of ``world``.
    """

    def __init__(self, module: TrainModule, optimizer: OptimizerConfig, precision: Precision, world: World) -> None:
        super().__init__(module.to(world.device), optimizer, world)
        begin_alike([parameter.detach() for parameter in module.parameters()], world)
        self._precision = precision
        self._named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        # Frozen weights are saved from these copies; the model's are rounded.
        self._frozen: dict[str, Tensor] = {}
        self._sums: GradientSums | None = None
        self._masters = self._named if precision == "fp32" else self._narrow(DTYPES[precision])
        self._scale, self._good_updates = 2.0**16 if precision == "fp16" else 1.0, 0

    @override
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: int,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = lambda index: None,
        measure: bool = False,
        on_gradient: OnGradient = lambda result: None,
    ) -> UpdateResult:
        scale, clip_norm = self._scale, self._method.clip_norm
        factor = scale / target_tokens
        sums = self._run(micro_batches, lambda batch, is_last: self._backward(batch, factor), on_micro_batch)
        gradients = self._gradients()
        all_reduce_in_buckets(gradients, self._world)
        if self._hashes is not None:
            self._hashes.write_reduced(dict(zip(self._named, gradients, strict=True)))
        norm_of_sums = total_norm(list(self._named.values()), gradients, self._world)
        norm = await_ranks(lambda: float(norm_of_sums)) / scale
        skipped = not math.isfinite(norm)
        culprits: tuple[str, ...] = ()
        squares: Squares | None = None
        if skipped and (explain or scale == 1.0):
            culprits = not_finite(dict(zip(self._named, gradients, strict=True)))
        if not skipped:
            on_gradient(UpdateResult(sums, norm, skipped, scale))
            measured_P = squares_of(gradients) / scale**2 if measure else None
            factor = min(1.0, clip_norm / (norm + 1e-6)) if clip_norm > 0.0 else 1.0
            if factor / scale != 1.0:
                torch._foreach_mul_(gradients, factor / scale)
            self._step(lr)
            if measured_P is not None:
                parts = [self._part(name) for name in self._named]
                changes_P = squared_changes(self._method, parts, lr, self._steps())
                squares = whole_squares(self._named, measured_P, changes_P, sharded=False, world=self._world)
        self._optimizer.zero_grad(set_to_none=True)
        if self._precision == "fp16":
            self._adapt_scale(skipped)
        return UpdateResult(sums, norm, skipped, scale, culprits, squares)

    def _adapt_scale(self, overflow: bool) -> None:
        """Halve the loss scale on overflow, and double it after a number of updates without any."""
        self._good_updates += 1
        if overflow:
            self._scale, self._good_updates = max(1.0, self._scale / 2.0), 0
        elif self._good_updates >= _GOOD_UPDATES:
            self._scale, self._good_updates = 2.0 * self._scale, 0

    @override
    def probe(self, batch: Batch) -> None:
        self._gradients()  # as of earlier micro-batches
        self._step(0.0)  # allocates the optimizer's states
        self._run([batch], lambda moved, is_last: self._backward(moved, 0.0))
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()

    @override
    def scalars(self) -> EngineScalars:
        scale = self._scale if self._precision == "fp16" else None
        return EngineScalars(self._steps(), scale, self._good_updates)

    @override
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        self._gradients()
        self._step(0.0)  # creates the optimizer's states
        self._optimizer.zero_grad(set_to_none=True)
        self._clear_states()
        for name, parameter in self._named.items():
            state = self._optimizer.state[self._masters[name]]
            for which in self._saved_names(parameter, scalars):
                state[which].copy_(scatter(saved.optimizer_state(name, which), parameter))
        self._set_steps(scalars.optimizer_step)
        if self._precision == "fp16" and scalars.loss_scale is not None:
            self._scale, self._good_updates = scalars.loss_scale, scalars.good_updates

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
        output: LossOutput = self.module(batch)
        (output.loss * factor).backward()  # type: ignore[no-untyped-call]
        if self._sums is not None:
            self._sums.flush()
        return output

    def _step(self, lr: float) -> None:
        """Take a step of the optimizer, and round the new masters to the model's weights."""
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        if self._masters is not self._named:
            with torch.no_grad():
                torch._foreach_copy_(list(self._named.values()), list(self._masters.values()))

    def _part(self, name: str) -> Part:
        master = self._masters[name]
        states = tuple(self._optimizer.state[master][which] for which in self._state_names(self._named[name]))
        return Part(master, states, self._groups[self._named[name]])

    @override
    def _states_of(self, name: str) -> Sequence[str]:
        return self._state_names(self._named[name]) if self._masters.get(name) in self._optimizer.state else ()

    @override
    def _gather(self, keys: Sequence[TensorKey]) -> list[Tensor]:
        parameters = dict(self.module.model.named_parameters())
        tensors = [
            self._optimizer.state[self._masters[name]][which]
            if which != WEIGHT
            else self._frozen.get(name, self._masters.get(name, parameters[name])).detach()
            for name, which in keys
        ]
        return gather(tensors, [parameters[name] for name, _ in keys], self._world)

    def _gradients(self) -> list[Tensor]:
        """Return every master's gradient: zero, not None, if the update did not use it, so that states decay."""
        gradients = []
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients


COLLECTED_BYTES = 16 * 2**20
"""Most bytes of 16-bit gradients that are collected on a GPU."""
BUFFER_BYTES = 3 * COLLECTED_BYTES
"""Most memory that gradients take on a GPU while they are collected and added: in 16 bit, and then also in fp32."""
_ALONE_BYTES = COLLECTED_BYTES // 4
"""Bytes of a 16-bit gradient from which on it is added on its own: that takes longer than a launch."""


class GradientSums:
    """Adder of the gradients of 16-bit weights to the fp32 gradients of their masters.

    It takes a weight's gradient as soon as the backward pass has it, and frees it once it is added. It collects up to
    ``collected_bytes`` of small ones; 0 adds each on its own. Call :meth:`flush` after each backward pass.
    """

    def __init__(self, masters: Mapping[nn.Parameter, nn.Parameter], collected_bytes: int) -> None:
        self._masters = masters
        self._most = collected_bytes
        self._collected: dict[nn.Parameter, Tensor] = {}
        self._bytes = 0
        for weight in masters:
            weight.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Add the gradients that are collected."""
        first = [(master, new) for master, new in self._collected.items() if master.grad is None]
        later = [(master, new) for master, new in self._collected.items() if master.grad is not None]
        self._collected, self._bytes = {}, 0
        for pairs in filter(None, (first, later)):
            wide = [torch.empty_like(master) for master, _ in pairs]
            torch._foreach_copy_(wide, [new for _, new in pairs])
            if pairs is first:
                for (master, _), gradient in zip(first, wide, strict=True):
                    master.grad = gradient
            else:  # lists of tensors are added by few kernels if all have one dtype, but copied whatever theirs
                torch._foreach_add_([master.grad for master, _ in later if master.grad is not None], wide)

    def _take(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter) and weight.grad is not None
        master, new = self._masters[weight], weight.grad
        weight.grad = None
        if new.nbytes >= min(_ALONE_BYTES, self._most):
            if master.grad is None:
                master.grad = new.to(master.dtype)
            else:
                master.grad.add_(new)
            return
        if self._bytes + new.nbytes > self._most:
            self.flush()
        self._collected[master] = new
        self._bytes += new.nbytes
