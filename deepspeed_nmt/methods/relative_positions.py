"""Relative positions: self-attention sees the distance between two positions, and tokens have no absolute ones.

Shaw, Uszkoreit, Vaswani: "Self-Attention with Relative Position Representations", 2018. In each self-attention, of
encoder and decoder, learned vectors (edges) for the distances up to k, further ones clipped, are added to keys and
values; K is the width of a head:

    e_ij = q_i (k_j + a^K_d)^T / sqrt(K),    z_i = sum_j softmax_j(e_ij) (v_j + a^V_d),    d = clip(j - i, -k, k).

The edges are those of a layer, shared by its heads, or each head has its own. With k = 0 all distances are one.
Initialisation is Glorot uniform, as in tensor2tensor.

Legend: B sentences, T queries, S keys, D model width, H heads, K head width, W hypotheses of a sentence, N = 2 k + 1
distances, E = H, or 1 if the heads share their edges.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.parts import MAX_INNER_WIDTH
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.segments import Mask, SegmentPair, attention_by_rows
from deepspeed_nmt.methods.stabilisers import Norm
from deepspeed_nmt.methods.transformer import SMALL, Side, TransformerShape, build_transformer
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues
from deepspeed_nmt.nn.embedding import PositionName
from deepspeed_nmt.registry import Entry, SelfTest

Edges = Literal["layer", "head"]


class RelativePositionsConfig(TransformerShape):
    """Settings of a Transformer with relative positions."""

    name: Literal["relative_positions"] = "relative_positions"
    clip_distance: int = Field(default=16, ge=0, le=MAX_INNER_WIDTH, description="largest distance that counts (k)")
    edges: Edges = Field(default="layer", description="vectors of distances: of a layer, or of each of its heads")
    positions: PositionName = Field(default="none", description="absolute positions besides; none in the paper")

    known_norms: ClassVar[frozenset[str]] = frozenset(get_args(Norm))
    shape_fields: ClassVar[frozenset[str]] = TransformerShape.shape_fields | {"clip_distance", "edges"}

    @override
    def self_attention(self, side: Side) -> Callable[..., MultiHeadAttention]:
        return partial(
            RelativeAttention,
            clip_distance=self.clip_distance,
            of_heads=self.edges == "head",
            in_decoder=side == "decoder",
        )


class RelativeAttention(MultiHeadAttention):
    """Self-attention with relative positions.

    Attributes:
        key_edges: a^K, (E,N,K).
        value_edges: a^V, (E,N,K).
    """

    is_relative = True

    def __init__(
        self, dim: int, num_heads: int, dropout_p: float, *, clip_distance: int, of_heads: bool, in_decoder: bool
    ) -> None:
        super().__init__(dim, num_heads, dropout_p)
        self.clip_distance, self.of_heads, self.in_decoder = clip_distance, of_heads, in_decoder
        shape = num_heads if of_heads else 1, 2 * clip_distance + 1, self.head_dim
        self.key_edges, self.value_edges = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        for edges_NK in (*self.key_edges, *self.value_edges):
            nn.init.xavier_uniform_(edges_NK)

    @override
    def own_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        edges = [self.key_edges, self.value_edges]
        return (edges, []) if self.of_heads else ([], edges)

    @override
    def attend(self, query_BTD: Tensor, memory: KeysValues, mask: Mask, causal: bool) -> Tensor:
        arguments = self._split(query_BTD), memory.keys, memory.values
        dropout_p = self.dropout_p if self.training else 0.0
        if isinstance(mask, SegmentPair):
            attended_BHTK = attention_by_rows(*arguments, mask, causal, dropout_p, self._attend_rows)
        else:
            attended_BHTK = self._attend_rows(*arguments, mask, causal, dropout_p)
        return attended_BHTK.transpose(1, 2).flatten(2)

    def _attend_rows(
        self, q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, mask: Tensor | None, causal: bool, dropout_p: float
    ) -> Tensor:
        queries, keys = q_BHTK.shape[2], k_BHSK.shape[2]
        place_S = torch.arange(keys, device=q_BHTK.device)
        if not self.in_decoder or causal:  # whole sentences
            distances, axes = place_S - place_S[:queries, None], "ts"
        elif mask is None:  # the newest position, of the only hypothesis
            distances, axes = place_S[None] - (keys - 1), "ts"
        else:  # the newest position of each hypothesis, whose positions are the keys that it sees, in order
            seen_BWS = mask[:, 0].cumsum(dim=-1)
            distances, axes = seen_BWS - seen_BWS[..., -1:], "bts"
        axes += "hk" if self.of_heads else "k"
        key_edges, value_edges = (self._look_up(edges, distances) for edges in (self.key_edges, self.value_edges))
        # Scaled before the products, which in fp16 could overflow otherwise.
        q_BHTK = q_BHTK * self.head_dim**-0.5
        scores_BHTS = torch.matmul(q_BHTK, k_BHSK.transpose(2, 3))
        scores_BHTS = scores_BHTS + torch.einsum(f"bhtk,{axes}->bhts", q_BHTK, key_edges)
        weights_BHTS = torch_ops.dropout(self.kernels.softmax(scores_BHTS, mask, causal, 1.0), dropout_p)
        attended_BHTK = torch.matmul(weights_BHTS, v_BHSK)
        return attended_BHTK + torch.einsum(f"bhts,{axes}->bhtk", weights_BHTS, value_edges)

    def _look_up(self, edges_ENK: Tensor, distances: Tensor) -> Tensor:
        """Return the edges of distances. Shape: (E,N,K), (...) -> (...,H,K), or (...,K) if heads share them."""
        if not self.of_heads:
            edges_ENK = self.ranks.copy(edges_ENK)
        index = distances.clamp(-self.clip_distance, self.clip_distance) + self.clip_distance
        found = F.embedding(index, edges_ENK.transpose(0, 1).flatten(1))
        return found.view(*found.shape[:-1], -1, self.head_dim) if self.of_heads else found


ENTRY = Entry(
    "relative_positions",
    RelativePositionsConfig,
    build_transformer,
    SelfTest(
        "relative_positions",
        {"model": {"name": "relative_positions", **SMALL, "norm": "post", "clip_distance": 3}},
    ),
)
