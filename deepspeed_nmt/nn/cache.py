"""The state that a decoder keeps between two steps of a search.

The keys and values of self-attention stay where they were written. When a search copies and drops hypotheses, only a
small boolean table changes: for each hypothesis, the positions cached for its sentence that it descends from.
Attention masks a sentence's positions by that table. So the many megabytes of a deep decoder's cache are moved only
when sentences leave the batch, and the hypotheses of a sentence attend in one operation.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, H heads, K head width, S source length, P cached
target positions of a sentence (those of all its hypotheses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 64
"""Least number of positions by which a self-attention cache grows."""


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of one attention, each (B, H, S, K)."""

    keys: Tensor
    values: Tensor

    def select(self, sentences_B: Tensor) -> KeysValues:
        """Return those of some of the sentences, in the given order."""
        return KeysValues(self.keys.index_select(0, sentences_B), self.values.index_select(0, sentences_B))


class Ancestry:
    """The cached positions that each hypothesis descends from; all layers share it.

    Attributes:
        sentences: B; 0 before the first step, which has one row per sentence.
        positions: P.
    """

    def __init__(self) -> None:
        self.sentences = 0
        self.positions = 0
        self._mask_RP = torch.empty(0, 0, dtype=torch.bool)

    def advance(self, rows: int, device: torch.device) -> None:
        """Add a position for each row, from which only that row descends."""
        if self.sentences == 0:
            self.sentences = rows
            self._mask_RP = torch.empty(rows, 0, dtype=torch.bool, device=device)
        own_WW = torch.eye(rows // self.sentences, dtype=torch.bool, device=device)
        self._mask_RP = torch.cat([self._mask_RP, own_WW.repeat(self.sentences, 1)], dim=1)
        self.positions = self._mask_RP.shape[1]

    def select(self, rows_R: Tensor, sentences: int) -> None:
        """Continue the hypotheses ``rows_R``."""
        self.sentences = sentences
        self._mask_RP = self._mask_RP.index_select(0, rows_R)

    def mask(self) -> Tensor | None:
        """Return the mask for attention, bool (B,1,W,P); None if every hypothesis descends from all positions."""
        if self._mask_RP.shape[0] == self.sentences:
            # One hypothesis per sentence: greedy, or the first step. All cached positions are its own.
            return None
        return self._mask_RP.view(self.sentences, 1, -1, self.positions)


class SourceCache:
    """The source's part of a layer's cache; all applications of the layer share it.

    Attributes:
        projected: keys and values of the source, one row per sentence for any beam; None before the first step, or in
            a layer without cross-attention.
    """

    def __init__(self) -> None:
        self.projected: KeysValues | None = None

    def select(self, sentences_B: Tensor) -> None:
        """Keep the sentences ``sentences_B``."""
        if self.projected is not None:
            self.projected = self.projected.select(sentences_B)


class LayerCache:
    """The cache of one layer *application*: a layer that is applied twice has two.

    Args:
        ancestry: of the decoder, shared by its layers.
        source: of the layer, shared by its applications.

    Attributes:
        source: keys and values of the source.
        length: target positions of a hypothesis so far.
    """

    def __init__(self, ancestry: Ancestry, source: SourceCache) -> None:
        self.source = source
        self.length = 0
        self._ancestry = ancestry
        self._positions = 0
        self._buffer: KeysValues | None = None

    def append(self, new: KeysValues) -> tuple[KeysValues, Tensor | None]:
        """Append the keys and values of the newest position of each hypothesis.

        Returns:
            Keys and values of all positions of each sentence, and a mask, bool (B,1,W,P), True where a hypothesis
            sees a position; None if it sees all.

        Shape: (R,H,1,K) -> (B,H,P,K)
        """
        rows, heads, length, width = new.keys.shape
        assert length == 1, "a decoder advances one position at a time"
        if self._positions == self._ancestry.positions:  # The first layer of this step.
            self._ancestry.advance(rows, new.keys.device)
        start, end = self._positions, self._ancestry.positions
        if self._buffer is None or end > self._buffer.keys.shape[2]:
            self._grow(new.keys, end)
        assert self._buffer is not None
        keys, values = self._buffer.keys[:, :, :end], self._buffer.values[:, :, :end]
        sentences = self._ancestry.sentences
        keys[:, :, start:] = new.keys.view(sentences, -1, heads, width).transpose(1, 2)
        values[:, :, start:] = new.values.view(sentences, -1, heads, width).transpose(1, 2)
        self._positions = end
        self.length += 1
        return KeysValues(keys, values), self._ancestry.mask()

    def select(self, sentences_B: Tensor) -> None:
        """Keep the sentences ``sentences_B`` of the target's part."""
        if self._buffer is not None:
            self._buffer = self._buffer.select(sentences_B)

    def _grow(self, like: Tensor, end: int) -> None:
        capacity = end + max(_BLOCK, end // 2)
        _, heads, _, width = like.shape
        keys, values = (like.new_empty(self._ancestry.sentences, heads, capacity, width) for _ in range(2))
        if self._buffer is not None:
            keys[:, :, : self._positions] = self._buffer.keys[:, :, : self._positions]
            values[:, :, : self._positions] = self._buffer.values[:, :, : self._positions]
        self._buffer = KeysValues(keys, values)


class DecoderCache:
    """The cache of a whole decoder: one :class:`LayerCache` per layer application.

    The first step takes one row per sentence; :meth:`select` widens them to several.

    Args:
        stacks: for each stack of the decoder, the indices of its layers in order of application.
    """

    def __init__(self, *stacks: Sequence[int]) -> None:
        self._ancestry = Ancestry()
        self._sources: list[SourceCache] = []
        self.layers: list[LayerCache] = []
        for indices in stacks:
            of_layer = {index: SourceCache() for index in indices}
            self._sources += of_layer.values()
            self.layers += [LayerCache(self._ancestry, of_layer[index]) for index in indices]

    @property
    def length(self) -> int:
        """Target positions of a hypothesis so far."""
        return self.layers[0].length if self.layers else 0

    def select(self, rows_R: Tensor, sentences_B: Tensor | None) -> None:
        """Continue the hypotheses ``rows_R``: some may be dropped, some continued several times.

        Args:
            rows_R: rows of the last step, those of a sentence adjacent and equally many for each sentence.
            sentences_B: the sentences of the last step to which they belong, in this order; None: all of them.
        """
        if self._ancestry.positions == 0:  # Nothing is cached yet.
            return
        sentences = self._ancestry.sentences if sentences_B is None else sentences_B.shape[0]
        assert rows_R.shape[0] % sentences == 0, "every sentence must have equally many hypotheses"
        self._ancestry.select(rows_R, sentences)
        if sentences_B is not None:
            for layer in self.layers:
                layer.select(sentences_B)
            for source in self._sources:
                source.select(sentences_B)
