"""The state that a decoder keeps between two steps of a search.

The keys and values of self-attention stay where they were written. When a search copies and drops hypotheses, only
a small boolean table changes: for each hypothesis, the positions cached for its sentence that it descends from, by
which attention is masked. The many megabytes of a deep decoder's cache are moved only when sentences leave the
batch, or when most positions belong to dropped hypotheses alone. A state that does not grow, of a recurrent network
for example, is copied with its hypothesis.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, H heads, K head width, S source length, P cached
target positions of a sentence (those of all its hypotheses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_nmt.kernels.segments import Mask

_BLOCK = 64
"""Least number of positions by which a self-attention cache grows."""
_CROWDED = 64
"""Least number of positions of which dead ones, from which no hypothesis descends any more, are removed."""


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
        mask: of attention, bool (B,1,W,P); None if every hypothesis descends from all positions.
    """

    def __init__(self) -> None:
        self.sentences = 0
        self.positions = 0
        self._mask_RP = torch.empty(0, 0, dtype=torch.bool)
        self.mask: Tensor | None = None
        self._additive: dict[bool, tuple[Tensor, Tensor]] = {}
        self._crowded = _CROWDED

    def advance(self, rows: int, device: torch.device) -> None:
        """Add a position for each row, from which only that row descends."""
        if self.sentences == 0:
            self.sentences = rows
            self._mask_RP = torch.empty(rows, 0, dtype=torch.bool, device=device)
        own_WW = torch.eye(rows // self.sentences, dtype=torch.bool, device=device)
        self._mask_RP = torch.cat([self._mask_RP, own_WW.repeat(self.sentences, 1)], dim=1)
        self.positions = self._mask_RP.shape[1]
        # One hypothesis per sentence: greedy, or the first step. All cached positions are its own.
        one_each = rows == self.sentences
        self.mask = None if one_each else self._mask_RP.view(self.sentences, 1, -1, self.positions)

    def select(self, rows_R: Tensor, sentences: int) -> None:
        """Continue the hypotheses ``rows_R``."""
        self.sentences = sentences
        self._mask_RP = self._mask_RP.index_select(0, rows_R)

    def clear(self) -> Tensor | None:
        """Remove dead positions, if there are many and a quarter of them is dead.

        Return those that are kept of each sentence, (B,M), M the most that are alive in one; None if none is removed.
        """
        # On a GPU the host would have to wait for the number.
        if self.positions < self._crowded or self._mask_RP.device.type != "cpu":
            return None
        mask_BWP = self._mask_RP.view(self.sentences, -1, self.positions)
        alive_BP = mask_BWP.any(dim=1)
        most = int(alive_BP.sum(dim=1).max())
        self._crowded = max(_CROWDED, most + most // 2)
        if 4 * most > 3 * self.positions:
            return None
        kept_BM = alive_BP.int().argsort(dim=1, descending=True, stable=True)[:, :most].sort(dim=1).values
        kept_BWM = kept_BM.unsqueeze(1).expand(-1, mask_BWP.shape[1], -1)
        self._mask_RP = mask_BWP.gather(2, kept_BWM).flatten(0, 1)
        self.positions = most
        return kept_BM

    def additive(self, mask: Tensor, of_source: bool, dtype: torch.dtype) -> Tensor:
        """Return the bool mask of source or target as numbers to add to scores, made once for all layers."""
        known = self._additive.get(of_source)
        if known is None or known[0] is not mask:
            numbers = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            known = self._additive[of_source] = mask, numbers
        return known[1]


@dataclass(eq=False)
class SourceCache:
    """The keys and values of the source, one row per sentence for any beam, of all applications of a layer.

    They are None before the first step, or in a layer without cross-attention.
    """

    projected: KeysValues | None = None

    def of(self, project: Callable[[Tensor], KeysValues], memory_BSD: Tensor | None) -> KeysValues:
        """Return the keys and values, which the first call projects."""
        if self.projected is None:
            assert memory_BSD is not None
            self.projected = project(memory_BSD)
        return self.projected


class LayerCache:
    """The cache of one layer *application*: a layer that is applied twice has two.

    Attributes:
        source: keys and values of the source, shared by the applications of a layer.
        length: target positions of a hypothesis so far.
        state: of a layer whose state does not grow: tensors with a row for each hypothesis, (R,...); none before the
            first step, and none of a layer that caches keys and values.
    """

    def __init__(self, ancestry: Ancestry, source: SourceCache) -> None:
        self.source = source
        self.length = 0
        self.state: tuple[Tensor, ...] = ()
        self._ancestry = ancestry
        self._positions = 0
        self._buffer: Tensor | None = None  # keys and values, (2,B,H,P,K)

    def append(self, new: KeysValues) -> tuple[KeysValues, Tensor | None]:
        """Append the keys and values of the newest position of each hypothesis, (R,H,1,K).

        Return those of all positions of each sentence, (B,H,P,K), and a mask, bool (B,1,W,P), True where a hypothesis
        sees a position; None if it sees all.
        """
        rows, heads, length, width = new.keys.shape
        assert length == 1, "a decoder advances one position at a time"
        known, newest = self._advance(rows, heads, width, new.keys)
        for number, x in enumerate((new.keys, new.values)):
            newest[number] = x.view(self._ancestry.sentences, -1, heads, width).transpose(1, 2)
        return KeysValues(known[0], known[1]), self._ancestry.mask

    def append_joint(self, new_R1E: Tensor, width: int) -> tuple[KeysValues, Tensor | None]:
        """Append as :meth:`append` the keys of all heads, then the values, E = 2 H K; the mask has 0 or -inf."""
        rows, _, both = new_R1E.shape
        heads = both // (2 * width)
        known, newest = self._advance(rows, heads, width, new_R1E)
        newest.copy_(new_R1E.view(self._ancestry.sentences, -1, 2, heads, width).permute(2, 0, 3, 1, 4))
        mask = self._ancestry.mask
        additive = None if mask is None else self._ancestry.additive(mask, False, new_R1E.dtype)
        return KeysValues(known[0], known[1]), additive

    def advance(self, *state: Tensor) -> None:
        """Replace the :attr:`state` by that after the newest position."""
        self.state = state
        self.length += 1

    def additive(self, mask: Mask, dtype: torch.dtype) -> Tensor | None:
        """Return the source's mask, bool (B,1,1,S), as numbers to be added to scores; None for None."""
        if mask is None:
            return None
        assert isinstance(mask, Tensor), "a decoder that advances by positions reads padded sources"
        return self._ancestry.additive(mask, True, dtype)

    def select(self, sentences_B: Tensor) -> None:
        """Keep the sentences ``sentences_B`` of the target's part."""
        if self._buffer is not None:
            self._buffer = self._buffer.index_select(1, sentences_B)

    def keep(self, kept_BM: Tensor) -> None:
        """Keep these positions of each sentence. Shape: (B,M)."""
        if self._buffer is not None:
            _, _, heads, _, width = self._buffer.shape
            index = kept_BM[None, :, None, :, None].expand(2, -1, heads, -1, width)
            self._buffer = self._buffer.gather(3, index)
            self._positions = kept_BM.shape[1]

    def _advance(self, rows: int, heads: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Make room for a position of each hypothesis, in the device and dtype of ``like``.

        Return all keys and values, (2,B,H,P,K), and of them the newest, still to be written, (2,B,H,W,K).
        """
        if self._positions == self._ancestry.positions:  # The first layer of this step.
            self._ancestry.advance(rows, like.device)
        start, end = self._positions, self._ancestry.positions
        if self._buffer is None or end > self._buffer.shape[3]:
            sentences = self._ancestry.sentences
            larger = like.new_empty(2, sentences, heads, end + max(_BLOCK, end // 2), width)
            if self._buffer is not None:
                larger[:, :, :, :start] = self._buffer[:, :, :, :start]
            self._buffer = larger
        self._positions = end
        self.length += 1
        known = self._buffer[:, :, :, :end]
        return known, known[:, :, :, start:]


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
        for layer in self.layers:
            if layer.state:
                layer.state = tuple(x.index_select(0, rows_R) for x in layer.state)
        if sentences_B is not None:
            for layer in self.layers:
                layer.select(sentences_B)
            for source in self._sources:
                if source.projected is not None:
                    source.projected = source.projected.select(sentences_B)
        if self._ancestry.positions == 0:  # No layer has cached keys and values.
            return
        sentences = self._ancestry.sentences if sentences_B is None else sentences_B.shape[0]
        assert rows_R.shape[0] % sentences == 0, "every sentence must have equally many hypotheses"
        self._ancestry.select(rows_R, sentences)
        kept_BM = self._ancestry.clear()
        if kept_BM is not None:
            for layer in self.layers:
                layer.keep(kept_BM)
