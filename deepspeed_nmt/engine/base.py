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
from typing import Annotated, Literal, Protocol

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import dispatch
from deepspeed_nmt.registry import Config

Precision = Literal["fp32", "bf16", "fp16"]


def _recompute(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"must be auto or a whole number from 0 up, but is {value!r}")
    return value


def _kernels(value: object) -> object:
    if isinstance(value, str):
        dispatch.parse(value, "it")
    return value


Kernels = Annotated[str, BeforeValidator(_kernels)]
Recompute = Annotated[int | Literal["auto"], BeforeValidator(_recompute)]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's running means of the gradient and of its square, by torch's names."""


class EngineConfig(Config):
    """How updates are carried out."""

    name: Literal["auto", "plain", "deepspeed"] = Field(
        default="auto", description="plain torch, or DeepSpeed; auto takes DeepSpeed when there are several ranks"
    )
    ds_config: str = Field(
        default="zero2", description="DeepSpeed's JSON: a path, or the name of a file in ds_configs/ without .json"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto: bf16 where the GPU has it, fp16 on older ones, fp32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: a GPU where there is one")
    deterministic: bool = Field(default=False, description="bitwise repeatable on a GPU too, at some cost in speed")
    tensor_parallel: int = Field(
        default=1, ge=1, description="neighbouring ranks that share a model, each with a slice of its matrices"
    )
    recompute_encoder: Recompute = Field(
        default=0,
        description="every so manieth encoder layer is run again in the backward pass, to save memory: 1 all, "
        "0 none, auto: as few as fit",
    )
    recompute_decoder: Recompute = Field(default=0, description="the same for decoder layers")
    memory_gib: float = Field(
        default=0.0, ge=0.0, description="what auto may take of each GPU; 0: all it has (a CPU has to be told)"
    )
    kernels: Kernels = Field(
        default="auto",
        description="who carries out fused operations: auto, torch, triton, apex, or operation=backend,... such as "
        "softmax=torch",
    )
    attention: Literal["auto", "sdpa", "fused"] = Field(
        default="auto",
        description="sdpa: torch's kernels that hold no weights; fused: products and a fused softmax; auto: sdpa "
        "where it has such a kernel",
    )
    silent_s: float = Field(
        default=60.0,
        ge=0.0,
        description="seconds without a sign of life after which a rank is taken to be gone; 0: never",
    )
    stuck_s: float = Field(
        default=600.0, gt=0.0, description="seconds a micro-batch may take before its rank is taken to be stuck"
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="seconds a rank waits for another before giving up, and that saving or validating may take",
    )


def uses_deepspeed(config: EngineConfig, ranks: int) -> bool:
    """Whether a run on so many ranks is carried out by DeepSpeed; otherwise by plain torch."""
    return config.name == "deepspeed" or (config.name == "auto" and ranks > 1)


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


class Engine(ABC):
    """Carries out updates and gives out the state of the model, independent of its layout.

    Weights are loaded into ``module`` before an engine is made; Adam's state afterwards by :meth:`restore`. An engine
    is restored, and probed, before its first update or never; to go back to an older state, make a new one.

    Attributes:
        module: model and objective.
        device: where micro-batches must be.
        watch: is told the number of each micro-batch of an update, from 0, as it is begun; None: nobody asks.
    """

    module: TrainModule
    device: torch.device
    watch: Callable[[int], None] | None = None

    @abstractmethod
    def update(
        self, micro_batches: Sequence[Batch], target_tokens: int, lr: float, explain: bool = False
    ) -> UpdateResult:
        """Take one step. Every rank passes equally many micro-batches, and the token count of the whole update.

        Args:
            explain: look for culprits should the step be skipped, even where that costs time. Without it only those
                are named that are found for nothing, and none while fp16's loss scale may be to blame.
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


def choose_precision(wanted: str, device: torch.device) -> Precision:
    """Settle "auto", and refuse what the device cannot do.

    Raises:
        ConfigError: for bf16 on a GPU without it (such as a V100).
    """
    if device.type == "cpu":
        return "fp32" if wanted == "auto" else wanted  # type: ignore[return-value]
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if wanted == "auto":
        return "bf16" if has_bf16 else "fp16"
    if wanted == "bf16" and not has_bf16:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"engine.precision is bf16, but {name} has no bf16; use engine.precision=fp16")
    return wanted  # type: ignore[return-value]
