"""Which implementation an operation has: chosen once per operation, kind of device and dtype.

An operation is a function of :mod:`deepspeed_nmt.kernels.ops`. A backend is a module beside it with functions of the
same names and arguments: torch (always there), triton, apex (parts of it). On a GPU the choice is, in this order:

- what the environment variable ``DEEPSPEED_NMT_KERNELS`` says, then what the configuration says (``engine.kernels``):
  one backend for all, or ``operation=backend`` separated by commas; what is not named stays automatic;
- the fastest one measured on such a GPU (:data:`MEASURED`, from ``benchmarks/kernels.py``);
- where nobody has measured, :data:`EXPECTED`.

What was chosen automatically is tried out on a few numbers before it is used, and gives way to torch if it fails,
with a warning: a program must not die of a GPU whose Triton finds no C compiler. On a CPU it is always torch, but
for Triton's interpreter, when asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, did_you_mean

ENVIRONMENT = "DEEPSPEED_NMT_KERNELS"
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
Choices = dict[str, str]

MEASURED: dict[Capability, dict[torch.dtype, Choices]] = {}
"""The fastest backends, by compute capability and dtype, as ``benchmarks/kernels.py`` found them. None so far."""
EXPECTED: Choices = {
    # torch has this as one kernel, a good one.
    "layer_norm": "torch",
    # These are several kernels in torch, each of which reads and writes everything.
    "bias_dropout_add": "triton",
    "bias_dropout_add_layer_norm": "triton",
    "bias_relu_dropout": "triton",
    "bias_gelu_dropout": "triton",
    "softmax": "triton",
    "cross_entropy": "triton",
}
"""What is taken on a GPU that nobody has measured: expectations, no findings."""

_APEX_PARTS = {
    "layer_norm": ("fused_layer_norm_cuda",),
    "softmax": ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
}
_asked: Choices = {}
_forced: list[str] = []  # one, or none
_planned_for: list[Capability] = []  # one, or none
_table: dict[tuple[str, str, torch.dtype], Callable[..., Any]] = {}
_names: dict[tuple[str, str, torch.dtype], str] = {}


def use(setting: str) -> None:
    """Choose backends for this process from now on: "auto", a backend, or ``operation=backend,...``.

    Raises:
        ConfigError: for what is no operation or no backend of it.
    """
    asked = parse(setting, "engine.kernels")
    _asked.clear()
    _asked.update(asked)
    _forget()


def fall_back_to_torch(operations: Iterable[str]) -> None:
    """From now on torch carries these out in this process, whatever was asked for of the others."""
    _asked.update(dict.fromkeys(operations, "torch"))
    _forget()


@contextmanager
def only(name: str) -> Iterator[None]:
    """Inside, this backend alone, whatever anybody asks for."""
    _forced.append(name)
    _forget()
    try:
        yield
    finally:
        _forced.pop()
        _forget()


def implementation(operation: str, x: Tensor, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """The function that carries an operation out where ``x`` is, in its dtype or another.

    Raises:
        ConfigError: if a backend is asked for that cannot be had there.
    """
    key = (operation, x.device.type, dtype or x.dtype)
    found = _table.get(key)
    if found is None:
        name = choose(operation, x.device, key[2])
        found = _table[key] = _load(operation, name)
        _names[key] = name
    return found


def backend(operation: str, x: Tensor, dtype: torch.dtype | None = None) -> str:
    """The name of the backend that carries an operation out where ``x`` is, in its dtype or another."""
    implementation(operation, x, dtype)
    return _names[operation, x.device.type, dtype or x.dtype]


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """The choices on a device, for the log: "layer_norm torch, softmax triton, ...", or "torch" if all are alike."""
    chosen = choices(device, dtype)
    if len(set(chosen.values())) == 1:
        return chosen.popitem()[1]
    return ", ".join(f"{operation} {name}" for operation, name in chosen.items())


def choices(device: torch.device, dtype: torch.dtype) -> Choices:
    """The choices on a device, made now if they have not been made."""
    x = torch.empty(0, dtype=dtype, device=device)
    return {operation: backend(operation, x) for operation in OPERATIONS}


def parse(setting: str, source: str) -> Choices:
    """What a setting says of each operation that it names.

    Raises:
        ConfigError: naming ``source``, for what is no operation or no backend of it.
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
                f"is '{setting}'{did_you_mean(setting, BACKENDS)}"
            )
        if operation not in OPERATIONS:
            raise ConfigError(
                f"{source} may name {', '.join(OPERATIONS)}, but names '{operation}'"
                f"{did_you_mean(operation, OPERATIONS)}"
            )
        if name not in ("auto", *OPERATIONS[operation]):
            raise ConfigError(
                f"{source}: {operation} can be {' or '.join(OPERATIONS[operation])}, but is to be '{name}'"
                f"{did_you_mean(name, OPERATIONS[operation])}"
            )
        found[operation] = name
    return found


