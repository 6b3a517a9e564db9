"""The precision in which a model decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from deepspeed_nmt.errors import ConfigError, did_you_mean, option, shown
from deepspeed_nmt.kernels import packed
from deepspeed_nmt.kernels.precision import DTYPES, native_precision
from deepspeed_nmt.nn.layers import DecoderLayer
from deepspeed_nmt.nn.linear import JoinedWeights, pack_weights, unpack_weights

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8")
"""Precisions in which a model can be asked to decode."""


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return the precision that is meant on a device.

    Args:
        precision: one of PRECISIONS; auto: bf16 on a GPU from sm_80 up, fp16 on an older GPU, fp32 on a CPU.
        device: device of the model.

    Raises:
        ConfigError: if it is unknown, or the device does not have it.
    """
    name = option("precision")
    if precision not in PRECISIONS:
        raise ConfigError(
            f"{name} must be one of {', '.join(PRECISIONS)}, but is {shown(precision)}"
            f"{did_you_mean(str(precision), PRECISIONS)}"
        )
    native = native_precision(device)
    if device.type == "cuda":
        if precision == "int8" or (precision == "bf16" and native != "bf16"):
            why = (
                "weights are packed in int8 for CPUs only" if precision == "int8" else "this GPU is older than sm_80"
            )
            raise ConfigError(
                f"{name} must be {'bf16, ' if native == 'bf16' else ''}fp16 or fp32 here, because {why}"
            )
        return native if precision == "auto" else precision
    if precision == "auto":
        return native
    reason = "CPUs multiply fp16 slowly" if precision == "fp16" else packed.obstacle(precision)
    if reason is not None and precision != "fp32":
        able = ["fp32", *(each for each in ("bf16", "int8") if packed.obstacle(each) is None)]
        choice = " or ".join(filter(None, (", ".join(able[:-1]), able[-1])))
        raise ConfigError(f"{name} must be {choice} here, because {reason}; use {choice}")
    return precision


def prepare_to_decode(model: nn.Module, device: torch.device, precision: str) -> None:
    """Bring a model to a device for good, in the precision in which it is to decode.

    Args:
        model: the model, in eval mode.
        device: the device.
        precision: as :func:`resolve_precision` returns it.
    """
    model.to(device, DTYPES.get(precision, torch.float32))  # int8 is packed from fp32
    if device.type == "cuda":
        join_weights(model)
    elif packed.obstacle(precision) is None:
        pack_weights(model, int8=precision == "int8")


def join_weights(model: nn.Module) -> None:
    """Have the decoder layers of a model take steps with joined weights from now on, for decoding on a GPU.

    The model must be in eval mode. The layers' own weights stay as they are; if they change, call it again. The other
    modules keep the kernels of the model.
    """
    weights = JoinedWeights()
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            module.packed = weights


@contextmanager
def packed_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a model decode with packed or joined weights in the block; its weights must not change there."""
    if device.type == "cuda":
        join_weights(model)
    elif packed.obstacle("fp32") is None:
        pack_weights(model)
    try:
        yield
    finally:
        unpack_weights(model)
