"""Contract of an engine, and code that all engines share.

An engine carries out updates. It runs :class:`TrainModule` once per micro-batch, accumulates gradients, reduces them
over ranks, clips them and takes a step. Every engine minimises

    (sum of the losses of all micro-batches on all ranks) / (target tokens of the update)

and reports the norm of the gradient of this quotient.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import LossOutput, TrainModule
from deepspeed_nmt.engine.hashes import GradientHashes
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.engine.transfer import HostBuffer, on_device
from deepspeed_nmt.kernels.torch_ops import keep_freed_memory
from deepspeed_nmt.parallel.world import World

WEIGHT = "weight"
"""Name of a parameter's own values, beside those of its optimizer states."""
TensorKey = tuple[str, str]
"""A tensor of the training state: the name of a parameter, and WEIGHT or the name of an optimizer state."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of an update.

    Attributes:
        sums: "loss", "nll" and the objective's metrics, each summed over this rank's micro-batches (fp32 scalars, on
            the device).
        grad_norm: norm of the gradient before clipping; infinite or NaN if ``skipped``.
        skipped: True if the gradient was not finite and the weights were left unchanged.
        loss_scale: factor on the loss during this update; 1 unless the precision is fp16.
        culprits: parameters, of which this rank holds a part, whose gradients are not finite; empty if unknown.
        squares: of gradient and change by parameter, equal on all ranks; None if not measured, or if ``skipped``.
    """

    sums: dict[str, Tensor]
    grad_norm: float
    skipped: bool
    loss_scale: float
    culprits: tuple[str, ...] = ()
    squares: Squares | None = None


@dataclass(frozen=True)
class ParameterState:
    """A whole parameter and its optimizer's whole states by name, fp32; without states before the first step."""

    name: str
    weight: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineScalars:
    """The part of an engine's state that is not tensors: steps without skipped ones, and fp16's loss scale.

    The scale is None in another precision, after which fp16 has it still to find. ``good_updates`` are those since it
    last changed, and ``hysteresis`` the overflows that halve it next.
    """

    optimizer_step: int = 0
    loss_scale: float | None = None
    good_updates: int = 0
    hysteresis: int = 1


class SavedState(Protocol):
    """Source of weights and optimizer states when a run is resumed."""

    def weight(self, name: str) -> Tensor:
        """Return the whole parameter ``name``, fp32, on the CPU."""

    def optimizer_state(self, name: str, which: str) -> Tensor:
        """Return the whole state ``which`` of the parameter ``name``, fp32, on the CPU."""


OnMicroBatch = Callable[[int], object]
"""Callback that receives the index of a micro-batch, from 0, before the micro-batch runs."""
OnGradient = Callable[[UpdateResult], object]
"""Callback that receives what is known of an update before its step, unless that is skipped."""


