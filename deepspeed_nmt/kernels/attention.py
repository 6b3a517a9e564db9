"""Attention, in one kernel (torch's SDPA) or in three steps with a fused softmax.

Legend: B batch, H heads, T queries, S keys, K head width.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.kernels import ops
from deepspeed_nmt.kernels.dispatch import kind_of

Choice = Literal["auto", "sdpa", "fused"]
_choice: Choice = "auto"
_served: dict[tuple[object, ...], bool] = {}


def use(choice: Choice) -> None:
    """Choose how attention is computed in this process from now on.

    - sdpa: ``torch.nn.functional.scaled_dot_product_attention``, which on a GPU takes FlashAttention or the
      memory-efficient kernel (the one of a V100) where it can, and holds no weights;
    - fused: products, the softmax kernel and dropout one after the other; weights are held;
    - auto: SDPA where it has a kernel that holds no weights, else fused.
    """
    global _choice
    assert choice in get_args(Choice)
    _choice = choice
    _served.clear()


def attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k^T / sqrt(K)) v. Shape: (B,H,T,K), (B,H,S,K), (B,H,S,K) -> (B,H,T,K).

    Args:
        mask: bool, broadcastable to (B, H, T, S), True where a query may look; zeros for one that may look nowhere.
        causal: query t sees keys 0..t only (T = S). Excludes ``mask``.
        dropout_p: probability of dropping an attention weight; pass 0 when not training.
    """
    assert not (causal and mask is not None), "padding is on the right, so causal attention needs no mask"
    arguments = (q_BHTK, k_BHSK, v_BHSK, mask, causal, dropout_p)
    if _choice == "fused" or (_choice == "auto" and not _sdpa_serves(*arguments)):
        return attention_with_weights(*arguments)[0]
    if q_BHTK.device.type == "meta":
        planned: Tensor = _Planned.apply(q_BHTK, k_BHSK, v_BHSK)  # type: ignore[no-untyped-call]
        return planned
    return F.scaled_dot_product_attention(
        q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, is_causal=causal, dropout_p=dropout_p
    )


def attention_with_weights(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The same, and the weights, before dropout. Shape: -> (B,H,T,K), (B,H,T,S)"""
    # Scaled before the product, which in fp16 could overflow otherwise.
    scores_BHTS = torch.matmul(q_BHTK * q_BHTK.shape[-1] ** -0.5, k_BHSK.transpose(-1, -2))
    if causal:
        weights_BHTS = ops.scaled_causal_softmax(scores_BHTS, 1.0)
    else:
        weights_BHTS = ops.scaled_masked_softmax(scores_BHTS, mask, 1.0)
    return torch.matmul(ops.dropout(weights_BHTS, dropout_p, training=True), v_BHSK), weights_BHTS


def _sdpa_serves(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> bool:
    """Whether SDPA has more than its own three steps for this, which hold the weights and are not fused."""
    kind = kind_of(q)
    if kind == "cpu":
        return dropout_p == 0.0
    if q.device.type != "cuda":
        return True
    key = (q.dtype, q.shape[-1], mask is None, causal, dropout_p > 0.0, q.requires_grad)
    if key not in _served:
        backends = torch.backends.cuda
        asked = backends.SDPAParams(q, k, v, mask, dropout_p, causal, False)
        _served[key] = (
            backends.can_use_flash_attention(asked)
            or backends.can_use_efficient_attention(asked)
            or backends.can_use_cudnn_attention(asked)
        )
    return _served[key]


class _Planned(torch.autograd.Function):
    """For counting on the meta device: keeps and multiplies what a fused attention kernel does on a GPU."""

    @staticmethod
    def forward(ctx: Any, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor) -> Tensor:
        batch, heads, length, width = q_BHTK.shape
        # In the layout (B,T,H,K), as the kernels leave it, so that joining the heads copies nothing.
        out_BTHK = q_BHTK.new_empty(batch, length, heads, width)
        log_sums_BHT = q_BHTK.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(q_BHTK, k_BHSK, v_BHSK, out_BTHK, log_sums_BHT)
        _multiply(q_BHTK, k_BHSK, times=2)
        return out_BTHK.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q_BHTK, k_BHSK, v_BHSK, _, _ = ctx.saved_tensors
        _multiply(q_BHTK, k_BHSK, times=4)
        return torch.empty_like(q_BHTK), torch.empty_like(k_BHSK), torch.empty_like(v_BHSK)


def _multiply(q_BHTK: Tensor, k_BHSK: Tensor, times: int) -> None:
    """The work of so many products like q k^T, without their memory: a kernel never holds all weights."""
    terms = times * q_BHTK.numel() * k_BHSK.shape[2]
    one = q_BHTK.detach().new_empty(())
    torch.mm(one.expand(1, terms), one.expand(terms, 1))
