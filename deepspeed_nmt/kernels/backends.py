"""Backends of the fused operations: what each of them needs, and which is to be preferred on a GPU.

An operation is a method of :class:`deepspeed_nmt.kernels.choice.Kernels`. A backend is a module beside this one
(`torch_ops.py`, `triton_ops.py`, `apex_ops.py`) with functions of the operations' names. torch has all of them and is
always installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown

OPERATIONS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("torch", "triton", "apex"),
    "bias_dropout_add": ("torch", "triton"),
    "bias_dropout_add_layer_norm": ("torch", "triton"),
    "bias_relu_dropout": ("torch", "triton"),
    "bias_gelu_dropout": ("torch", "triton"),
    "softmax": ("torch", "triton", "apex"),
    "cross_entropy": ("torch", "triton"),
}
"""Operations, each with the backends that have it."""
BACKENDS = ("torch", "triton", "apex")

Capability = tuple[int, int]
"""Compute capability of a GPU, such as (7, 0)."""
Choices = dict[str, str]
"""Operation -> backend."""

MEASURED: dict[Capability, dict[torch.dtype, Choices]] = {}
"""Fastest backends by compute capability and dtype, as `benchmarks/gpu/run.sh kernels` prints them. None so far."""
EXPECTED: Choices = {
    # torch has this as one kernel, a good one.
    "layer_norm": "torch",
    # In torch these are several kernels, each of which reads and writes every element.
    "bias_dropout_add": "triton",
    "bias_dropout_add_layer_norm": "triton",
    "bias_relu_dropout": "triton",
    "bias_gelu_dropout": "triton",
    "softmax": "triton",
    "cross_entropy": "triton",
}
"""Backends preferred on a GPU that has not been measured: expectations, not findings."""

_APEX_EXTENSIONS = {
    "layer_norm": ("fused_layer_norm_cuda",),
    "softmax": ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
}


def parse_setting(setting: str, source: str) -> Choices:
    """Parse "auto", a backend's name, or ``operation=backend`` separated by commas.

    Args:
        setting: to be parsed; "" names no operation.
        source: of the setting, for messages.

    Returns:
        The backend, or "auto", of each operation that the setting names.

    Raises:
        ConfigError: if it names an unknown operation, or a backend that an operation does not have.
    """
    if not setting:
        return {}
    if setting in ("auto", *BACKENDS):
        return {name: setting for name, backends in OPERATIONS.items() if setting in ("auto", *backends)}
    found: Choices = {}
    for part in setting.split(","):
        operation, equals, name = (each.strip() for each in part.partition("="))
        if not equals:
            raise ConfigError(
                f"{source} must be auto, one of {', '.join(BACKENDS)}, or operation=backend separated by commas, but "
                f"is {shown(setting)}{did_you_mean(setting, BACKENDS)}"
            )
        if operation not in OPERATIONS:
            raise ConfigError(
                f"{source} may name {', '.join(OPERATIONS)}, but names {shown(operation)}"
                f"{did_you_mean(operation, OPERATIONS)}"
            )
        if name not in ("auto", *OPERATIONS[operation]):
            raise ConfigError(
                f"{source}: {operation} must be auto, {' or '.join(OPERATIONS[operation])}, but is {shown(name)}"
                f"{did_you_mean(name, OPERATIONS[operation])}"
            )
        found[operation] = name
    return found


def preferred(operation: str, capability: Capability, dtype: torch.dtype) -> str:
    """Return the installed backend to prefer on a GPU of this capability."""
    name = MEASURED.get(capability, {}).get(dtype, EXPECTED)[operation]
    installed = [each for each in OPERATIONS[operation] if is_installed(operation, each)]
    if dtype == torch.float64 or not installed:
        return "torch"
    if name not in installed or (name == "torch" and "apex" in installed and capability not in MEASURED):
        return "apex" if "apex" in installed else "torch"
    return name


def is_installed(operation: str, name: str) -> bool:
    """Return True if the packages that a backend needs for an operation are installed; import none of them."""
    if name == "apex":
        # PyPI has another package by that name: only the compiled extensions tell.
        return all(_is_importable(extension) for extension in _APEX_EXTENSIONS[operation])
    return name == "torch" or _is_importable("triton")


def obstacle(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason for which a backend cannot carry out an operation on a device, or None."""
    if not is_installed(operation, name):
        packages = " and ".join(_APEX_EXTENSIONS[operation]) if name == "apex" else name
        return f"{packages} is not installed"
    if name != "torch" and dtype == torch.float64:
        return f"{name} computes in fp32, not in fp64"
    if name == "apex" and device.type != "cuda":
        return "apex needs a CUDA device"
    if name == "triton" and device.type != "cuda" and not interpreting():
        return "Triton needs a CUDA device (or TRITON_INTERPRET=1, to test it)"
    return None


def failure(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run a backend's operation on a few numbers; return the reason for which it cannot be trusted here, or None."""
    from deepspeed_nmt.kernels.trial import compare

    def try_out() -> float | Exception:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return compare(operation, load(operation, name), load(operation, "torch"), device, dtype)
        except Exception as problem:  # of a compiler, a driver or an extension; torch works without them
            return problem

    # Grad mode and recomputation's hooks for saved tensors are per thread: a new thread has none of them.
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(try_out).result()
    if isinstance(error, Exception):
        return f"{name} fails on {torch.cuda.get_device_name(device)} ({type(error).__name__}: {error})"
    if error > (1e-3 if dtype == torch.float32 else 5e-2):
        return f"{name} is wrong by {error:.2g} on {torch.cuda.get_device_name(device)}"
    return None


def load(operation: str, name: str) -> Callable[..., Any]:
    """Import a backend and return its function for an operation."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"deepspeed_nmt.kernels.{name}_ops"), operation)
    return function


def interpreting() -> bool:
    """Return True if Triton's kernels are run by its interpreter, in Python and on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
