"""Matrix products of few rows on a CPU, with weights that are rearranged once.

A decoder multiplies a few rows by the same weights, one position after another. torch's BLAS rearranges the weights
in every call, which takes longer than the product. oneDNN and FBGEMM take weights that are rearranged already, in
fp32, bf16 or int8.

In int8 each row of a weight has a scale of its own. The input is quantised in each call, with one scale for all rows
of the batch. So a translation depends in its last digits on the sentences that are translated with it.

Legend: N rows, D input width, E output width.
"""

from __future__ import annotations

import warnings
from threading import Lock
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["relu", "gelu", "swish"]

PACKED = ("fp32", "bf16", "int8")
"""Precisions of packed weights."""

_WIDE = 4096
"""Output width from which oneDNN's int8 products are faster than FBGEMM's."""
_engine = Lock()


def obstacle(precision: str) -> str | None:
    """Return the reason for which weights cannot be packed in this precision here, or None."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU does not multiply bf16 in hardware"
    if precision == "int8" and not {"fbgemm", "onednn"} <= set(torch.backends.quantized.supported_engines):
        return "this build of torch has no int8 products"
    return None


class PackedWeight:
    """A weight and a bias, rearranged for fast products.

    Args:
        weight_ED: the weight, in fp32 or bf16.
        bias_E: the bias; None for none.
        int8: True to round the weight to int8.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None, int8: bool = False) -> None:
        self._bias = None if bias_E is None else bias_E.detach()
        self._int8 = _quantised(weight_ED.detach(), self._bias) if int8 else None
        self._weight = None if int8 else torch.ops.mkldnn._reorder_linear_weight(weight_ED.detach().contiguous())
        # Without this instruction, sums of products of 8-bit numbers overflow 16 bits.
        self._seven_bits = int8 and not torch.cpu._is_vnni_supported()

    def __call__(self, x: Tensor, activation: Activation | None = None, residual: Tensor | None = None) -> Tensor:
        """Compute activation(x W^T + b), or x W^T + b + residual. Shape: (..., D), (..., E) -> (..., E)."""
        assert activation is None or residual is None
        if self._int8 is not None:
            return self._multiply_int8(x, activation, residual)
        multiply = torch.ops.mkldnn._linear_pointwise
        found: Tensor
        if residual is not None:
            found = multiply.binary(x, residual.contiguous(), self._weight, self._bias, "add")
        elif activation is None:
            found = multiply(x, self._weight, self._bias, "none", [], "")
        else:
            found = multiply(x, self._weight, self._bias, activation, [], "none" if activation == "gelu" else "")
        return found

    def _multiply_int8(self, x: Tensor, activation: Activation | None, residual: Tensor | None) -> Tensor:
        operations = torch.ops.quantized
        multiply = operations.linear_relu_dynamic if activation == "relu" else operations.linear_dynamic
        found: Tensor = multiply(x, self._int8, self._seven_bits)
        if activation in ("gelu", "swish"):
            return F.gelu(found) if activation == "gelu" else F.silu(found)
        return found if residual is None else found.add_(residual)


class JoinedWeight:
    """A weight and a bias as they are, with the interface of :class:`PackedWeight`, for a GPU.

    Args:
        weight_ED: the weight.
        bias_E: the bias; None for none.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None) -> None:
        self._weight = weight_ED.detach()
        self._bias = None if bias_E is None else bias_E.detach()

    def __call__(self, x: Tensor, activation: Activation | None = None, residual: Tensor | None = None) -> Tensor:
        """Compute activation(x W^T + b), or x W^T + b + residual. Shape: (..., D), (..., E) -> (..., E)."""
        assert activation is None or residual is None
        found = F.linear(x, self._weight, self._bias)
        if residual is not None:
            return found.add_(residual)
        if activation is None:
            return found
        return {"relu": F.relu_, "gelu": F.gelu, "swish": F.silu}[activation](found)


def _quantised(weight_ED: Tensor, bias_E: Tensor | None) -> Any:
    """Round a weight to int8, with a scale for each output, and rearrange it."""
    scales_E = (weight_ED.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
    with warnings.catch_warnings(), _engine:
        warnings.simplefilter("ignore")  # the tensors are deprecated; the operations on packed weights are not
        zeros_E = torch.zeros_like(scales_E, dtype=torch.int)
        rounded = torch.quantize_per_channel(weight_ED, scales_E, zeros_E, 0, torch.qint8)
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "onednn" if len(weight_ED) >= _WIDE else "fbgemm"
        try:
            return torch.ops.quantized.linear_prepack(rounded, bias_E)
        finally:
            torch.backends.quantized.engine = before
