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
from functools import partial
from itertools import count
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, Request, check_finite, or_default
from deepspeed_nmt.search.length_penalty import PENALTY_NAMES, LengthPenalty, PenaltyName
from deepspeed_nmt.search.rules import LeftToRightSettings, TokenRules, length_limits

_BLOCK = 64
"""Logits in a block, of which only the largest is looked at first."""
_CACHE_ELEMENTS = 1 << 20
"""Logits summed at once on a CPU: 4 MiB."""


class BeamSettings(LeftToRightSettings):
    """Settings of searches with a beam."""

    width_setting: ClassVar[str | None] = "beam"
    beam: int = Field(
        default=5, ge=1, le=10_000, description="hypotheses of a sentence (beam size, K); 1: greedy decoding"
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
            logits_RV: logits of their next tokens; overwritten.
            closing: for each sentence, True if only EOS may follow.
            forbid: sets the logits of tokens that a rule forbids to -inf, given the tokens of the hypotheses; None if
                there are no rules.
        """
        eos, pad, bos = self.vocabulary.eos, self.vocabulary.pad, self.vocabulary.bos
        sentences, width = live.log_prob_BW.shape
        wanted = 2 * self.config.beam
        logits_RV = logits_RV.float()
        log_sum_R1 = _log_sum_exp(logits_RV)
        eos_log_prob_R1 = logits_RV[:, eos : eos + 1] - log_sum_R1
        logits_RV[:, pad] = -torch.inf
        logits_RV[:, bos] = -torch.inf
        if self.model.mask is not None:
            logits_RV[:, self.model.mask] = -torch.inf
        if forbid is not None:
            forbid(logits_RV, live.tokens_BWT.flatten(0, 1))
        best_RC, token_RC = _top(logits_RV, min(wanted, logits_RV.shape[1]))
        log_prob_RC = best_RC - log_sum_R1
        if any(closing):
            closing_R1 = torch.tensor(closing, device=logits_RV.device).repeat_interleave(width).unsqueeze(1)
            only_first = F.pad(eos_log_prob_R1, (0, log_prob_RC.shape[1] - 1), value=-torch.inf)
            log_prob_RC = torch.where(closing_R1, only_first, log_prob_RC)
            token_RC = token_RC.masked_fill(closing_R1, eos)
        each = log_prob_RC.shape[1]
        log_prob_BN = (live.log_prob_BW.view(-1, 1) + log_prob_RC).view(sentences, width * each)
        token_BN = token_RC.reshape(sentences, width * each)
        missing = wanted - width * each
        if missing > 0:
            log_prob_BN = F.pad(log_prob_BN, (0, missing), value=-torch.inf)
            token_BN = F.pad(token_BN, (0, missing), value=eos)
        log_prob_BC, index_BC = log_prob_BN.topk(wanted, dim=1)
        parent_BC = (index_BC // each).clamp_(max=width - 1)  # a filled-up extension has no parent
        token_BC = token_BN.gather(1, index_BC)
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


def _log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Compute the log of the sum of exponentials of each row.

    Together with a few logits, this replaces a log-softmax. On a CPU a few rows are processed at a time, whose
    intermediate results stay in the cache, which is twice as fast.

    Shape: (R,V) -> (R,1)
    """
    rows, vocabulary = logits_RV.shape
    at_once = max(1, _CACHE_ELEMENTS // vocabulary) if logits_RV.device.type == "cpu" else rows
    return torch.cat([part.logsumexp(dim=1, keepdim=True) for part in torch.split(logits_RV, at_once)])


def _top(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the ``k`` largest entries of each row and their indices, in no particular order.

    The ``k`` blocks with the largest maxima hold them all, so only those blocks and the entries after the last whole
    block are searched. On a CPU with V = 10,000 this is twice as fast as searching whole rows.

    Shape: (R,V) -> (R,k), (R,k)
    """
    blocks = logits_RV.shape[1] // _BLOCK
    if blocks < 4 * k:
        values, indices = logits_RV.topk(k, dim=1, sorted=False)
        return values, indices
    whole = blocks * _BLOCK
    blocked = logits_RV[:, :whole].view(-1, blocks, _BLOCK)
    block_Rk = blocked.amax(dim=2).topk(k, dim=1, sorted=False).indices
    inside = torch.arange(_BLOCK, device=logits_RV.device)
    index_RN = (block_Rk.unsqueeze(2) * _BLOCK + inside).flatten(1)
    rest = torch.arange(whole, logits_RV.shape[1], device=logits_RV.device)
    index_RN = torch.cat([index_RN, rest.expand(index_RN.shape[0], -1)], dim=1)
    values, chosen = logits_RV.gather(1, index_RN).topk(k, dim=1, sorted=False)
    return values, index_RN.gather(1, chosen)
