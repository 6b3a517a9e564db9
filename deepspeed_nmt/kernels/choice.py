"""The choice of backends for the fused operations, and the operations themselves.

Legend: D model width, B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import backends, torch_ops
from deepspeed_nmt.kernels.attention import (
    AttentionChoice,
    additive_mask,
    attention_with_weights,
    planned_attention,
    sdpa,
    sdpa_is_fused,
)
from deepspeed_nmt.kernels.backends import BACKENDS, OPERATIONS, Capability, Choices, parse_setting
from deepspeed_nmt.kernels.segments import Mask, SegmentPair, attention_by_rows, attention_by_varlen, has_varlen

ENVIRONMENT = "DEEPSPEED_NMT_KERNELS"
"""Environment variable with the syntax, and priority over the value, of the setting ``engine.kernels``."""


class Kernels:
    """The backends that carry out a model's fused operations, which are its methods.

    For each operation, device type and dtype a backend is chosen once, the first of these that there is:

    1. the one in ``fixed``;
    2. the one that the environment variable ``DEEPSPEED_NMT_KERNELS`` names;
    3. the one that ``setting`` names;
    4. on a GPU, the fastest one in :data:`~deepspeed_nmt.kernels.backends.MEASURED`, or if its capability has not
       been measured, the one in :data:`~deepspeed_nmt.kernels.backends.EXPECTED`;
    5. torch.

    A backend that is named but not available is an error. A backend that is chosen automatically is compared with
    torch on a few numbers first; if it fails, torch is used and a warning logged: a GPU whose Triton finds no C
    compiler must not end a program.

    An instance is immutable but for its record of the choices made, so models may share one. Give it to a model by
    :func:`deepspeed_nmt.nn.fused.use_kernels`.

    Args:
        setting: "auto", a backend for all operations that it has, or ``operation=backend`` separated by commas;
            operations that are not named are chosen automatically.
        attention: "sdpa" for ``torch.nn.functional.scaled_dot_product_attention``, which on a GPU takes
            FlashAttention or the memory-efficient kernel (the one of a V100) where it can, and holds no attention
            weights; "fused" for two products with softmax and dropout between them, which holds the weights; "auto"
            for SDPA where it has a kernel that holds no weights, else "fused".
        fixed: operation -> backend, used without any check.
        capability: of the GPU for which operations on the meta device allocate; None for a CPU.

    Raises:
        ConfigError: if ``setting`` names an unknown operation, or a backend that an operation does not have.
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
        self._chosen: dict[tuple[str, str, torch.dtype], tuple[str, Callable[..., Any]]] = {}
        self._sdpa_is_fused: dict[tuple[object, ...], bool] = {}

    @classmethod
    def only(cls, backend: str) -> Kernels:
        """Return kernels of one backend for all operations, regardless of the environment."""
        assert backend in BACKENDS
        return cls(fixed=dict.fromkeys(OPERATIONS, backend))

    def fall_back_to_torch(self, operations: Iterable[str]) -> Kernels:
        """Return the same kernels with torch for some of the operations, regardless of settings and environment."""
        fixed = {**self._fixed, **dict.fromkeys(operations, "torch")}
        return Kernels(self._setting, self._attention, fixed=fixed, capability=self._capability)

    def planned_for(self, capability: Capability | None) -> Kernels:
        """Return the same kernels, allocating on the meta device as on a GPU of this capability; None for a CPU."""
        return Kernels(self._setting, self._attention, fixed=self._fixed, capability=capability)

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Return itself: a copied model shares its kernels with the original."""
        return self

    # Choosing

    def implementation(self, operation: str, x: Tensor, dtype: torch.dtype | None = None) -> Callable[..., Any]:
        """Return the chosen backend's function for an operation on the device of ``x``.

        Args:
            operation: a key of OPERATIONS.
            x: a tensor on the device.
            dtype: to compute in; default that of ``x``.

        Raises:
            ConfigError: if a backend is named that is not available there.
        """
        return self._choice(operation, x, dtype)[1]

    def backend(self, operation: str, x: Tensor, dtype: torch.dtype | None = None) -> str:
        """Return the name of the backend chosen for an operation; see :meth:`implementation`."""
        return self._choice(operation, x, dtype)[0]

    def choices(self, device: torch.device, dtype: torch.dtype) -> Choices:
        """Return the backend of every operation on a device.

        Raises:
            ConfigError: if a backend is named that is not available there.
        """
        x = torch.empty(0, dtype=dtype, device=device)
        return {operation: self.backend(operation, x) for operation in OPERATIONS}

    def describe(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return the choices for the log: "layer_norm torch, softmax triton, ...", or "torch" if all are equal."""
        chosen = self.choices(device, dtype)
        if len(set(chosen.values())) == 1:
            return chosen.popitem()[1]
        return ", ".join(f"{operation} {name}" for operation, name in chosen.items())

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

        On a GPU the copies are as many launches as they save, but the backward pass has half as many: one product for
        the gradient of all weights, one for that of ``x``, and no sums. On a CPU that gains nothing.
        """
        return torch.is_grad_enabled() and self.device_type(x) != "cpu"

    def _choice(self, operation: str, x: Tensor, dtype: torch.dtype | None) -> tuple[str, Callable[..., Any]]:
        if torch.compiler.is_compiling():  # the compiler fuses torch's operations itself
            return "torch", getattr(torch_ops, operation)
        key = (operation, x.device.type, dtype or x.dtype)
        choice = self._chosen.get(key)
        if choice is None:
            name = self._choose(operation, x.device, key[2])
            choice = self._chosen[key] = name, backends.load(operation, name)
        return choice

    def _choose(self, operation: str, device: torch.device, dtype: torch.dtype) -> str:
        if operation in self._fixed:
            return self._fixed[operation]
        named = {**self._named, **parse_setting(os.environ.get(ENVIRONMENT, ""), ENVIRONMENT)}.get(operation, "auto")
        if device.type == "meta":
            return self._choose_for_plan(operation, named, dtype)
        if named != "auto":
            _refuse(operation, named, backends.obstacle(operation, named, device, dtype))
            return named
        if device.type != "cuda":
            return "torch"
        name = backends.preferred(operation, torch.cuda.get_device_capability(device), dtype)
        if name == "torch":
            return name
        reason = backends.obstacle(operation, name, device, dtype) or backends.failure(operation, name, device, dtype)
        if reason is None:
            return name
        logger.warning("%s: %s, so torch is used, which is slower", operation, reason)
        return "torch"

    def _choose_for_plan(self, operation: str, named: str, dtype: torch.dtype) -> str:
        if self._capability is None:
            return "torch"
        name = backends.preferred(operation, self._capability, dtype) if named == "auto" else named
        if not backends.is_installed(operation, name):
            _refuse(operation, name, f"{name} is not installed here, so its memory cannot be counted")
        # apex's extensions have no meta device, and allocate as torch does.
        return "torch" if name == "apex" else name

    # The operations. Statistics and sums are in fp32 or wider for every dtype.

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension (Ba et al. 2016). Shape: (..., D), (D,), (D,) -> (..., D)."""
        normed: Tensor = self.implementation("layer_norm", x)(x, weight, bias, eps)
        return normed

    def bias_dropout_add(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, alpha: float = 1.0
    ) -> Tensor:
        """Compute alpha residual + dropout(x + bias), in the wider dtype of ``x`` and ``residual``.

        Shape: (..., D), (D,), (..., D) -> (..., D)
        """
        carry_out = self.implementation("bias_dropout_add", x)
        joined: Tensor = carry_out(x, bias, residual, p if training else 0.0, alpha)
        return joined

    def bias_dropout_add_layer_norm(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        norm_bias: Tensor,
        p: float,
        training: bool,
        alpha: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """Compute alpha residual + dropout(x + bias), and its LayerNorm.

        Shape: (..., D), (D,), (..., D), (D,), (D,) -> (..., D), (..., D)
        """
        carry_out = self.implementation("bias_dropout_add_layer_norm", x)
        found: tuple[Tensor, Tensor] = carry_out(
            x, bias, residual, weight, norm_bias, p if training else 0.0, alpha, eps
        )
        return found

    def bias_relu_dropout(self, x: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
        """Compute dropout(max(0, x + bias)). Shape: (..., D), (D,) -> (..., D)."""
        active: Tensor = self.implementation("bias_relu_dropout", x)(x, bias, p if training else 0.0)
        return active

    def bias_gelu_dropout(self, x: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
        """Compute dropout(gelu(x + bias)), with the exact GELU (Hendrycks and Gimpel 2016).

        Shape: (..., D), (D,) -> (..., D)
        """
        active: Tensor = self.implementation("bias_gelu_dropout", x)(x, bias, p if training else 0.0)
        return active

    def softmax(
        self, scores_BHTS: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0
    ) -> Tensor:
        """Turn scores into attention weights over the visible keys; a query that sees none gets zeros.

        Args:
            scores_BHTS: attention scores.
            mask: bool, broadcastable to (B, H, T, S), True where a query sees a key; None for all.
            causal: query t sees the keys up to its own position; if S > T, the queries are at the last positions.
                Excludes ``mask``.
            scale: factor on the scores.

        Shape: (B,H,T,S) -> (B,H,T,S)
        """
        weights: Tensor = self.implementation("softmax", scores_BHTS)(scores_BHTS, mask, causal, scale)
        return weights

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
            q_BHTK: queries.
            k_BHSK: keys.
            v_BHSK: values.
            mask: bool, broadcastable to (B, H, T, S), True where a query sees a key; a query that sees none gets
                zeros. Or the sentences in which queries see keys.
            causal: query t sees keys 0..t only (T = S), of its sentence. Excludes a mask that is a tensor.
            dropout_p: probability of dropping an attention weight; pass 0 when not training.

        Shape: (B,H,T,K), (B,H,S,K), (B,H,S,K) -> (B,H,T,K)
        """
        if isinstance(mask, SegmentPair):
            if q_BHTK.device.type == "meta":
                return planned_attention(q_BHTK, k_BHSK, v_BHSK, mask.keys.longest)
            if self._attention != "fused" and has_varlen(q_BHTK, dropout_p):
                return attention_by_varlen(q_BHTK, k_BHSK, v_BHSK, mask, causal)
            return _by_rows(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p, self.attention)
        assert not (causal and mask is not None), "padding is on the right, so causal attention needs no mask"
        arguments = (q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p)
        if self._takes_sdpa(*arguments):
            if mask is not None and self._takes_additive(mask, q_BHTK):
                mask = additive_mask(mask, q_BHTK.dtype)
            return sdpa(q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p)
        return attention_with_weights(*arguments, softmax=self.softmax)[0]

    def _takes_sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
    ) -> bool:
        if self._attention != "auto":
            return self._attention == "sdpa"
        if self.device_type(q) == "cpu":
            return dropout_p == 0.0
        if q.device.type != "cuda":
            return True
        key = (q.dtype, q.shape[-1], mask is None, causal, dropout_p > 0.0, q.requires_grad)
        if key not in self._sdpa_is_fused:
            self._sdpa_is_fused[key] = sdpa_is_fused(q, k, v, mask, causal, dropout_p)
        return self._sdpa_is_fused[key]

    def _takes_additive(self, mask: Tensor, q: Tensor) -> bool:
        """Return True if the layers of a model should add a mask that is made once; in a search, it may change."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        return mask.dtype == torch.bool and self.device_type(q) != "cpu"


def _refuse(operation: str, name: str, reason: str | None) -> None:
    """Raise a ConfigError if there is a reason."""
    if reason is not None:
        raise ConfigError(
            f"engine.kernels or {ENVIRONMENT} asks for {operation}={name}, but {reason}; use {operation}=torch"
        )


_by_rows = _disable_dynamo(attention_by_rows)  # torch.compiler.disable would import the compiler, which takes seconds
"""Not compiled, because its shapes differ from one micro-batch to the next."""
DEFAULT = Kernels()
"""Automatic choices: the kernels of modules to which no others are given."""
