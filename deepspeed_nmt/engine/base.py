"""What an engine promises, and what all engines share.

An engine carries out updates: it runs :class:`TrainModule` once per micro-batch, adds up gradients, communicates,
clips and steps. Whatever it is, an update minimises

    (sum of the losses of all micro-batches on all ranks) / (target tokens of the update)

and its gradient norm is the norm of that quotient's gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square, by torch's names."""


@dataclass(frozen=True)
class UpdateResult:
    """What came of an update.

    Attributes:
        sums: this rank's sums of "loss", "nll" and the objective's terms (fp32 scalars, still on the device).
        grad_norm: before clipping; infinite or NaN if ``skipped``.
        skipped: the gradient was not finite, so the weights were left as they are.
        loss_scale: factor on the loss during this update; 1 unless the precision is fp16.
        culprits: if skipped and looked for, parameters whose gradients are not finite. Only those that this rank
            holds a part of.
    """

    sums: dict[str, Tensor]
    grad_norm: float
    skipped: bool
    loss_scale: float
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class ParameterState:
    """A parameter and its optimizer state, whole and in fp32 (on the CPU), whatever the layout."""

    name: str
    weight: Tensor
    moments: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineScalars:
    """The part of an engine's state that is not tensors.

    Attributes:
        optimizer_step: steps that Adam has taken (skipped ones not counted).
        loss_scale: current factor on the loss.
        good_updates: updates since the loss scale last changed.
    """

    optimizer_step: int = 0
    loss_scale: float = 1.0
    good_updates: int = 0


class SavedState(Protocol):
    """Where an engine reads weights and Adam's moments from when a run is resumed."""

    def weight(self, name: str) -> Tensor:
        """The parameter ``name``: whole, fp32, on the CPU."""

    def moment(self, name: str, which: str) -> Tensor:
        """Moment ``which`` (see MOMENTS) of the parameter ``name``: whole, fp32, on the CPU."""


OnMicroBatch = Callable[[int], object]


def ignore_micro_batch(index: int) -> None:
    """Do nothing before a micro-batch."""


class Engine(ABC):
    """Carries out updates and gives out the state of the model, independent of its layout.

    Weights are loaded into ``module`` before an engine is made; Adam's state afterwards by :meth:`restore`. An engine
    is restored, and probed, before its first update or never; to go back to an older state, make a new one.

    Attributes:
        module: model and objective.
        device: where micro-batches must be.
    """

    module: TrainModule
    device: torch.device

    @abstractmethod
    def update(
        self,
        micro_batches: Sequence[Batch],
        target_tokens: int,
        lr: float,
        explain: bool = False,
        on_micro_batch: OnMicroBatch = ignore_micro_batch,
    ) -> UpdateResult:
        """Take one step. Every rank passes equally many micro-batches, and the token count of the whole update.

        Args:
            explain: look for culprits should the step be skipped, even where that costs time. Without it only those
                are named that are found for nothing, and none while fp16's loss scale may be to blame.
            on_micro_batch: called with the index of each micro-batch, from 0, before it is run.
        """

    @abstractmethod
    def probe(self, batch: Batch) -> None:
        """Use as much memory as an update with this micro-batch can, and change nothing. Before :meth:`restore`.

        All ranks call it together with the same batch.
        """

    @abstractmethod
    def parameters(self) -> Iterator[ParameterState]:
        """Each parameter's weight without moments. All ranks must iterate together."""

    @abstractmethod
    def state(self) -> Iterator[ParameterState]:
        """Each parameter's weight and moments. All ranks must iterate together."""

    @abstractmethod
    def scalars(self) -> EngineScalars:
        """The rest of the state."""

    @abstractmethod
    def restore(self, saved: SavedState, scalars: EngineScalars) -> None:
        """Go on from a saved state, whose weights are in the model already."""

    def close(self) -> None:
        """Free what the engine holds."""
        return None


def seed_dropout(batch: Batch, rank: int) -> None:
    """Make this micro-batch's dropout masks a function of (seed, update, micro-batch, rank), resumed or not.

    Ranks that share a model work on the same micro-batch, and pass the same ``rank``.
    """
    update = batch.update
    key = randomness.key(update.seed, randomness.Purpose.DROPOUT, update.number, update.micro_batch, rank)
    torch.manual_seed(key >> 1)


def add_sums(total: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Add scalars to running sums of the same names, on the device."""
    for name, value in new.items():
        total[name] = total[name] + value.detach() if name in total else value.detach()


def not_finite(gradients: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Names of the gradients that are not finite."""
    return tuple(
        name
        for name, gradient in gradients.items()
        if gradient is not None and not bool(torch.isfinite(gradient).all())
    )


class LossScale:
    """fp16's factor on the loss: halved when a gradient overflows, doubled after ``window`` updates without.

    Args:
        initial: 1.0 with ``window`` 0 means no scaling.
        window: updates without overflow after which the scale doubles; 0 keeps it.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value = initial
        self.good_updates = 0
        self._window = window

    def record(self, overflow: bool) -> None:
        """Note how an update went, for the next one's scale."""
        if self._window == 0:
            return
        if overflow:
            self.value = max(1.0, self.value / 2.0)
            self.good_updates = 0
            return
        self.good_updates += 1
        if self.good_updates >= self._window:
            self.value *= 2.0
            self.good_updates = 0
