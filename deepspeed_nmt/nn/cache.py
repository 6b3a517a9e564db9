"""The state that a decoder keeps between two steps of a search.

The keys and values of self-attention stay where they were written. When a search copies and drops hypotheses, only
a small boolean table changes: for each hypothesis, the positions cached for its sentence that it descends from, by
which attention is masked. The many megabytes of a deep decoder's cache are moved only when sentences leave the
batch, or when most positions belong to dropped hypotheses alone. Native code looks up the places of sentences, so for
it they are moved only when half of the sentences have left. A state that does not grow, of a recurrent network for
example, is copied with its hypothesis.

If there is one hypothesis of each sentence, the lower layers may be some positions ahead. The upper ones then read
these as a block: its positions are rows, each of which sees those before it. The table also says which positions of a
block a sentence has dropped again.

Legend: B sentences, W hypotheses of a sentence or positions of a block, R rows = B x W, H heads, K head width,
S source length, P cached target positions of a sentence (those of all its hypotheses).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_nmt.native.decoder import BoundLayers, Past, Source

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
        places_B: places of the sentences in the caches of all layers; None: the first ones, in order.
        mask: of attention, bool (B,1,W,P); None if every hypothesis descends from all positions.
    """

    def __init__(self) -> None:
        self.sentences = 0
        self.positions = 0
        self.places_B: Tensor | None = None
        self.mask: Tensor | None = None
        self._mask_RP: Tensor | None = None  # None as for `mask`
        self._own_RW = torch.empty(0, 0, dtype=torch.bool)
        self._device = torch.device("cpu")
        self._crowded = _CROWDED
        self._past: Past | None = None

    def past(self, rows: int, places: int, capacity: int) -> Past:
        """Return what native code needs to know of this step; the arguments are equal for all layers."""
        if self._past is None:
            of_sentences = self.sentences, rows, self.positions, self.mask, self.places_B
            self._past = Past(*of_sentences, places, capacity)
        return self._past

    def next(self, rows: int, bound: BoundLayers) -> tuple[Past, Tensor | None]:
        """Return what layers need to know of their next step, without a mask, and what is seen before it, (R,P)."""
        width = rows // self.sentences
        of_sentences = self.sentences, rows, self.positions + width, None, self.places_B
        return Past(*of_sentences, bound.places, bound.capacity), self._mask_RP

    def take(self, positions: int, mask_RP: Tensor | None) -> None:
        """Add positions that native code has written, given what is seen after them."""
        self.positions, self._mask_RP, self.mask, self._past = self.positions + positions, mask_RP, None, None

    def advance(self, rows: int, device: torch.device) -> None:
        """Add a position for each row, from which only that row descends."""
        self.mask = self._past = None
        self.sentences, self._device = self.sentences or rows, device
        width = rows // self.sentences
        self.positions += width
        if self._mask_RP is None and width == 1:  # greedy, or the first step
            return
        if self._own_RW.shape != (rows, width):
            self._own_RW = torch.eye(width, dtype=torch.bool, device=device).repeat(self.sentences, 1)
        before_RP = self._before(rows, self.positions - width)
        self._mask_RP = torch.cat([before_RP, self._own_RW], dim=1)
        self.mask = self._mask_RP.view(self.sentences, 1, -1, self.positions)

    def as_block(self, width: int) -> None:
        """Let the newest ``width`` positions of each sentence be rows, each of which sees those before it."""
        self._past = None
        if width > 1:
            before_BP = self._before(self.sentences, self.positions)
            mask_BWP = before_BP.unsqueeze(1).repeat(1, width, 1)
            mask_BWP[:, :, self.positions - width :].tril_()
            self.mask = mask_BWP.unsqueeze(1)

    def keep_first(self, counts: Sequence[int], width: int) -> None:
        """Drop all but the first positions of a block of each sentence."""
        start, most = self.positions - width, max(counts)
        if min(counts) < most or self._mask_RP is not None:
            counts_B1 = torch.tensor(counts, device=self._device).unsqueeze(1)
            self._mask_RP = self._before(len(counts), self.positions)[:, : start + most]
            self._mask_RP[:, start:] = torch.arange(most, device=self._device) < counts_B1
        self.positions, self._past = start + most, None

    def _before(self, rows: int, positions: int) -> Tensor:
        """Return the positions from which each row descends, which are all if nothing else is known."""
        if self._mask_RP is not None:
            return self._mask_RP
        return torch.ones(rows, positions, dtype=torch.bool, device=self._device)

    def settle(self) -> None:
        """Give the sentences the first places."""
        self.places_B = self._past = None

    def select(self, rows_R: Tensor, sentences: int) -> None:
        """Continue the hypotheses ``rows_R``."""
        self.sentences = sentences
        if self._mask_RP is not None:
            self._mask_RP = self._mask_RP.index_select(0, rows_R)

    def clear(self) -> Tensor | None:
        """Remove dead positions, if there are many and a quarter of them is dead.

        Return those that are kept of each sentence, (B,M), M the most that are alive in one; None if none is removed.
        """
        # On a GPU the host would have to wait for the number.
        if self._mask_RP is None or self.positions < self._crowded or self._device.type != "cpu":
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


