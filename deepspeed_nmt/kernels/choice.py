"""The fused operations, and the choice of the backends that carry them out.

An operation is a method of :class:`Kernels`. A backend is a module beside this one (`torch_ops.py`, which has all of
them, `triton_ops.py`, `apex_ops.py`, `onednn_ops.py`) with functions of the operations' names. A choice is a function
of device, dtype, packages and settings. Nothing is timed, so that a run that is started again computes the same.

Legend: D model width, E output width, B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.files import system_lines
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.attention_ops import AttentionChoice, additive_mask, planned_attention, sdpa, sdpa_is_fused
from deepspeed_nmt.kernels.precision import Capability
from deepspeed_nmt.kernels.segments import Mask, SegmentPair, attention_by_rows, attention_by_varlen, has_varlen
from deepspeed_nmt.kernels.torch_ops import ChunkRows

ENVIRONMENT = "DEEPSPEED_NMT_KERNELS"
"""Environment variable with the syntax, and priority over the value, of the setting ``engine.kernels``."""

OPERATIONS: dict[str, tuple[str, ...]] = {
    "linear": ("torch", "onednn"),
    "layer_norm": ("torch", "triton", "apex"),
    "branch_layer_norm": ("torch", "triton"),
    "bias_dropout_add": ("torch", "triton"),
    "bias_dropout_add_layer_norm": ("torch", "triton"),
    "bias_relu_dropout": ("torch", "triton"),
    "bias_gelu_dropout": ("torch", "triton"),
    "softmax": ("torch", "triton", "apex"),
    "cross_entropy": ("torch", "triton"),
}
"""Operations, each with the backends that have it."""
BACKENDS = ("torch", "triton", "apex", "onednn")

Choices = dict[str, str]
"""Operation -> backend."""

MEASURED: dict[Capability, dict[torch.dtype, Choices]] = {(9, 0): {torch.bfloat16: {"layer_norm": "triton"}}}
"""Fastest backends by compute capability and dtype, as `benchmarks/gpu/run.sh kernels` prints them.

