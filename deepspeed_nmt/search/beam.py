"""Beam search.

Each step extends the K live hypotheses of every sentence and ranks the extensions by log-probability. An extension by
EOS that ranks among the first K *finishes*; the best K others live on. (Of 2K extensions at most K end in EOS, one
for each parent, so looking at 2K always leaves K to live.)

A sentence is done as soon as K hypotheses have finished, or at its length limit, where every live hypothesis is
extended by EOS at its log-probability under the model. Live hypotheses are always compared at equal length, without a
penalty, and finished ones by log-probability divided by the length penalty. Searching on until no live hypothesis
*could* still win would take most sentences to their length limits, since under a penalty that grows with length a
live hypothesis can win until it is very long. With the rule used here, a beam of 1 is exactly greedy decoding, and
the result of a sentence depends on that sentence alone.

Legend: B sentences still searched, S source length, V vocabulary, K beam, W live hypotheses of a sentence (1 before
the first step, then K), R rows = B x W, C extensions looked at, T target length so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, Request, check_finite, or_default
from deepspeed_nmt.search.length_penalty import PENALTY_NAMES, LengthPenalty, PenaltyName
from deepspeed_nmt.search.rules import LeftToRightSettings, TokenRules, length_limits


class BeamSettings(LeftToRightSettings):
    """Settings of searches with a beam."""

    width_setting: ClassVar[str | None] = "beam"
    beam: int = Field(
        default=5, ge=1, le=MAX_HYPOTHESES, description="hypotheses of a sentence (beam size, K); 1: greedy decoding"
    )
    length_penalty: PenaltyName = Field(default="gnmt:0.6", description=PENALTY_NAMES)


class BeamConfig(BeamSettings):
    """Beam search with one model."""

    name: Literal["beam"] = "beam"


@dataclass(frozen=True)
class _Live:
    """Unfinished hypotheses; slots without one have a log-probability of -inf.

    Attributes:
        tokens_BWT: their tokens, BOS first.
        log_prob_BW: their log-probabilities, fp32.
    """

    tokens_BWT: Tensor
    log_prob_BW: Tensor


@dataclass(frozen=True)
class _Extensions:
    """The best extensions of each sentence's hypotheses by one token, best first.

    Attributes:
        log_prob_BC: log-probability of the extended hypothesis, fp32; -inf where fewer than C exist.
        parent_BC: number of the hypothesis that is extended, 0..W-1.
        token_BC: the new token.
        is_eos_BC: True if the new token is EOS.
    """

    log_prob_BC: Tensor
    parent_BC: Tensor
    token_BC: Tensor
    is_eos_BC: Tensor


class BeamSearch:
    """Beam search with one model.

    Hypotheses are scored by log-probability divided by the length penalty. BOS and padding are never predicted.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.
    """

    def __init__(self, config: BeamSettings, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.penalty = LengthPenalty.parse(config.length_penalty)
        never = {vocabulary.pad, vocabulary.bos, *(() if model.mask is None else (model.mask,))}
        self._never = sorted(never)

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        Returns:
            For each sentence at least one and at most ``beam`` different hypotheses, best first.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        assert not self.model.training, "call model.eval() first: dropout would change the translations"
        if source_BS.shape[0] == 0:
            return []
        requests = or_default(requests, source_BS.shape[0])
        limits = self._limits(source_BS, requests)
        rules = TokenRules.of(self.config, self.vocabulary, requests, source_BS.device)
        finished: list[list[Hypothesis]] = [[] for _ in limits]
        numbers = list(range(len(limits)))  # of the sentences still searched, in the order of the rows
        memory = self.model.encode(source_BS, padded)
        cache = self.model.begin()
        live = _Live(
            tokens_BWT=source_BS.new_full((len(limits), 1, 1), self.vocabulary.bos),
            log_prob_BW=torch.zeros(len(limits), 1, device=source_BS.device),
        )
        for length in count(1):
            logits_RV = self.model.step(live.tokens_BWT[:, :, -1].flatten(), memory, cache)
            forbid = None if rules is None else partial(rules.apply, numbers=numbers)
            extensions = self._extend(live, logits_RV, [limits[number] == length for number in numbers], forbid)
            for row, hypothesis in self._ended(live, extensions, length):
                finished[numbers[row]].append(hypothesis)
            kept = [
                row
                for row, number in enumerate(numbers)
                if limits[number] > length and len(finished[number]) < self.config.beam
            ]
            if not kept:
                break
            kept_B: Tensor | None = None
            if len(kept) < len(numbers):
                numbers = [numbers[row] for row in kept]
                kept_B = torch.tensor(kept, device=source_BS.device)
                memory = memory.select(kept_B)
            live, rows_R = self._survivors(live, extensions, kept_B)
            cache.select(rows_R, kept_B)
        return [self._best(hypotheses) for hypotheses in finished]

    def _limits(self, source_BS: Tensor, requests: Sequence[Request]) -> list[int]:
        """Compute the most tokens that each translation may have, EOS included."""
        lengths: list[int] = source_BS.ne(self.vocabulary.pad).sum(dim=1).tolist()
        return length_limits(self.config, lengths, self.model.longest_target, requests)

    def _extend(
        self,
        live: _Live,
        logits_RV: Tensor,
        closing: list[bool],
        forbid: Callable[[Tensor, Tensor], None] | None = None,
    ) -> _Extensions:
        """Find the best 2K extensions of each sentence.

        Args:
            live: unfinished hypotheses.
            logits_RV: logits of their next tokens.
            closing: for each sentence, True if only EOS may follow.
            forbid: sets the logits of tokens that a rule forbids to -inf, given the tokens of the hypotheses; None if
                there are no rules.
        """
        eos = self.vocabulary.eos
        sentences, width = live.log_prob_BW.shape
        log_prob_RV = torch.log_softmax(logits_RV.float(), dim=1)
        log_prob_RV[:, self._never] = -torch.inf
        eos_R = log_prob_RV[:, eos].clone()
        if forbid is not None:
            forbid(log_prob_RV, live.tokens_BWT.flatten(0, 1))
        if any(closing):
            closing_R = torch.tensor(closing, device=logits_RV.device).repeat_interleave(width)
            log_prob_RV.masked_fill_(closing_R.unsqueeze(1), -torch.inf)
            log_prob_RV[:, eos] = eos_R
        log_prob_RV += live.log_prob_BW.view(-1, 1)
        each = log_prob_RV.shape[1]
        log_prob_BC, index_BC = _top(log_prob_RV.view(sentences, width * each), each, 2 * self.config.beam)
        parent_BC = torch.div(index_BC, each, rounding_mode="floor")
        token_BC = index_BC - parent_BC * each
        return _Extensions(log_prob_BC, parent_BC, token_BC, token_BC == eos)

    def _ended(self, live: _Live, extensions: _Extensions, length: int) -> Iterator[tuple[int, Hypothesis]]:
        """Yield the hypotheses that this step finishes, each with the row of its sentence."""
        log_prob_BK = extensions.log_prob_BC[:, : self.config.beam]
        ends_BK = extensions.is_eos_BC[:, : self.config.beam] & log_prob_BK.isfinite()
        # In most steps, only here the host waits for the device.
        sentence_N, rank_N = ends_BK.nonzero(as_tuple=True)
        if sentence_N.shape[0] == 0:
            return
        tokens_NT = live.tokens_BWT[sentence_N, extensions.parent_BC[sentence_N, rank_N], 1:]
        log_prob_N = log_prob_BK[sentence_N, rank_N]
        penalty = self.penalty(length)
        for row, tokens, log_prob in zip(sentence_N.tolist(), tokens_NT.tolist(), log_prob_N.tolist(), strict=True):
            yield row, Hypothesis(tokens, log_prob / penalty, log_prob)

    def _survivors(self, live: _Live, extensions: _Extensions, kept_B: Tensor | None) -> tuple[_Live, Tensor]:
        """Select the best K unfinished extensions of sentences ``kept_B`` (None: all) and the rows they extend."""
        open_BC = extensions.log_prob_BC.masked_fill(extensions.is_eos_BC, -torch.inf)
        log_prob_BK, order_BK = open_BC.topk(self.config.beam, dim=1)
        token_BK = extensions.token_BC.gather(1, order_BK)
        sentences, width, _ = live.tokens_BWT.shape
        first_row_B1 = torch.arange(sentences, device=order_BK.device).unsqueeze(1) * width
        row_BK = first_row_B1 + extensions.parent_BC.gather(1, order_BK)
        if kept_B is not None:
            log_prob_BK, token_BK, row_BK = (x.index_select(0, kept_B) for x in (log_prob_BK, token_BK, row_BK))
        tokens_BKT = live.tokens_BWT.flatten(0, 1)[row_BK]
        tokens_BKT = torch.cat([tokens_BKT, token_BK.unsqueeze(2)], dim=2)
        return _Live(tokens_BKT, log_prob_BK), row_BK.flatten()

    def _best(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        if not hypotheses:
            check_finite(math.nan)
        return sorted(hypotheses, key=lambda hypothesis: hypothesis.score, reverse=True)[: self.config.beam]


def _top(x_BN: Tensor, period: int, k: int) -> tuple[Tensor, Tensor]:
    """Find the ``k`` largest entries of each row and their indices, largest first.

    The ``k`` blocks with the largest maxima hold them all, so only those blocks are searched. On a CPU with a
    vocabulary of 8,000 this is three times as fast as searching whole rows.

    Args:
        x_BN: the entries.
        period: a number that divides N; blocks divide it.
        k: entries to find. If there are fewer, the last one found has no value: -inf at index 0.

    Shape: (B,N) -> (B,k), (B,k)
    """
    rows, entries = x_BN.shape
    if k > entries:
        values, index = _top(x_BN, period, entries)
        return F.pad(values, (0, k - entries), value=-torch.inf), F.pad(index, (0, k - entries))
    size = _block_size(period)
    if size == 1 or entries // size < 2 * k:
        return x_BN.topk(k, dim=1)
    blocked = x_BN.view(rows, -1, size)
    block_Bk = blocked.amax(dim=2).topk(k, dim=1, sorted=False).indices
    first_Bk1 = block_Bk.unsqueeze(2)
    inside = blocked.gather(1, first_Bk1.expand(-1, -1, size)).flatten(1)
    values, chosen = inside.topk(k, dim=1)
    return values, block_Bk.gather(1, chosen // size) * size + chosen % size


@cache
def _block_size(period: int) -> int:
    """Return the divisor of a number that is nearest to 64, from 16 to 256; 1 if there is none."""
    divisors = [size for size in range(16, 257) if period % size == 0]
    return min(divisors, key=lambda size: abs(size - 64), default=1)
