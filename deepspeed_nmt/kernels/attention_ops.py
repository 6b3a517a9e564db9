"""Attention by torch's SDPA, and its stand-in on the meta device.

Legend: B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

AttentionChoice = Literal["auto", "sdpa", "fused"]
"""A way to compute attention; see :class:`deepspeed_nmt.kernels.choice.Kernels`."""
_ALIGNMENT = 8
"""Number that must divide the strides of a mask for torch's memory-efficient attention."""
_MADE: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
"""The additive masks of the masks that are in use."""


def sdpa(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
) -> Tensor:
    """Compute attention as :meth:`Kernels.attention` by SDPA; on the meta device, stand in for its GPU kernel."""
    if q_BHTK.device.type == "meta":
        return planned_attention(q_BHTK, k_BHSK, v_BHSK, k_BHSK.shape[2])
    if q_BHTK.device.type == "cpu" and q_BHTK.dtype == torch.bfloat16 and torch.is_grad_enabled():
        # There the backward pass in bf16 takes up to ten times as long as in fp32.
        q, k, v = q_BHTK.float(), k_BHSK.float(), v_BHSK.float()
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal).to(q_BHTK.dtype)
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=causal, dropout_p=dropout_p
    )


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers to add to scores, 0 for a key that is seen and -inf for another.

    torch's memory-efficient attention would make it in each call from any other mask. Here it is made once and kept
    as long as ``mask``, whose values must not change.
    """
    made = _MADE.get(mask)
    if made is None or made.dtype != dtype:
        keys = mask.shape[-1]
        room = mask.new_full((*mask.shape[:-1], -(-keys // _ALIGNMENT) * _ALIGNMENT), -torch.inf, dtype=dtype)
        made = _MADE[mask] = room[..., :keys].masked_fill_(mask, 0.0)
    return made


def planned_attention(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, seen: int) -> Tensor:
    """Do the work and keep the memory of a fused kernel on the meta device, if each query sees ``seen`` keys."""
    return _PlannedAttention.apply(q_BHTK, k_BHSK, v_BHSK, seen)  # type: ignore[no-any-return,no-untyped-call]


def sdpa_is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> bool:
    """Return True if SDPA has a fused kernel for these on a GPU; its fallback in steps holds the weights."""
    backends = torch.backends.cuda
    arguments = backends.SDPAParams(q, k, v, mask, dropout_p, causal, False)
    return (
        backends.can_use_flash_attention(arguments)
        or backends.can_use_efficient_attention(arguments)
        or backends.can_use_cudnn_attention(arguments)
    )


class _PlannedAttention(torch.autograd.Function):
    """Stand-in on the meta device for a fused attention kernel: keeps and multiplies as much as it does on a GPU."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, seen: int) -> Tensor:
        batch, heads, length, width = q_BHTK.shape
        # In the layout (B,T,H,K), as the kernels return it, so that joining the heads copies nothing.
        out_BTHK = q_BHTK.new_empty(batch, length, heads, width)
        log_sums_BHT = q_BHTK.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BHSK, v_BHSK, out_BTHK, log_sums_BHT)
        ctx.seen = seen
        _multiply(q_BHTK, seen, times=2)
        return out_BTHK.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTK, k_BHSK, v_BHSK, _, _ = ctx.saved_tensors
        _multiply(q_BHTK, ctx.seen, times=4)
        return torch.empty_like(q_BHTK), torch.empty_like(k_BHSK), torch.empty_like(v_BHSK), None


def _multiply(q_BHTK: Tensor, seen: int, times: int) -> None:
    """Do the work of this many products like q k^T without their memory: a fused kernel never holds all weights."""
    terms = times * q_BHTK.numel() * seen
    one = q_BHTK.detach().new_empty(())
    torch.mm(one.expand(1, terms), one.expand(terms, 1))