def choose(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend of an operation on a device, tried out there if it was not asked for by name.

    Raises:
        ConfigError: if a backend is asked for that cannot be had there.
    """
    if _forced:
        return _forced[-1]
    asked = {**_asked, **parse(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT)}.get(operation)
    if asked == "auto":
        asked = None
    if device.type == "meta":
        # Counted as on the GPU that is planned for; apex's extensions know no such device.
        name = "torch" if not _planned_for else asked or preferred(operation, _planned_for[0], dtype)
        if not is_installed(operation, name):
            raise ConfigError(f"{operation} is to be {name}, which is not installed here, so cannot be counted")
        return "torch" if name == "apex" else name
    if asked is not None:
        reason = missing(operation, asked, device, dtype)
        if reason is not None:
            raise ConfigError(
                f"{operation} is to be {asked} (engine.kernels or {ENVIRONMENT}), but {reason}; use {operation}=torch"
            )
        return asked
    if device.type != "cuda":
        return "torch"
    name = preferred(operation, torch.cuda.get_device_capability(device), dtype)
    reason = (
        None
        if name == "torch"
        else missing(operation, name, device, dtype) or _failure(operation, name, device, dtype)
    )
    if reason is None:
        return name
    logger.warning("%s: %s, so torch is used, which is slower", operation, reason)
    return "torch"


def preferred(operation: str, capability: Capability, dtype: torch.dtype) -> str:
    """The backend to take on a GPU of this capability, among those installed."""
    name = MEASURED.get(capability, {}).get(dtype, EXPECTED)[operation]
    installed = [each for each in OPERATIONS[operation] if is_installed(operation, each)]
    if dtype == torch.float64 or not installed:
        return "torch"
    if name not in installed or (name == "torch" and "apex" in installed and capability not in MEASURED):
        return "apex" if "apex" in installed else "torch"
    return name


def is_installed(operation: str, name: str) -> bool:
    """Whether what a backend needs for an operation is there; nothing is imported."""
    if name == "apex":
        # PyPI has another package by that name: only the compiled parts tell.
        return all(_has(part) for part in _APEX_PARTS[operation])
    return name == "torch" or _has("triton")


def missing(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot be had for an operation on a device, or None."""
    if not is_installed(operation, name):
        parts = " and ".join(_APEX_PARTS[operation]) if name == "apex" else name
        return f"{parts} is not installed"
    if name != "torch" and dtype == torch.float64:
        return f"{name} computes in fp32, not in fp64"
    if name == "apex" and device.type != "cuda":
        return "apex needs a CUDA device"
    if name == "triton" and device.type != "cuda" and not interpreting():
        return "Triton needs a CUDA device (or TRITON_INTERPRET=1, to test it)"
    return None


def interpreting() -> bool:
    """Whether Triton's kernels are carried out by its interpreter, in Python and on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@contextmanager
def planned_for(capability: Capability | None) -> Iterator[None]:
    """Inside, operations on the meta device take and keep what they do on a GPU of this capability; None: a CPU."""
    before = _planned_for.copy()
    _planned_for[:] = [] if capability is None else [capability]
    _forget("meta")
    try:
        yield
    finally:
        _planned_for[:] = before
        _forget("meta")


def _forget(kind: str = "") -> None:
    """Choices made, on one kind of device or on all."""
    for key in [key for key in _table if kind in ("", key[1])]:
        del _table[key], _names[key]


def kind_of(x: Tensor) -> str:
    """Where ``x`` is, or would be if this were more than a plan: "cpu", "cuda", or another kind of device."""
    if x.device.type == "meta":
        return "cuda" if _planned_for else "cpu"
    return x.device.type


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _load(operation: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"deepspeed_nmt.kernels.{name}_ops"), operation)
    return function


def _failure(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend does not work here, found out by trying, or None."""
    from deepspeed_nmt.kernels.trial import compare

    def tried() -> float | Exception:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            return compare(operation, _load(operation, name), _load(operation, "torch"), device, dtype)
        except Exception as problem:  # a compiler, a driver, an extension: whatever fails, torch works
            return problem

    # In a thread of its own: whether gradients are wanted, autocast, and what recomputation does to saved tensors are
    # matters of the caller's thread.
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(tried).result()
    if isinstance(error, Exception):
        return f"{name} fails on {torch.cuda.get_device_name(device)} ({type(error).__name__}: {error})"
    if error > (1e-3 if dtype == torch.float32 else 5e-2):
        return f"{name} is wrong by {error:.2g} on {torch.cuda.get_device_name(device)}"
    return None
