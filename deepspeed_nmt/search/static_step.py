"""One step of beam search as a function of tensors of constant sizes.

The state of a batch of sentences is in tensors of a *bucket*: a number of sentences, source positions and target
positions that is rounded up. Copies of a sentence fill it. A step reads and writes these tensors, and nothing else:
it never waits for the device. What the host needs, it reads later: a flag for each sentence, and the log, in which
each step writes

- the token and the parent of each hypothesis that lives on,
- the log-probability and the parent of each hypothesis that finishes.

A sentence that is done stays in the bucket until the host removes it. Its hypotheses are extended further, but none
of them finishes.

Legend: B sentences of the bucket, K beam, R rows = B x K, V vocabulary, S source length, L target positions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel, Memory
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.nn.static_cache import Bucket, StaticAncestry, StaticCache, Store
from deepspeed_nmt.search.extensions import best_extensions, survivors
from deepspeed_nmt.search.left_to_right import extended, never_predicted
from deepspeed_nmt.search.rules import LeftToRightSettings, StaticRules

LEAST_POSITIONS = 32
"""Least target positions of a bucket, and least source positions; others are this times a power of two."""
_ROWS = sorted(chain((1,), (2 << power for power in range(20)), (3 << power for power in range(20))))
TOKEN, PARENT, ENDED_PARENT, ENDED = range(4)
"""Parts of the log."""


def sentences_of_bucket(sentences: int) -> int:
    """Return the sentences for which a bucket has room: 1, 2, 3, 4, 6, 8, 12 and so on.

    So a bucket is left for a smaller one when a quarter to a third of its sentences are done.
    """
    return _ROWS[bisect_left(_ROWS, sentences)]


def positions_of_bucket(positions: int, least: int = LEAST_POSITIONS) -> int:
    """Return the positions for which a bucket has room: the ``least`` times a power of two."""
    return next(size for power in count() if (size := least << power) >= positions)


class StaticStep:
    """The state of a batch of sentences, and the step that changes it.

    Args:
        config: settings of the search.
        beam: K.
        model: the model.
        vocabulary: special tokens.
        store: memory of the tensors.
        ancestry: of the hypotheses.
        cache: of the model, with this ancestry.

    Attributes:
        bucket: sizes of the state.
        done_B: True for sentences that are done.
        log: of the steps in this bucket; int32 (4,L,B,K). Log-probabilities are fp32.
    """

    def __init__(
        self,
        config: LeftToRightSettings,
        beam: int,
        model: DecodableModel,
        vocabulary: Vocabulary,
        store: Store,
        ancestry: StaticAncestry,
        cache: StaticCache,
    ) -> None:
        device = store.device
        self.bucket = Bucket(0, 0, 0)
        self._beam, self._model, self._store = beam, model, store
        self._vocabulary = vocabulary
        self._ancestry, self._cache = ancestry, cache
        self._rules = StaticRules(config, vocabulary, device)
        self._never = never_predicted(vocabulary, model, device)
        self._memory: Memory | None = None
        nothing = torch.empty(0, device=device)
        self._limit_B = self._finished_B = self.done_B = nothing
        self._token_BK = self._log_prob_BK = self._mask_B11S = self.log = nothing
        self._history_BKL: Tensor | None = None
        self._prefix_BL: Tensor | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """All sizes on which the kernels of the step depend."""
        return (*self.bucket, 0 if self._prefix_BL is None else self._prefix_BL.shape[1])

    def begin(
        self, memory: Memory, limits: Sequence[int], prefixes: Sequence[Sequence[int]], least: int, ahead: int
    ) -> None:
        """Begin a batch.

        Args:
            memory: encoded sources.
            limits: most tokens of the translations of each sentence, EOS included.
            prefixes: tokens with which they begin.
            least: least positions of a bucket.
            ahead: target positions for which there is to be room.
        """
        sentences, length = len(limits), memory.states_BSD.shape[-2]
        filled = sentences_of_bucket(sentences)
        bucket = Bucket(filled, positions_of_bucket(length, least), positions_of_bucket(ahead, least))
        if filled > sentences:
            memory = memory.select(self._upload([*range(sentences), *[0] * (filled - sentences)]))
        beam, bos = self._beam, self._vocabulary.bos
        self._resize(bucket)
        self._ancestry.begin(bucket)
        self._limit_B = self._empty("limit", torch.long, filled)
        self._limit_B.copy_(self._upload([*limits, *[limits[0]] * (filled - sentences)]))
        self._finished_B = self._empty("finished", torch.long, filled)
        self.done_B = self._empty("done", torch.bool, filled)
        self._token_BK = self._empty("token", torch.long, filled, beam).fill_(bos)
        # A sentence has one hypothesis at first; the other places have none.
        self._log_prob_BK = self._empty("log_prob", torch.float32, filled, beam).fill_(-torch.inf)
        self._log_prob_BK[:, 0] = 0.0
        self._mask_B11S = self._empty("mask", torch.bool, filled, 1, 1, bucket.source)
        self._mask_B11S[..., :length] = memory.mask if isinstance(memory.mask, Tensor) else True
        self._memory = memory.without_states(self._mask_B11S)
        self._history_BKL = None
        if self._rules.ngram:
            self._history_BKL = self._empty("history", torch.long, filled, beam, bucket.positions)
        self._set_prefixes(prefixes, filled, least)
        self._cache.begin()
        self._model.cache_source(memory, self._cache)

    def move(self, positions: int, kept: Sequence[int] | None) -> None:
        """Continue in another bucket.

        Args:
            positions: target positions for which it has room, at least as many as now.
            kept: the sentences to keep; None for all.
        """
        assert self._memory is not None
        sentences, kept_B = self.bucket.sentences, None
        if kept is not None:
            sentences = sentences_of_bucket(len(kept))
            kept_B = self._upload([*kept, *[kept[0]] * (sentences - len(kept))])
        self._resize(Bucket(sentences, self.bucket.source, positions))
        self._ancestry.move(self.bucket, kept_B)
        self._limit_B = self._moved("limit", self._limit_B, sentences, kept_B)
        self._finished_B = self._moved("finished", self._finished_B, sentences, kept_B)
        self.done_B = self._moved("done", self.done_B, sentences, kept_B)
        self._token_BK = self._moved("token", self._token_BK, sentences, kept_B)
        self._log_prob_BK = self._moved("log_prob", self._log_prob_BK, sentences, kept_B)
        self._mask_B11S = self._moved("mask", self._mask_B11S, sentences, kept_B)
        self._memory = self._memory.without_states(self._mask_B11S)
        if self._prefix_BL is not None:
            self._prefix_BL = self._moved("prefix", self._prefix_BL, sentences, kept_B)
        if self._history_BKL is not None:
            shape = sentences, self._beam, positions
            self._history_BKL = self._store.moved(self, "history", self._history_BKL, shape, 0, kept_B)
        self._cache.move(kept_B)

    def run(self) -> object:
        """Extend all hypotheses by a token.

        Returns:
            Tensors that the step reads, besides the state and the model's parameters.
        """
        assert self._memory is not None
        beam, eos, length_1 = self._beam, self._vocabulary.eos, self._ancestry.position.index_1
        sentences = self.bucket.sentences
        self._ancestry.advance()
        logits_RV = self._model.step(self._token_BK.view(-1), self._memory, self._cache)
        history_RL = None if self._history_BKL is None else self._history_BKL.flatten(0, 1)
        forbid = partial(self._rules.apply_at, length_1=length_1, history_RL=history_RL, prefix_BL=self._prefix_BL)
        closing_R = (self._limit_B == length_1 + 1).unsqueeze(1).expand(-1, beam).flatten()
        log_prob_RV = extended(logits_RV, self._log_prob_BK.flatten(), self._never, eos, forbid, closing_R)
        best = best_extensions(log_prob_RV, sentences, beam, eos)
        log_prob_BK, token_BK, parent_BK = survivors(best, beam)
        ended_BK = best.log_prob_BC[:, :beam]
        ends_BK = best.is_eos_BC[:, :beam] & ended_BK.isfinite() & ~self.done_B.unsqueeze(1)
        ended_BK = ended_BK.masked_fill(~ends_BK, -torch.inf).view(torch.int32)
        entry = torch.stack([token_BK.int(), parent_BK.int(), best.parent_BC[:, :beam].int(), ended_BK])
        self.log.index_copy_(1, length_1, entry.unsqueeze(1))
        self._finished_B += ends_BK.sum(dim=1)
        torch.logical_or(self._finished_B >= beam, self._limit_B <= length_1 + 1, out=self.done_B)
        self._token_BK.copy_(token_BK)
        self._log_prob_BK.copy_(log_prob_BK)
        first_row_B1 = torch.arange(0, sentences * beam, beam, device=parent_BK.device).unsqueeze(1)
        rows_R = (first_row_B1 + parent_BK).flatten()
        if history_RL is not None:
            history_RL.copy_(history_RL.index_select(0, rows_R).index_copy_(1, length_1, token_BK.view(-1, 1)))
        self._ancestry.select(rows_R)
        return list(self._ancestry.position.tables)

    def _resize(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.log = self._store.view(self, "log", (4, bucket.positions, bucket.sentences, self._beam), torch.int32)

    def _set_prefixes(self, prefixes: Sequence[Sequence[int]], filled: int, least: int) -> None:
        self._prefix_BL = None
        longest = max(map(len, prefixes), default=0)
        if longest > 0:
            length = positions_of_bucket(longest, least)
            rows = [[*prefix, *[-1] * (length - len(prefix))] for prefix in prefixes]
            self._prefix_BL = self._empty("prefix", torch.long, filled, length).fill_(-1)
            self._prefix_BL[: len(rows)] = self._upload(rows)

    def _upload(self, numbers: Sequence[object]) -> Tensor:
        """Copy numbers to the device, without waiting for it."""
        on_gpu = self._store.device.type == "cuda"
        return torch.tensor(numbers, pin_memory=on_gpu).to(self._store.device, non_blocking=True)

    def _empty(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        return self._store.empty(self, name, shape, dtype)

    def _moved(self, name: str, old: Tensor, sentences: int, kept_B: Tensor | None) -> Tensor:
        return self._store.moved(self, name, old, (sentences, *old.shape[1:]), 0, kept_B)
