"""Models that decode: ensembles, whose probabilities are averaged with weights, and the precision of weights.

Legend: B sentences, S source length, V vocabulary, R rows = B x beam.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import DecodableModel, Memory, TranslationModel
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.kernels.precision import DTYPES, native_precision
from deepspeed_nmt.kernels.torch_ops import keep_freed_memory
from deepspeed_nmt.native import library as native
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.linear import pack_weights, use_weights
from deepspeed_nmt.search.decode_options import NativeChoice


@dataclass(frozen=True)
class _Memories(Memory):
    parts: tuple[Memory, ...] = ()

    def select(self, sentences_B: Tensor) -> _Memories:
        parts = tuple(part.select(sentences_B) for part in self.parts)
        return _Memories(parts[0].states_BSD, parts[0].mask, parts=parts)


class _Caches(DecoderCache):
    def __init__(self, parts: Sequence[DecoderCache]) -> None:
        super().__init__()
        self.parts = parts

    def select(self, rows_R: Tensor, sentences_B: Tensor | None) -> None:
        for part in self.parts:
            part.select(rows_R, sentences_B)


def mean_of(log_probs: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
    """Return the log of the mean of the models' probabilities, by weights whose sum is 1; None for equal ones."""
    if len(log_probs) == 1:
        return log_probs[0]
    if weights is None:
        return torch.logsumexp(torch.stack(list(log_probs)), dim=0) - math.log(len(log_probs))
    weighted = [part + math.log(weight) for part, weight in zip(log_probs, weights, strict=True)]
    return torch.logsumexp(torch.stack(weighted), dim=0)


class Ensemble(DecodableModel):
    """An ensemble of models with the same vocabulary, which decodes with p(y) = weighted mean of their p_i(y).

    Attributes:
        members: the models.
        weights: one for each model, above 0, divided by their sum; None for equal weights.
    """

    def __init__(self, models: Sequence[DecodableModel], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        assert weights is None or (len(weights) == len(models) and min(weights) > 0.0)
        self.weights = None if weights is None else [weight / math.fsum(weights) for weight in weights]
        self.members = list(models)
        for number, model in enumerate(models):
            self.add_module(str(number), model)
        self.vocab_size, self.pad = models[0].vocab_size, models[0].pad
        for side in ("longest_source", "longest_target"):
            bounds = [bound for model in models if (bound := getattr(model, side)) is not None]
            setattr(self, side, min(bounds, default=None))
        assert all(model.vocab_size == self.vocab_size for model in models)

    def encode(self, source_BS: Tensor, padded: bool = True) -> Memory:
        """Encode sources with every model."""
        parts = tuple(model.encode(source_BS, padded) for model in self.members)
        return _Memories(parts[0].states_BSD, parts[0].mask, parts=parts)

    def begin(self) -> DecoderCache:
        """Create the caches of all models."""
        return _Caches([model.begin() for model in self.members])

    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        """Compute log-probabilities of the next token, averaged as probabilities. Shape: (R,) -> (R,V)."""
        assert isinstance(memory, _Memories) and isinstance(cache, _Caches)
        log_p = [
            torch.log_softmax(model.step(tokens_R, part, kept).float(), dim=1)
            for model, part, kept in zip(self.members, memory.parts, cache.parts, strict=True)
        ]
        return mean_of(log_p, self.weights)

    def at_exit(self, name: str) -> DecodableModel:
        """Create the ensemble of the models' exits."""
        return Ensemble([model.at_exit(name) for model in self.members], self.weights).train(self.training)


def members_of(model: DecodableModel) -> list[TranslationModel]:
    """Return the models of an ensemble, or a list of the one model."""
    members = model.members if isinstance(model, Ensemble) else [model]
    return [member for member in members if isinstance(member, TranslationModel)]


def weights_of(model: DecodableModel) -> list[float] | None:
    """Return the weights of an ensemble; None for equal weights, and for one model."""
    return model.weights if isinstance(model, Ensemble) else None


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision that is meant on a device, or raise a ConfigError if it does not have it.

    auto is bf16 on a GPU from sm_80 up, fp16 on an older GPU, fp32 on a CPU.
    """
    name = option("precision")
    native = native_precision(device)
    if device.type == "cuda":
        if precision == "int8" or (precision == "bf16" and native != "bf16"):
            why = (
                "weights are packed in int8 for CPUs only" if precision == "int8" else "this GPU is older than sm_80"
            )
            raise ConfigError(
                f"{name} is {precision}, but {why}; use {'bf16, ' if native == 'bf16' else ''}fp16 or fp32"
            )
        return native if precision == "auto" else precision
    if precision == "auto":
        return native
    reason = "CPUs multiply fp16 slowly" if precision == "fp16" else _obstacle_to_packing(precision)
    if reason is not None and precision != "fp32":
        able = ["fp32", *(other for other in ("bf16", "int8") if _obstacle_to_packing(other) is None)]
        raise ConfigError(f"{name} is {precision}, but {reason}; use {' or '.join(able)}")
    return precision


def _obstacle_to_packing(precision: str) -> str | None:
    """Return the reason why weights cannot be packed in a precision on this CPU, or None."""
    if precision != "int8":
        return onednn_ops.obstacle(precision)
    return None if (reason := native.obstacle()) is None else f"it needs native code ({reason})"


def resolve_native(choice: NativeChoice, device: torch.device, precision: str) -> bool:
    """Return True if native code is to decode; log the reason if "auto" does not find it where it would be used.

    Raises:
        ConfigError: if the choice is "on", and there is none, or "off", where nothing else can.
    """
    if choice == "off":
        if precision == "int8":
            raise ConfigError(f"{option('native')} is off, but only native code decodes in int8; leave one out")
        return False
    if device.type != "cpu" or precision not in ("fp32", "int8"):
        reason: str | None = f"it decodes in fp32 and int8 on CPUs, and this is {precision} on {device.type}"
    else:
        reason = _obstacle_to_packing(precision) or native.obstacle()
        if reason is not None and choice == "auto":
            _log_once(f"torch decodes without native code, which is faster for a few lines: {reason}")
    if reason is not None and choice == "on":
        raise ConfigError(f"{option('native')} is on, but {reason}; leave it out")
    return reason is None


_log_once = cache(logger.info)


@cache
def _fork_with_one_thread() -> None:
    """Let forked processes compute in one thread: they have none of OpenMP's, for which torch would wait for ever."""
    os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def prepare_to_decode(model: nn.Module, device: torch.device, precision: str, natively: bool = False) -> None:
    """Bring a model in eval mode to a device for good, without gradients, which packed weights would not pass on.

    ``precision`` and ``natively`` are results of :func:`resolve_precision` and :func:`resolve_native`.
    """
    model.requires_grad_(False).to(device, DTYPES.get(precision, torch.float32))  # int8 is packed from fp32
    if device.type == "cpu":
        keep_freed_memory()
        _fork_with_one_thread()
        if _obstacle_to_packing(precision) is None:
            pack_weights(model, precision == "int8", native.library() if natively else None)


@contextmanager
def packed_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a model decode with packed weights in the block, if it is on a CPU; its weights must not change there."""
    if device.type == "cpu" and onednn_ops.obstacle("fp32") is None:
        pack_weights(model, native=native.library() if resolve_native("auto", device, "fp32") else None)
    try:
        yield
    finally:
        use_weights(model, None)