Operations that are missing are those of :data:`EXPECTED`, also because they are the fastest."""
EXPECTED: Choices = {name: "torch" if name in ("linear", "layer_norm") else "triton" for name in OPERATIONS}
"""Backends preferred on a GPU that has not been measured: Triton for what is several kernels in torch, each of which
reads and writes every element. Expectations, not findings."""

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")
_APEX_EXTENSIONS = {
    "layer_norm": ("fused_layer_norm_cuda",),
    "softmax": ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"),
}


def parse_setting(setting: str, source: str) -> Choices:
    """Return the backend, or "auto", of each operation that a setting names; ``source`` is its name for messages.

    It is "auto", a backend's name, or ``operation=backend`` separated by commas; "" names no operation.

    Raises:
        ConfigError: if it names an unknown operation, or a backend that an operation does not have.
    """
    if setting in ("", "auto", *BACKENDS):
        return {name: setting for name, backends in OPERATIONS.items() if setting in ("auto", *backends)}
    named: Choices = {}
    for part in setting.split(","):
        operation, equals, name = (word.strip() for word in part.partition("="))
        if not equals:
            wrong, value, known = "", setting, ["auto", *BACKENDS, "operation=backend,..."]
        elif operation not in OPERATIONS:
            wrong, value, known = ": an operation", operation, list(OPERATIONS)
        elif name not in ("auto", *OPERATIONS[operation]):
            wrong, value, known = f": {operation}", name, ["auto", *OPERATIONS[operation]]
        else:
            named[operation] = name
            continue
        raise ConfigError(f"{source}{wrong} is {shown(value)}; use {' or '.join(known)}{did_you_mean(value, known)}")
    return named


def preferred_on_gpu(operation: str, capability: Capability, dtype: torch.dtype) -> str:
    """Return the installed backend to prefer on a GPU of this capability."""
    name = MEASURED.get(capability, {}).get(dtype, {}).get(operation, EXPECTED[operation])
    installed = [backend for backend in OPERATIONS[operation] if is_installed(operation, backend)]
    if dtype == torch.float64:
        return "torch"
    if name not in installed or (name == "torch" and "apex" in installed and capability not in MEASURED):
        return "apex" if "apex" in installed else "torch"
    return name


def preferred_on_cpu(operation: str, dtype: torch.dtype) -> str:
    """Return the backend to prefer on this CPU.

    oneDNN multiplies fp32 up to twice as fast as MKL on CPUs of AMD with AVX-512, which MKL does not use there, and
    no faster on others; it multiplies bf16 faster wherever the CPU has instructions for it.
    """
    if operation != "linear" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "torch"
    if dtype == torch.bfloat16:
        return "onednn" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "torch"
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    slow_mkl = has_mkl and cpu_vendor() == "AuthenticAMD" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return "onednn" if dtype == torch.float32 and slow_mkl else "torch"


@cache
def cpu_vendor() -> str:
    """Return the vendor of this CPU as it reports itself, such as "AuthenticAMD"; "" if unknown."""
    lines = system_lines("/proc/cpuinfo")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def is_installed(operation: str, name: str) -> bool:
    """Return True if the packages that a backend needs for an operation are installed; import none of them."""
    if name == "apex":
        # PyPI has another package by that name: only the compiled extensions tell.
        return all(_is_importable(extension) for extension in _APEX_EXTENSIONS[operation])
    return name in ("torch", "onednn") or _is_importable("triton")


def obstacle(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason for which a backend cannot carry out an operation on a device, or None."""
    if not is_installed(operation, name):
        packages = " and ".join(_APEX_EXTENSIONS[operation]) if name == "apex" else name
        return f"{packages} is not installed"
    if name == "onednn":
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return "oneDNN needs a CPU, and a build of torch with oneDNN"
        return None if dtype in (torch.float32, torch.bfloat16) else "oneDNN multiplies fp32 and bf16 only"
    if name != "torch" and dtype == torch.float64:
        return f"{name} computes in fp32, not in fp64"
    if name == "apex" and device.type != "cuda":
        return "apex needs a CUDA device"
    if name == "triton" and device.type != "cuda" and not interpreting():
        return "Triton needs a CUDA device (or TRITON_INTERPRET=1, to test it)"
    return None


