"""Sentences end to end in one row of tokens, and attention within each of them.

Everything but attention works on tokens, whatever sentence they belong to. The rest of a row, its *tail*, which may
be empty, fills it to a constant size: it counts for nothing, and no gradient comes from it.

Attention within sentences is computed by kernels that read cumulative lengths where :func:`has_varlen` says so:
FlashAttention, or on a GPU older than sm_80 torch's memory-efficient attention. Elsewhere it is computed by rows:
queries and keys are copied into a padded row for each sentence, and the results copied back. That works on every
device, and is the reference for tests.

Legend: P rows, B sentences, N positions of a row, L positions of the longest sentence, H heads, K head width,
M positions of the keys' row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_nmt.kernels.precision import SM_80, capability_of

_FLASH_WIDTH, _EFFICIENT_WIDTH = 256, 128
"""Widest heads of the kernels; the memory-efficient one is slow for wider ones, whose sums leave its registers."""


@dataclass(frozen=True)
class Segments:
    """The bounds of the sentences in a row. All rows of a tensor have the same.

    Attributes:
        starts: position of the first token of each sentence, of the tail, and after the last; int32 (B + 2,).
        positions: place of each token in its sentence, from 0; int64 (N,).
        longest: L.
        widest: bound on the number of tokens of every sentence and of the tail; a power of two, so that there are few
            values of it.
    """

    starts: Tensor
    positions: Tensor
    longest: int
    widest: int
    _bounds: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int] | NDArray[np.int64], size: int) -> Segments:
        """Return the segments of a row of ``size`` tokens, the first of which are sentences of these lengths."""
        numbers = np.asarray(lengths, dtype=np.int64)
        total, longest = int(numbers.sum()), int(numbers.max())
        assert total <= size
        numbers = np.append(numbers, size - total)
        ends = np.cumsum(numbers)
        starts = np.concatenate([[0], ends]).astype(np.int32)
        positions = np.arange(size) - np.repeat(ends - numbers, numbers)
        # The tail's positions only have to exist.
        positions[total:] %= longest
        widest = 1 << (max(longest, size - total) - 1).bit_length()
        return cls(torch.from_numpy(starts), torch.from_numpy(positions), longest, widest)

    def __len__(self) -> int:
        return self.starts.shape[0] - 2

    def to(self, device: torch.device, non_blocking: bool = False) -> Segments:
        """Copy the segments to another device, as :meth:`torch.Tensor.to`."""
        starts, positions = (x.to(device, non_blocking=non_blocking) for x in (self.starts, self.positions))
        return Segments(starts, positions, self.longest, self.widest)

    @cached_property
    def real_positions(self) -> Tensor:
        """Bool, True for the positions of a padded row that its sentence has. Shape: -> (B,L)."""
        lengths_B = self.starts[1:-1] - self.starts[:-2]
        return torch.arange(self.longest, device=self.starts.device) < lengths_B.unsqueeze(1)

    def to_rows(self, x: Tensor, dim: int) -> Tensor:
        """Copy tokens into a padded row for each sentence; padding repeats the tokens that follow.

        Shape: (..., N, ...) -> (..., B, L, ...), with N at dimension ``dim``
        """
        rows = x.index_select(dim, self._token_of_place.flatten())
        return rows.view(*x.shape[:dim], *self._token_of_place.shape, *x.shape[dim + 1 :])

    def from_rows(self, x: Tensor, dim: int) -> Tensor:
        """Copy padded rows back into one row of tokens, the reverse of :meth:`to_rows`; the tail repeats a token.

        Shape: (..., B, L, ...) -> (..., N, ...), with B at dimension ``dim``
        """
        return x.flatten(dim, dim + 1).index_select(dim, self._place_of_token)

    def heads_to_rows(self, x_PHNK: Tensor) -> Tensor:
        """Copy queries, keys or values into a padded row for each sentence. Shape: (P,H,N,K) -> (P B,H,L,K)."""
        return self.to_rows(x_PHNK, 2).transpose(1, 2).flatten(0, 1)

    def sums(self, x_ND: Tensor, counted_N: Tensor) -> Tensor:
        """Sum the tokens of each sentence that count, those of the tail never; rows would take far more memory.

        Shape: (N,D), bool (N,) -> (B,D)
        """
        sentence_N = torch.where(counted_N, self._sentence_of_token, len(self))
        return x_ND.new_zeros(len(self) + 1, x_ND.shape[1]).index_add(0, sentence_N, x_ND)[:-1]

    def bounds(self, rows: int) -> Tensor:
        """Return the first position of each sentence and tail of P equal rows, end to end, and after the last.

        Shape: -> int32 (P (B + 1) + 1,)
        """
        if rows == 1:
            return self.starts
        if rows in self._bounds:
            return self._bounds[rows]
        size = self.positions.shape[0]
        first_P1 = torch.arange(rows, dtype=torch.int32, device=self.starts.device).unsqueeze(1) * size
        bounds = torch.cat([(first_P1 + self.starts[:-1]).flatten(), self.starts[-1:] * rows])
        if not torch.compiler.is_compiling():  # compiled code cannot keep them, and computes them in one kernel
            self._bounds[rows] = bounds
        return bounds

    @cached_property
    def _token_of_place(self) -> Tensor:
        """Position in the row of each position of the padded rows."""
        steps = torch.arange(self.longest, device=self.starts.device)
        return (self.starts[:-2].long().unsqueeze(1) + steps).clamp(max=self.positions.shape[0] - 1)

    @cached_property
    def _place_of_token(self) -> Tensor:
        """Position in the padded rows, end to end, of each position of the row."""
        sentence_N = self._sentence_of_token
        place_N = sentence_N * self.longest + self.positions
        return torch.where(sentence_N < len(self), place_N, 0)

    @cached_property
    def _sentence_of_token(self) -> Tensor:
        """Number of the sentence of each position of the row; B in the tail."""
        tokens = torch.arange(self.positions.shape[0], device=self.starts.device, dtype=self.starts.dtype)
        return torch.searchsorted(self.starts[1:-1], tokens, right=True)


class SegmentPair(NamedTuple):
    """The sentences of queries and keys, equally many. Each query sees the keys of its own sentence."""

    queries: Segments
    keys: Segments

    def row_mask(self, rows: int) -> Tensor:
        """Return the mask of keys in padded rows, for the sentences of P ``rows``. Shape: -> bool (P B,1,1,S)."""
        return self.keys.real_positions[:, None, None, :].repeat(rows, 1, 1, 1)


Mask = Tensor | SegmentPair | None
"""Keys that attention sees: bool, broadcastable to (B,H,T,S), True where a query sees a key; or those of the same
sentence; None: all."""
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, float], Tensor]
"""Attention over padded rows, of (queries, keys, values, mask, causal, dropout_p)."""


def mask_between(queries: Segments | None, keys: Tensor | Segments | None) -> Mask:
    """Return the mask for attention; in the padded layout ``queries`` are None, and ``keys`` a bool mask or None."""
    if not isinstance(keys, Segments):
        return keys
    assert queries is not None, "queries and keys must have the same layout"
    return SegmentPair(queries, keys)


def attention_by_rows(
    q_PHNK: Tensor,
    k_PHMK: Tensor,
    v_PHMK: Tensor,
    pair: SegmentPair,
    causal: bool,
    dropout_p: float,
    attention: Attention,
) -> Tensor:
    """Compute attention within sentences, each in a padded row; if ``causal``, both have the same sentences.

    Shape: (P,H,N,K), (P,H,M,K), (P,H,M,K) -> (P,H,N,K)
    """
    rows, heads, _, width = q_PHNK.shape
    # Sources are padded on the right, so that causal attention sees no padding.
    mask_XHTS = None if causal else pair.row_mask(rows)
    q_XHLK = pair.queries.heads_to_rows(q_PHNK)
    k_XHSK, v_XHSK = (pair.keys.heads_to_rows(x) for x in (k_PHMK, v_PHMK))
    out_XHLK = attention(q_XHLK, k_XHSK, v_XHSK, mask_XHTS, causal, dropout_p)
    out_PHBLK = out_XHLK.view(rows, len(pair.queries), heads, -1, width).transpose(1, 2)
    return pair.queries.from_rows(out_PHBLK, 2)


def attention_by_varlen(
    q_PHNK: Tensor, k_PHMK: Tensor, v_PHMK: Tensor, pair: SegmentPair, causal: bool, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention within sentences by a kernel for them; arguments are those of :func:`attention_by_rows`.

    torch's operators are called themselves, which have derivatives: ``varlen_attn``, a custom operator in Python
    around one of them, takes 100 us more of the host for each attention.
    """
    rows, heads, size, width = q_PHNK.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_PHNK, k_PHMK, v_PHMK))
    bounds_q, bounds_k = (side.bounds(rows) for side in pair)
    longest_q, longest_k = (side.widest for side in pair)
    if is_flash(q.device):
        out = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout_p, causal, False
        )[0]
    else:
        # Its backward pass refuses a bound above the length of the row.
        longest_q, longest_k = min(longest_q, q.shape[0]), min(longest_k, k.shape[0])
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        has_gradient = torch.is_grad_enabled()
        out = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, bounds_q, bounds_k, longest_q, longest_k, dropout_p, int(causal), has_gradient
        )[0]
    return out.view(rows, size, heads, width).transpose(1, 2)  # type: ignore[no-any-return]


def has_varlen(x: Tensor) -> bool:
    """Return True if :func:`attention_by_varlen` supports such queries of (..., K) on their device."""
    if x.device.type != "cuda" or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    return x.shape[-1] % 8 == 0 and x.shape[-1] <= (_FLASH_WIDTH if is_flash(x.device) else _EFFICIENT_WIDTH)


def is_flash(device: torch.device) -> bool:
    """Return True if :func:`attention_by_varlen` is FlashAttention on a device, and memory-efficient otherwise."""
    capability = capability_of(device)
    return capability is not None and capability >= SM_80
