"""Multi-head attention.

Legend: B sentences, T queries, S keys, D model width, H heads, K head width, R rows = B x beam.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels.choice import UsesKernels
from deepspeed_nmt.kernels.segments import Mask, SegmentPair
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.linear import Linear, Product, Sliceable, project


class MultiHeadAttention(nn.Module, UsesKernels, Sliceable):
    """Attention(Q, K, V) with H heads (Vaswani et al. 2017, 3.2.2).

    The key projection has no bias: the same vector added to all keys shifts a query's scores by a constant, which the
    softmax removes, so the gradient of that bias would be rounding noise.

    The number of heads is read from the tensors (``view(..., -1, head_dim)``), so a rank that holds some of the heads
    runs the same code.

    Attributes:
        is_relative: True if ``key_edges`` and ``value_edges``, (H or 1, 2 k + 1, K), of the distances up to k between
            query and key are added to keys and values (Shaw, Uszkoreit, Vaswani 2018).
    """

    is_relative: ClassVar[bool] = False

    def __init__(self, dim: int, num_heads: int, dropout_p: float = 0.0) -> None:
        super().__init__()
        assert dim % num_heads == 0
        self.head_dim = dim // num_heads
        self.dropout_p = dropout_p
        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, dim, bias=False)
        self.v_proj = Linear(dim, dim)
        self.out_proj = Linear(dim, dim)

    def forward(
        self,
        query_BTD: Tensor,
        memory: Tensor | KeysValues,
        mask: Mask = None,
        causal: bool = False,
        cache: LayerCache | None = None,
        added_BTD: Tensor | None = None,
    ) -> Product:
        """Attend, over whole sentences or from one position of each hypothesis.

        Args:
            memory: states to attend to, (B,S,D), the same object for self-attention; or what :meth:`project` returned
                for them.
            mask: bool (B,1,1,S), True for keys that are not padding; or the sentences in which queries see keys; None
                when all are seen.
            causal: position t sees positions 0..t only, of its sentence.
            cache: in self-attention, when decoding position by position: keeps keys and values, and knows which of
                them a hypothesis sees.
            added_BTD: added to the outputs of the heads, concatenated.

        Shape: (B,T,D), (B,S,D) -> (B,T,D), or (R,1,D) -> (R,1,D)
        """
        heads_BTD = self.heads(query_BTD, memory, mask, causal, cache)
        return self.out_proj.product(heads_BTD if added_BTD is None else heads_BTD + added_BTD)

    def heads(
        self,
        query_BTD: Tensor,
        memory: Tensor | KeysValues,
        mask: Mask,
        causal: bool,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Compute the outputs of all heads, concatenated; arguments are those of :meth:`forward`."""
        if memory is query_BTD:
            copied_BTD = self.ranks.copy(query_BTD)
            keys_BTD, values_BTD, query_BTD = project(copied_BTD, self.k_proj, self.v_proj, self.q_proj)
            memory = KeysValues(self._split(keys_BTD), self._split(values_BTD))
        else:
            memory = memory if isinstance(memory, KeysValues) else self.project(memory)
            query_BTD = self.q_proj(self.ranks.copy(query_BTD))
        if cache is not None:
            memory, mask = cache.append(memory)
        rows, length, dim = query_BTD.shape
        sentences = memory.keys.shape[0]
        if rows != sentences:  # nothing is copied for each hypothesis
            query_BTD = query_BTD.reshape(sentences, rows // sentences * length, dim)
        with self.ranks.drawing(self.dropout_p if self.training else 0.0):
            attended = self.attend(query_BTD, memory, mask, causal and cache is None)
        return attended.reshape(rows, length, -1)

    def attend(self, query_BTD: Tensor, memory: KeysValues, mask: Mask, causal: bool) -> Tensor:
        """Attend from projected queries of all heads; to be overridden by other kinds of attention.

        Shape: (B,T,D), (B,H,S,K) -> (B,T,D)
        """
        dropout_p = self.dropout_p if self.training else 0.0
        query_BHTK = self._split(query_BTD)
        attended_BHTK = self.kernels.attention(query_BHTK, memory.keys, memory.values, mask, causal, dropout_p)
        return attended_BHTK.transpose(1, 2).flatten(2)

    def own_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters of a kind of attention besides the projections: those of heads, (H, ...), and others.

        An attention passes the latter through ``self.ranks.copy`` before it uses them.
        """
        return [], []

    def project(self, memory_BSD: Tensor) -> KeysValues:
        """Project the states to attend to, for any number of calls. Shape: (B,S,D) -> two of (B,H,S,K)."""
        return KeysValues(*map(self._split, project(self.ranks.copy(memory_BSD), self.k_proj, self.v_proj)))

    def weights(self, query_BTD: Tensor, memory: Tensor | KeysValues, mask: Mask = None) -> Tensor:
        """Compute the attention weights of whole sentences before dropout, as the mean of the heads of all ranks.

        Packed sentences have a padded row each; what padding attends to is arbitrary.

        Shape: (B,T,D), (B,S,D) -> fp32 or wider (B,T,S)
        """
        keys_BHSK = (memory if isinstance(memory, KeysValues) else self.project(memory)).keys
        query_BHTK = self._split(self.q_proj(self.ranks.copy(query_BTD)))
        if isinstance(mask, SegmentPair):
            query_BHTK, keys_BHSK = mask.queries.heads_to_rows(query_BHTK), mask.keys.heads_to_rows(keys_BHSK)
            mask = mask.row_mask(query_BTD.shape[0])
        scores_BHTS = torch.matmul(query_BHTK, keys_BHSK.transpose(2, 3))
        wide = torch.promote_types(scores_BHTS.dtype, torch.float32)
        scores_BHTS = scores_BHTS.to(wide) / math.sqrt(self.head_dim)
        if isinstance(mask, Tensor):
            scores_BHTS = scores_BHTS.masked_fill(~mask, -torch.inf)
        return self.ranks.mean(scores_BHTS.softmax(dim=3).mean(dim=1))

    def _split(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        return x_BTD.view(batch, length, -1, self.head_dim).transpose(1, 2)