class Engine(ABC):
    """Carries out updates of a module with loaded weights, and exposes the training state independent of its layout.

    :meth:`probe` and :meth:`restore` are called before the first update, in this order, or not at all. To return to
    an older state, build a new engine.

    Attributes:
        device: device of the model; micro-batches are moved to it.
    """

    def __init__(self, module: TrainModule, optimizer: OptimizerConfig, world: World) -> None:
        self.module = module
        self.device = world.device
        if world.device.type == "cpu":
            keep_freed_memory()
        self._world = world
        self._method = optimizer
        self._optimizer = optimizer.over(module)
        self._groups = {of: group for group in self._optimizer.param_groups for of in group["params"]}
        self._hashes: GradientHashes | None = None

    @abstractmethod
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
        """Carry out one update. Collective, as most methods: all ranks must call it.

        Args:
            micro_batches: of this rank; their number is equal on all ranks.
            target_tokens: of the whole update, over all ranks.
            explain: determine the culprits of a skipped step even if that costs time. If False, they are determined
                only where they cost nothing, and never when fp16's loss scale can be the cause.
            measure: measure the squares of gradient and change; equal on all ranks.
            on_gradient: called before the step, while the weights are still those of the gradient.
        """

    @abstractmethod
    def probe(self, batch: Batch) -> None:
        """Allocate as much memory as an update with the largest micro-batch, the same on all ranks, needs.

        The training state stays as it is.
        """

    def _run(
        self,
        micro_batches: Sequence[Batch],
        run: Callable[[Batch, bool], LossOutput],
        on_micro_batch: OnMicroBatch = lambda index: None,
    ) -> dict[str, Tensor]:
        """Train on micro-batches, each by ``run``, which is told the last; return sums of losses and metrics."""
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(on_device(micro_batches, self.device)):
            on_micro_batch(index)
            seed_dropout(batch, self._world.data_rank)
            if self._hashes is not None:
                self._hashes.begin(batch.update.number)
            output = run(batch, index == len(micro_batches) - 1)
            if self._hashes is not None:
                self._hashes.write(index)
            add_sums(sums, {"loss": output.loss, "nll": output.nll, **output.metrics})
        return sums

    def hash_gradients(self, file: Path) -> None:
        """Append hashes of this rank's gradients to a file from now on; see :class:`GradientHashes`."""
        trained = {name: p for name, p in self.module.model.named_parameters() if p.requires_grad}
        self._hashes = GradientHashes(trained, file)

    def parameters(self) -> Iterator[ParameterState]:
        """Yield each parameter's weight without optimizer states, on any device; it may change with the next update.

        The parameters of a layer are gathered together.
        """
        for names in _names_by_layer(self.module.model):
            yield from map(ParameterState, names, self._gather([(name, WEIGHT) for name in names]))

    def state(self, copy: bool = True, buffer: HostBuffer | None = None) -> Iterator[ParameterState]:
        """Yield each parameter's weight and optimizer states, those of a layer gathered together.

        Args:
            copy: True to yield copies on the CPU; False on ranks that only take part, which need no host memory.
            buffer: memory for the copies, which are complete after :meth:`HostBuffer.wait`; None for new memory.
        """
        for names in _names_by_layer(self.module.model):
            keys = [(name, which) for name in names for which in (WEIGHT, *self._states_of(name))]
            gathered = self._gather(keys)
            if buffer is not None:
                gathered = buffer(gathered)
            elif copy:
                gathered = [tensor.to("cpu", copy=True) for tensor in gathered]
            tensors = dict(zip(keys, gathered, strict=True))
            for name in names:
                states = {which: tensors[name, which] for which in self._states_of(name)}
                yield ParameterState(name, tensors[name, WEIGHT], states)

    def _state_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Return the names of the states that the optimizer keeps for a trained parameter of the model."""
        return tuple(self._method.state_shapes(self._groups[parameter], parameter.shape))

    def _saved_names(self, parameter: nn.Parameter, scalars: EngineScalars) -> tuple[str, ...]:
        """Return the names of the states to restore, once the optimizer has zeros for them.

        There are none before the first step, as far as the optimizer counts steps.
        """
        return () if self._steps() and not scalars.optimizer_step else self._state_names(parameter)

    def _steps(self) -> int:
        """Return the steps that the optimizer has counted, the same for all parameters; 0 if it does not count."""
        return next((int(state["step"]) for state in self._optimizer.state.values() if "step" in state), 0)

    def _set_steps(self, steps: int) -> None:
        for state in self._optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(steps)
            elif "step" in state:
                state["step"] = steps

    def _clear_states(self) -> None:
        """Set to zero all states that an empty step has made, perhaps of weight decay; steps still count."""
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and name != "step":
                    value.zero_()

    @abstractmethod
    def _states_of(self, name: str) -> Sequence[str]:
        """Return the names of a parameter's optimizer states; none if it is frozen or before the first step."""

    @abstractmethod
    def _gather(self, keys: Sequence[TensorKey]) -> list[Tensor]:
        """Return whole tensors, fp32, by at most one collective in each group of ranks."""

    @abstractmethod
    def scalars(self) -> EngineScalars:
        """Return the part of the training state that is not tensors."""

    @abstractmethod
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        """Load the optimizer's state and the loss scale of a checkpoint, whose weights are in the model already."""

    def close(self) -> None:  # noqa: B027  # most engines have nothing to release
        """Release the resources of the engine."""


def _names_by_layer(model: TranslationModel) -> Iterator[list[str]]:
    """Yield the names of a model's parameters in order: those of a layer together, and those between layers."""
    layer_of = {part: number for number, layer in enumerate(model.all_layers()) for part in layer.parameters()}
    named = model.named_parameters()
    for _, group in itertools.groupby(named, key=lambda pair: layer_of.get(pair[1])):
        yield [name for name, _ in group]


def seed_dropout(batch: Batch, rank: int) -> None:
    """Seed torch's generator, so that dropout masks are a function of (seed, update, micro-batch, rank).

    ``rank`` is the data-parallel one: tensor-parallel ranks run the same micro-batch and must draw the same masks.
    """
    update = batch.update
    key = randomness.key(update.seed, randomness.Purpose.DROPOUT, update.number, update.micro_batch, rank)
    torch.manual_seed(key >> 1)


def add_sums(total: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Add scalars, without their gradients, to running sums of the same names, in place and on the device."""
    for name, value in new.items():
        total[name] = total[name] + value.detach() if name in total else value.detach()


def not_finite(gradients: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Return the names of the gradients that contain an infinite value or NaN."""
    return tuple(name for name, x in gradients.items() if x is not None and not bool(torch.isfinite(x).all()))


SHARD_BYTES = 512 * 1024**2
"""Bytes of tensors after which a checkpoint begins another file; they bound the host memory of its writer."""


def checkpoint_bytes(trained: int, frozen: int, states: int) -> int:
    """Return the bytes of a checkpoint of fp32 weights, and ``states`` elements of the optimizer's states."""
    return 4 * (trained + frozen + states)