@dataclass(eq=False)
class SourceCache:
    """The keys and values of the source, one row per sentence for any beam, of all applications of a layer.

    Attributes:
        settle: moves the sentences of all caches to the first places; see :class:`Ancestry`.
        projected: None before the first step, or in a layer without cross-attention.
        native: the same for native code, once it has been made.
    """

    settle: Callable[[], None]
    projected: KeysValues | None = None
    native: Source | None = None

    def of(self, project: Callable[[Tensor], KeysValues], memory_BSD: Tensor | None) -> KeysValues:
        """Return the keys and values of the sentences, which the first call projects."""
        self.settle()
        return self.of_places(project, memory_BSD)

    def of_places(self, project: Callable[[Tensor], KeysValues], memory_BSD: Tensor | None) -> KeysValues:
        """Return the keys and values of all places, which the first call projects."""
        if self.projected is None:
            assert memory_BSD is not None
            self.projected = project(memory_BSD)
        return self.projected

    def select(self, sentences_B: Tensor) -> None:
        """Keep the sentences ``sentences_B``."""
        if self.projected is not None:
            self.projected = self.projected.select(sentences_B)


class LayerCache:
    """The cache of one layer *application*: a layer that is applied twice has two.

    Attributes:
        source: keys and values of the source, shared by the applications of a layer.
        length: target positions of a hypothesis so far.
        state: of a layer whose state does not grow: tensors with a row for each hypothesis, (R,...); none before the
            first step, and none of a layer that caches keys and values.
        bound: this layer and those above it, as native code has last applied them in one call.
    """

    def __init__(self, ancestry: Ancestry, source: SourceCache) -> None:
        self.source = source
        self.length = 0
        self.state: tuple[Tensor, ...] = ()
        self.bound: BoundLayers | None = None
        self._ancestry = ancestry
        self._positions = 0
        self._buffer: Tensor | None = None  # keys and values, (2,N,H,C,K)

    def append(self, new: KeysValues) -> tuple[KeysValues, Tensor | None]:
        """Append the keys and values of the newest position of each hypothesis, (R,H,1,K).

        Return those of all positions of each sentence, (B,H,P,K), and a mask, bool (B,1,W,P), True where a hypothesis
        sees a position; None if it sees all.
        """
        rows, heads, length, width = new.keys.shape
        assert length == 1, "a decoder advances one position at a time"
        self.source.settle()
        buffer, sentences = self.reserve(rows, heads, width, new.keys), self._ancestry.sentences
        known = buffer[:, :, :, : self._positions]
        newest = known[:, :, :, self._positions - rows // sentences :]
        for number, x in enumerate((new.keys, new.values)):
            newest[number] = x.view(sentences, -1, heads, width).transpose(1, 2)
        return KeysValues(known[0], known[1]), self._ancestry.mask

    def past(self, rows: int, buffer: Tensor) -> Past:
        """Return what the hypotheses see in this step, given what :meth:`reserve` has returned."""
        return self._ancestry.past(rows, *buffer.shape[1:4:2])

    def advance(self, *state: Tensor) -> None:
        """Replace the :attr:`state` by that after the newest position."""
        self.state = state
        self.length += 1

    def select(self, sentences_B: Tensor) -> None:
        """Keep the sentences ``sentences_B`` of the target's part."""
        if self._buffer is not None:
            self._buffer = self._buffer.index_select(1, sentences_B)

    def cut(self, positions: int) -> None:
        """Forget all but the first positions."""
        self._positions = positions

    def keep(self, kept_BM: Tensor) -> None:
        """Keep these positions of each sentence. Shape: (B,M)."""
        if self._buffer is not None:
            _, _, heads, _, width = self._buffer.shape
            index = kept_BM[None, :, None, :, None].expand(2, -1, heads, -1, width)
            self._buffer = self._buffer.gather(3, index)
            self._positions = kept_BM.shape[1]

    def reserve(self, rows: int, heads: int, width: int, like: Tensor) -> Tensor:
        """Make room for a position of each hypothesis, still to be written, in the device and dtype of ``like``.

        Return keys and values in N places for sentences and C positions, (2,N,H,C,K).
        """
        if self._positions == self._ancestry.positions:  # The first layer of this step.
            self._ancestry.advance(rows, like.device)
        buffer = self._room(self._ancestry.positions, heads, width, like)
        self._positions = self._ancestry.positions
        self.length += 1
        return buffer

    def reserve_positions(self, more: int, sentences: int, heads: int, width: int, like: Tensor) -> Tensor:
        """Make room for so many positions more of each sentence, which are not written yet; see :meth:`take`."""
        self._ancestry.sentences = sentences
        return self._room(self._ancestry.positions + more, heads, width, like)

    def take(self, steps: int) -> None:
        """Keep the positions of some steps that native code has written."""
        self._positions = self._ancestry.positions
        self.length += steps

    def _room(self, end: int, heads: int, width: int, like: Tensor) -> Tensor:
        if self._buffer is None or end > self._buffer.shape[3]:
            self.source.settle()
            sentences, start = self._ancestry.sentences, self._positions
            larger = like.new_empty(2, sentences, heads, end + max(_BLOCK, end // 2), width)
            if self._buffer is not None:
                larger[:, :, :, :start] = self._buffer[:, :, :, :start]
            self._buffer = larger
        return self._buffer


class DecoderCache:
    """The cache of a whole decoder: one :class:`LayerCache` per layer application.

    The first step takes one row per sentence; :meth:`select` widens them to several.

    Args:
        stacks: for each stack of the decoder, the indices of its layers in order of application.
    """

    def __init__(self, *stacks: Sequence[int]) -> None:
        self._ancestry = Ancestry()
        self._places = 0
        self._sources: list[SourceCache] = []
        self.layers: list[LayerCache] = []
        for indices in stacks:
            of_layer = {index: SourceCache(self._settle) for index in indices}
            self._sources += of_layer.values()
            self.layers += [LayerCache(self._ancestry, of_layer[index]) for index in indices]

    @property
    def length(self) -> int:
        """Target positions of a hypothesis so far."""
        return self.layers[0].length if self.layers else 0

    def next(self, rows: int, bound: BoundLayers) -> tuple[Past, Tensor | None]:
        """Return what :meth:`Ancestry.next` does."""
        return self._ancestry.next(rows, bound)

    def take(self, steps: int, positions: int, mask_RP: Tensor | None) -> None:
        """Keep the positions of each sentence that native code has written in some steps, given what is seen then."""
        self._ancestry.take(positions, mask_RP)
        for layer in self.layers:
            layer.take(steps)

    def as_block(self, width: int) -> None:
        """Let the layers that are ``width`` positions behind read these at once, as rows of their sentence."""
        self._ancestry.as_block(width)

    def keep_first(self, counts: Sequence[int], width: int) -> None:
        """Drop all but the first positions, given their number for each sentence, of a block that all have read."""
        self._ancestry.keep_first(counts, width)
        for layer in self.layers:
            layer.cut(self._ancestry.positions)

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
            before_B = self._ancestry.places_B
            if before_B is None:
                self._places = self._ancestry.sentences
            self._ancestry.places_B = sentences_B if before_B is None else before_B.index_select(0, sentences_B)
            if 2 * len(sentences_B) <= self._places:
                self._settle()
        if self._ancestry.positions == 0:  # No layer has cached keys and values.
            return
        sentences = self._ancestry.sentences if sentences_B is None else sentences_B.shape[0]
        assert rows_R.shape[0] % sentences == 0, "every sentence must have equally many hypotheses"
        self._ancestry.select(rows_R, sentences)
        kept_BM = self._ancestry.clear()
        if kept_BM is not None:
            self._settle()
            for layer in self.layers:
                layer.keep(kept_BM)

    def _settle(self) -> None:
        """Move the sentences of all layers to the first places."""
        places_B = self._ancestry.places_B
        if places_B is not None:
            self._ancestry.settle()
            for source in self._sources:
                source.select(places_B)
            for layer in self.layers:
                layer.select(places_B)