def failure(operation: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run a backend's operation on a few numbers; return the reason for which it cannot be trusted here, or None."""

    def error_of_trial() -> float:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return compare(operation, load(operation, name), load(operation, "torch"), device, dtype)

    try:
        # Grad mode and recomputation's hooks for saved tensors are per thread: a new thread has none of them.
        with ThreadPoolExecutor(1) as pool:
            error = pool.submit(error_of_trial).result()
    except Exception as problem:  # of a compiler, a driver or an extension; torch works without them
        return f"{name} fails on {torch.cuda.get_device_name(device)} ({type(problem).__name__}: {problem})"
    if error > (1e-3 if dtype == torch.float32 else 5e-2):
        return f"{name} is wrong by {error:.2g} on {torch.cuda.get_device_name(device)}"
    return None


def compare(operation: str, ours: Function, theirs: Function, device: torch.device, dtype: torch.dtype) -> float:
    """Return the largest difference in results and gradients, in units of max(1, |expected|), without dropout.

    ``theirs`` computes in fp64. An infinity or a NaN differs by infinity.
    """
    worst = 0.0
    for arguments in _trial_arguments(operation, device, dtype):
        results = _outcome(operation, ours, arguments, dtype)
        expected = _outcome(operation, theirs, arguments, torch.float64)
        for one, other in zip(results, expected, strict=True):
            error = ((one.double() - other).abs() / other.abs().clamp(min=1.0)).max()
            worst = max(worst, float(error) if bool(torch.isfinite(error)) else float("inf"))
    return worst


def _trial_arguments(operation: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    x, v = (10, 72), (72,)  # shapes that are not multiples of the kernels' block sizes
    shapes_and_numbers: dict[str, tuple[Any, ...]] = {
        "linear": (x, (72, 72), v),
        "layer_norm": (x, v, v, 1e-5),
        "branch_layer_norm": (x, v, v, 1e-5),
        "bias_dropout_add": (x, v, x, 0.0, 1.7),
        "bias_dropout_add_layer_norm": (x, v, x, v, v, 0.0, 1.7, 1e-5),
        "bias_relu_dropout": (x, v, 0.0),
        "bias_gelu_dropout": (x, v, 0.0),
    }

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if operation == "softmax":
        mask = torch.rand(4, 1, 1, 72, generator=generator).to(device) < 0.8
        mask[1] = False  # a sentence that is all padding
        yield of(4, 4, 16, 72), mask, False, 0.3
        yield of(4, 4, 16, 16), None, True, 0.3
    elif operation == "cross_entropy":
        index = torch.randint(0, 72, (10,), generator=generator).to(device)
        here = (torch.arange(10) != 3).to(device)
        rows = ChunkRows(index, here, here.float() * 1.3, 0.1, 72, 0.7, None)
        yield [of(*x)], rows
        yield [of(*x), of(*x)], rows
        yield [of(*x), of(*x)], rows._replace(taught="kl")
    else:
        yield tuple(of(*value) if isinstance(value, tuple) else value for value in shapes_and_numbers[operation])


def _outcome(operation: str, function: Function, arguments: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """Compute the results, and the gradients of every tensor argument that has one."""
    if operation == "cross_entropy":
        logits, rows = arguments
        result = function([z.to(dtype, copy=True) for z in logits], rows, True)
        sums = [result.loss_N * rows.weights_N, result.nll_N * rows.here_N, *result.gradients]
        return sums if result.divergence_N is None else [*sums, result.divergence_N]
    inputs = [
        x.to(dtype, copy=True).requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in arguments
    ]
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    result = function(*inputs)
    results = result if isinstance(result, tuple) else (result,)
    upstream = [torch.linspace(-1.0, 1.0, x.numel(), device=x.device).view_as(x).to(x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, upstream)]


def load(operation: str, name: str) -> Function:
    """Import a backend and return its function for an operation."""
    function: Function = getattr(importlib.import_module(f"deepspeed_nmt.kernels.{name}_ops"), operation)
    return function


def interpreting() -> bool:
    """Return True if Triton's kernels are run by its interpreter, in Python and on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _dispatched(reference: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Kernels, Tensor, P], R]:
    """Return the method that carries out an operation, of which ``reference`` is torch's, by the chosen backend."""
    operation = reference.__name__

    def carry_out(kernels: Kernels, x: Tensor, /, *arguments: P.args, **options: P.kwargs) -> R:
        result: R = kernels.implementation(operation, x)(x, *arguments, **options)
        return result

    return carry_out


class Kernels:
    """The backends that carry out a model's fused operations, which are its methods.

    For each operation, device type and dtype a backend is chosen once, the first of these that there is:

    1. the one in ``fixed``;
    2. the one that the environment variable ``DEEPSPEED_NMT_KERNELS`` names, or else ``setting``, which must be
       available;
    3. on a GPU, the one in :data:`MEASURED` or else :data:`EXPECTED`, unless it fails when it is compared with torch
       on a few numbers; on a CPU, the one of :func:`preferred_on_cpu`;
    4. torch.

    Models may share an instance. Give it to a model by :func:`use_kernels`.

    Args:
        setting: as :func:`parse_setting` reads it; other operations are chosen automatically.
        attention: "sdpa" for ``torch.nn.functional.scaled_dot_product_attention``, which on a GPU takes
            FlashAttention or the memory-efficient kernel (the one of a V100) where it can, and holds no attention
            weights; "fused" for two products with softmax and dropout between them, which holds the weights; "auto"
            for SDPA where it has a kernel that holds no weights, else "fused".
        fixed: operation -> backend, used without any check.
        capability: of the GPU for which operations on the meta device allocate; None for a CPU.
    """

    def __init__(
        self,
        setting: str = "auto",
        attention: AttentionChoice = "auto",
        *,
        fixed: Mapping[str, str] | None = None,
        capability: Capability | None = None,
    ) -> None:
        self._setting = setting
        self._named = parse_setting(setting, "engine.kernels")
        self._attention = attention
        self._fixed = dict(fixed or {})
        self._capability = capability
        self._chosen: dict[tuple[str, str, torch.dtype], tuple[str, Function]] = {}
        self._sdpa_is_fused: dict[tuple[object, ...], bool] = {}

    @classmethod
    def only(cls, backend: str) -> Kernels:
        """Return kernels of one backend where it has the operation, else of torch, regardless of the environment."""
        return cls(fixed={name: backend if backend in having else "torch" for name, having in OPERATIONS.items()})

    def fixing(self, choices: Choices) -> Kernels:
        """Return the same kernels with these backends for some operations, regardless of settings and environment."""
        fixed = {**self._fixed, **choices}
        return Kernels(self._setting, self._attention, fixed=fixed, capability=self._capability)

    def planned_for(self, capability: Capability | None) -> Kernels:
        """Return the same kernels, allocating on the meta device as on a GPU of this capability; None for a CPU."""
        return Kernels(self._setting, self._attention, fixed=self._fixed, capability=capability)

    def names(self, operation: str) -> bool:
        """Return True if a setting or the environment names the backend of an operation."""
        return self._named_backend(operation) != "auto"

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Return itself: a copied model shares its kernels with the original."""
        return self

    def implementation(self, operation: str, x: Tensor) -> Function:
        """Return the chosen backend's function for an operation where ``x`` is, in the dtype of ``x``."""
        return self._choice(operation, x)[1]

    def backend(self, operation: str, x: Tensor) -> str:
        """Return the name of the backend chosen for an operation; see :meth:`implementation`."""
        return self._choice(operation, x)[0]

    def choices(self, device: torch.device, dtype: torch.dtype) -> Choices:
        """Return the backend of every operation on a device."""
        x = torch.empty(0, dtype=dtype, device=device)
        return {operation: self.backend(operation, x) for operation in OPERATIONS}

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the choices for the log: "torch", or "softmax triton, ..., others torch"."""
        others = {operation: name for operation, name in self.choices(device, dtype).items() if name != "torch"}
        listed = ", ".join(f"{operation} {name}" for operation, name in others.items())
        return f"{listed}, others torch" if others else "torch"

    def device_type(self, x: Tensor) -> str:
        """Return the type of the device of ``x``; for the meta device, "cuda" or "cpu", whichever is planned for."""
        if x.device.type == "meta":
            return "cpu" if self._capability is None else "cuda"
        return x.device.type

    def takes_bias(self, operation: str, x: Tensor) -> bool:
        """Return True if an operation adds a bias in its own kernel, so the matrix product of ``x`` need not."""
        return self.backend(operation, x) != "torch"

    def joins_products(self, x: Tensor) -> bool:
        """Return True if several matrix products of ``x`` are to be computed as one, by a copy of all weights.

        On a GPU the backward pass then launches half as many kernels. On a CPU that gains nothing.
        """
        return torch.is_grad_enabled() and self.device_type(x) != "cpu"

    def _choice(self, operation: str, x: Tensor) -> tuple[str, Function]:
        if torch.compiler.is_compiling():  # the compiler fuses torch's operations itself
            return "torch", getattr(torch_ops, operation)
        key = (operation, x.device.type, x.dtype)
        if key not in self._chosen:
            name = self._choose(operation, x.device, x.dtype)
            self._chosen[key] = name, load(operation, name)
        return self._chosen[key]

    def _choose(self, operation: str, device: torch.device, dtype: torch.dtype) -> str:
        if operation in self._fixed:
            return self._fixed[operation]
        named = self._named_backend(operation)
        if device.type == "meta":
            if self._capability is None:
                return "torch"
            name = preferred_on_gpu(operation, self._capability, dtype) if named == "auto" else named
            if not is_installed(operation, name):
                _refuse(operation, name, f"{name} is not installed here, so its memory cannot be counted")
            # apex's extensions have no meta device, and allocate as torch does.
            return "torch" if name == "apex" else name
        if named != "auto":
            _refuse(operation, named, obstacle(operation, named, device, dtype))
            return named
        if device.type != "cuda":
            return preferred_on_cpu(operation, dtype) if device.type == "cpu" else "torch"
        name = preferred_on_gpu(operation, torch.cuda.get_device_capability(device), dtype)
        if name != "torch" and (reason := failure(operation, name, device, dtype)):
            logger.warning("%s: %s, so torch is used, which is slower", operation, reason)
            return "torch"
        return name

    def _named_backend(self, operation: str) -> str:
        """Return the backend that the environment or the setting names for an operation, or "auto"."""
        return {**self._named, **parse_setting(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT)}.get(operation, "auto")

    # The operations; their arguments, shapes and equations are those of the references in `torch_ops.py`.

    linear = _dispatched(torch_ops.linear)
    layer_norm = _dispatched(torch_ops.layer_norm)
    branch_layer_norm = _dispatched(torch_ops.branch_layer_norm)
    bias_dropout_add = _dispatched(torch_ops.bias_dropout_add)
    bias_dropout_add_layer_norm = _dispatched(torch_ops.bias_dropout_add_layer_norm)
    bias_relu_dropout = _dispatched(torch_ops.bias_relu_dropout)
    bias_gelu_dropout = _dispatched(torch_ops.bias_gelu_dropout)
    softmax = _dispatched(torch_ops.softmax)

    def attention(
        self,
        q_BHTK: Tensor,
        k_BHSK: Tensor,
        v_BHSK: Tensor,
        mask: Mask = None,
        causal: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """Compute softmax(q k^T / sqrt(K)) v (Vaswani et al. 2017, eq. 1).

        Args:
            mask: bool, broadcastable to (B, H, T, S), True where a query sees a key; a query that sees none gets
                zeros. Or the sentences in which queries see keys.
            causal: query t sees keys 0..t only (T = S), of its sentence. Excludes a mask that is a tensor.
            dropout_p: probability of dropping an attention weight; pass 0 when not training.
        """
        if isinstance(mask, SegmentPair):
            if q_BHTK.device.type == "meta":
                return planned_attention(q_BHTK, k_BHSK, v_BHSK, mask.keys.longest)
            if self._attention != "fused" and has_varlen(q_BHTK):
                return attention_by_varlen(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p)
            return _by_rows(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p, self.attention)
        assert not (causal and mask is not None), "padding is on the right, so causal attention needs no mask"
        if not self._takes_sdpa(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p):
            # Scaled before the product, which in fp16 could overflow otherwise.
            scores_BHTS = torch.matmul(q_BHTK * q_BHTK.shape[-1] ** -0.5, k_BHSK.transpose(-1, -2))
            weights_BHTS = self.softmax(scores_BHTS, mask, causal, 1.0)
            return torch.matmul(torch_ops.dropout(weights_BHTS, dropout_p), v_BHSK)
        # The layers of a model add a mask that is made once; in a search it may change.
        is_constant = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if mask is not None and mask.dtype == torch.bool and is_constant and self.device_type(q_BHTK) != "cpu":
            mask = additive_mask(mask, q_BHTK.dtype)
        return sdpa(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p)

    def _takes_sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
    ) -> bool:
        if self._attention != "auto":
            return self._attention == "sdpa"
        if q.device.type != "cuda":
            return dropout_p == 0.0 or self.device_type(q) != "cpu"
        key = (q.dtype, q.shape[-1], mask is None, causal, dropout_p > 0.0, q.requires_grad)
        if key not in self._sdpa_is_fused:
            self._sdpa_is_fused[key] = sdpa_is_fused(q, k, v, mask, causal, dropout_p)
        return self._sdpa_is_fused[key]


def _refuse(operation: str, name: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(
            f"{reason}, which engine.kernels or {ENVIRONMENT} asks for by {operation}={name}; use {operation}=torch"
        )


_by_rows = _disable_dynamo(attention_by_rows)  # torch.compiler.disable would import the compiler, which takes seconds
"""Not compiled, because its shapes differ from one micro-batch to the next."""
DEFAULT = Kernels()
"""Automatic choices: the kernels of modules to which no others are given."""


class UsesKernels:
    """Mixin of modules whose operations are carried out by :class:`Kernels`; :func:`use_kernels` sets them."""

    kernels: Kernels = DEFAULT


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Have all operations of a model carried out by these kernels from now on."""
    for module in model.modules():
        if isinstance(module, UsesKernels):
            module.kernels = kernels
