"""A decoder's cache of constant sizes, for steps that a GPU repeats without the host.

The caches of :mod:`deepspeed_nmt.nn.cache` grow with every step. Here the sizes are those of a *bucket*, which has
room for a number of sentences, source positions and target positions. All that changes from step to step is the
contents of tensors at the same addresses; even the number of the next position is a tensor. So the kernels of a step
can be recorded once and replayed (CUDA graphs). Positions that are not yet cached are masked.

As in the growing cache, keys and values stay where they were written, and a table has the positions from which each
hypothesis descends. Position t of hypothesis w is in slot t W + w of its sentence.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, H heads, K head width, S source length, L target
positions of the bucket, P slots of a sentence = L x W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.nn.cache import DecoderCache, KeysValues, LayerCache, Position, SourceCache


class Bucket(NamedTuple):
    """Sizes of the tensors of a step.

    Attributes:
        sentences: B.
        source: S.
        positions: L.
    """

    sentences: int
    source: int
    positions: int


class Store:
    """The memory of tensors that change their sizes.

    Each tensor has memory for the largest sizes that it has had. So tensors of equal sizes have equal addresses, and
    the memory of many buckets is that of the largest.

    Args:
        device: of the tensors.

    Attributes:
        moves: number of times that a tensor got other memory because it became larger; addresses from before are
            not valid any more.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moves = 0
        self._flat: dict[tuple[object, str], Tensor] = {}

    def view(self, owner: object, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of these sizes. It has the contents of other sizes.

        Args:
            owner: object to which the tensor belongs.
            name: of the tensor among those of its owner.
            shape: its sizes.
            dtype: its dtype.
        """
        numbers, flat = math.prod(shape), self._flat.get((owner, name))
        if flat is None or flat.numel() < numbers or flat.dtype != dtype:
            self.moves += flat is not None
            del flat
            self._flat.pop((owner, name), None)
            flat = self._flat[owner, name] = torch.zeros(numbers, dtype=dtype, device=self.device)
        return flat[:numbers].view(*shape)

    def empty(self, owner: object, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of these sizes, filled with zeros."""
        return self.view(owner, name, shape, dtype).zero_()

    def moved(
        self, owner: object, name: str, old: Tensor, shape: Sequence[int], dim: int, sentences_B: Tensor | None
    ) -> Tensor:
        """Return the tensor of other sizes with the contents of ``old``, which is overwritten, and zeros after them.

        Args:
            owner: object to which the tensor belongs.
            name: of the tensor.
            old: the tensor of the sizes so far.
            shape: the other sizes, none of them smaller but that of ``dim``.
            dim: dimension of the sentences.
            sentences_B: the sentences of ``old`` to keep, in this order; None for all.
        """
        if sentences_B is None and tuple(shape) == tuple(old.shape):
            return old
        kept = old.clone() if sentences_B is None else old.index_select(dim, sentences_B)
        new = self.view(owner, name, shape, old.dtype)
        if kept.shape != new.shape:
            new.zero_()
        new[tuple(slice(0, size) for size in kept.shape)].copy_(kept)
        return new


class StaticAncestry:
    """The slots from which each hypothesis descends, shared by all layers, and the number of the next position.

    Args:
        store: memory of the cache.
        hypotheses: W.

    Attributes:
        bucket: sizes of the cache.
        position: the next position.
        slots_W: slots of the position that is being cached.
        seen: the slots that each hypothesis sees, bool (B,1,W,P).
    """

    def __init__(self, store: Store, hypotheses: int) -> None:
        self.store = store
        self.hypotheses = hypotheses
        self.bucket = Bucket(0, 0, 0)
        self.position = Position(store.empty(self, "position", (1,), torch.long))
        self._first_W = torch.arange(hypotheses, device=store.device)
        self.slots_W = self._first_W
        self.seen = torch.empty(0, dtype=torch.bool, device=store.device)
        self._additive: dict[tuple[bool, torch.dtype], Tensor] = {}

    def begin(self, bucket: Bucket) -> None:
        """Begin a batch of sentences, whose hypotheses have no positions."""
        self._resize(bucket)
        self.position.index_1.zero_()
        self.seen = self.store.empty(self, "seen", self._shape, torch.bool)

    def move(self, bucket: Bucket, sentences_B: Tensor | None) -> None:
        """Continue in another bucket, with some of the sentences; None for all."""
        self._resize(bucket)
        self.seen = self.store.moved(self, "seen", self.seen, self._shape, 0, sentences_B)

    def advance(self) -> None:
        """Begin a step: each hypothesis descends from the position that is cached next."""
        self._additive.clear()
        self.position.tables.clear()
        self.slots_W = self.position.index_1 * self.hypotheses + self._first_W
        own_BW1 = self.slots_W[None, :, None].expand(self.bucket.sentences, -1, -1)
        self.seen.squeeze(1).scatter_(2, own_BW1, True)

    def select(self, rows_R: Tensor) -> None:
        """End a step: continue the hypotheses ``rows_R``, as many of each sentence as before."""
        if self.hypotheses > 1:
            seen_RP = self.seen.view(rows_R.shape[0], -1)
            seen_RP.copy_(seen_RP.index_select(0, rows_R))
        self.position.index_1.add_(1)

    def additive(self, mask: Tensor, of_source: bool, dtype: torch.dtype) -> Tensor:
        """Return a mask as numbers to be added to scores, 0 or -inf, computed once in a step."""
        found = self._additive.get((of_source, dtype))
        if found is None:
            found = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
            self._additive[of_source, dtype] = found
        return found

    @property
    def _shape(self) -> tuple[int, ...]:
        sentences, _, positions = self.bucket
        return sentences, 1, self.hypotheses, positions * self.hypotheses

    def _resize(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.position.bound = bucket.positions


class StaticSourceCache(SourceCache):
    """The source's part of a layer's cache, filled before the first step.

    Args:
        ancestry: of the decoder.
    """

    def __init__(self, ancestry: StaticAncestry) -> None:
        super().__init__()
        self._ancestry = ancestry
        self._known: Tensor | None = None  # keys and values, (2,B,H,S,K)

    @override
    def write(self, projected: KeysValues) -> None:
        """Cache keys and values of the source, and zeros up to the source length of the bucket."""
        keys, bucket = projected.keys, self._ancestry.bucket
        sentences, heads, length, width = keys.shape
        assert sentences == bucket.sentences
        shape = 2, sentences, heads, bucket.source, width
        known = self._ancestry.store.view(self, "source", shape, keys.dtype)
        for part, new in zip(known, (keys, projected.values), strict=True):
            part[:, :, :length].copy_(new)
            part[:, :, length:].zero_()
        self._set(known)

    def begin(self) -> None:
        """Forget the source of the batch before."""
        self._set(None)

    def move(self, sentences_B: Tensor | None) -> None:
        """Continue in the bucket of the ancestry, with some of the sentences; None for all."""
        if self._known is not None:
            _, _, heads, length, width = self._known.shape
            shape = 2, self._ancestry.bucket.sentences, heads, length, width
            self._set(self._ancestry.store.moved(self, "source", self._known, shape, 1, sentences_B))

    def _set(self, known: Tensor | None) -> None:
        self._known = known
        self.projected = None if known is None else KeysValues(known[0], known[1])


class StaticLayerCache(LayerCache):
    """The cache of one layer application.

    Args:
        ancestry: of the decoder, shared by its layers.
        source: of the layer, shared by its applications.
    """

    def __init__(self, ancestry: StaticAncestry, source: StaticSourceCache) -> None:
        self.source: StaticSourceCache = source
        self._static = ancestry
        self._known: Tensor | None = None  # keys and values, (2,B,H,P,K)

    def begin(self) -> None:
        """Begin a batch. Slots are masked by adding to their scores, so they must have finite contents."""
        if self._known is not None:
            _, _, heads, _, width = self._known.shape
            self._known = self._static.store.empty(self, "known", self._shape(heads, width), self._known.dtype)

    def move(self, sentences_B: Tensor | None) -> None:
        """Continue in the bucket of the ancestry, with some of the sentences; None for all."""
        if self._known is not None:
            _, _, heads, _, width = self._known.shape
            shape = self._shape(heads, width)
            self._known = self._static.store.moved(self, "known", self._known, shape, 1, sentences_B)

    @override
    def append(self, new: KeysValues) -> tuple[KeysValues, Tensor | None]:
        """Append as the growing cache does; slots that are not cached yet are masked."""
        rows, heads, length, width = new.keys.shape
        assert length == 1, "a decoder advances one position at a time"
        sentences, slots_W = self._static.bucket.sentences, self._static.slots_W
        known = self._room(heads, width, new.keys)
        for part, newest in zip(known, (new.keys, new.values), strict=True):
            part.index_copy_(2, slots_W, newest.view(sentences, rows // sentences, heads, width).transpose(1, 2))
        return KeysValues(known[0], known[1]), self._static.seen

    @override
    def append_joint(self, new_R1E: Tensor, width: int) -> tuple[KeysValues, Tensor | None]:
        """Append as the growing cache does; slots that are not cached yet are masked."""
        rows, _, both = new_R1E.shape
        sentences, heads = self._static.bucket.sentences, both // (2 * width)
        known = self._room(heads, width, new_R1E)
        newest = new_R1E.view(sentences, rows // sentences, 2, heads, width).permute(2, 0, 3, 1, 4)
        known.index_copy_(3, self._static.slots_W, newest)
        return KeysValues(known[0], known[1]), self._static.additive(self._static.seen, False, new_R1E.dtype)

    @override
    def additive(self, mask: Mask, dtype: torch.dtype) -> Tensor | None:
        """Return the source's mask, bool (B,1,1,S), as numbers to be added to scores."""
        assert isinstance(mask, Tensor), "a bucket's source is padded"
        return self._static.additive(mask, True, dtype)

    def _room(self, heads: int, width: int, like: Tensor) -> Tensor:
        """Return keys and values of all slots, (2,B,H,P,K)."""
        if self._known is None:  # The first step of all.
            self._known = self._static.store.empty(self, "known", self._shape(heads, width), like.dtype)
        return self._known

    def _shape(self, heads: int, width: int) -> tuple[int, ...]:
        bucket = self._static.bucket
        return 2, bucket.sentences, heads, bucket.positions * self._static.hypotheses, width


class StaticCache(DecoderCache):
    """The cache of a whole decoder.

    Args:
        ancestry: of the decoder. An ensemble's decoders share it.
        stacks: for each stack of the decoder, the indices of its layers in order of application.
    """

    def __init__(self, ancestry: StaticAncestry, *stacks: Sequence[int]) -> None:
        self.ancestry = ancestry
        self._static: list[StaticSourceCache | StaticLayerCache] = []
        self.layers: list[LayerCache] = []
        for indices in stacks:
            of_layer = {index: StaticSourceCache(ancestry) for index in indices}
            layers = [StaticLayerCache(ancestry, of_layer[index]) for index in indices]
            self._static += [*of_layer.values(), *layers]
            self.layers += layers

    @property
    @override
    def length(self) -> Position:
        """Target positions of a hypothesis so far."""
        return self.ancestry.position

    def begin(self) -> None:
        """Begin a batch in the bucket of the ancestry."""
        for each in self._static:
            each.begin()

    def move(self, sentences_B: Tensor | None) -> None:
        """Continue in the bucket of the ancestry, with some of the sentences; None for all."""
        for each in self._static:
            each.move(sentences_B)

    @override
    def select(self, rows_R: Tensor, sentences_B: Tensor | None) -> None:
        """Refuse: the hypotheses are selected in the ancestry, and sentences by :meth:`move`."""
        raise TypeError("hypotheses of a cache of constant sizes are selected in its ancestry")
