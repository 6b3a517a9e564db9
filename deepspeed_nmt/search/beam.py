"""Beam search, and diverse beam search.

Each step extends the K live hypotheses of every sentence and ranks the extensions by log-probability. An extension by
EOS that ranks among the first K *finishes*; the best K others live on. (Of 2K extensions at most K end in EOS, one
for each parent, so looking at 2K always leaves K to live.)

A sentence is done as soon as K hypotheses have finished, or at its length limit, where every live hypothesis is
extended by EOS at its log-probability under the model. Live hypotheses are always compared at equal length, without a
penalty, and finished ones by log-probability divided by the length penalty. Searching on until no live hypothesis
*could* still win would take most sentences to their length limits, since under a penalty that grows with length a
live hypothesis can win until it is very long. With the rule used here, a beam of 1 is exactly greedy decoding, and
the result of a sentence depends on that sentence alone.

**Diverse beam search** (Vijayakumar et al., "Diverse Beam Search", 2016) has Hamming diversity. The beam is divided
into groups of equal size, each of which is a beam search of its own. In each step the groups follow one another, and
a token costs ``diversity`` for each hypothesis of an earlier group that continues with it in this step. The cost
decides only which extensions live on or finish in this step: log-probabilities and scores are those of the model. EOS
costs nothing, because groups that must not end at the same time would differ in length instead of words. A sentence
is done when every group has finished as many hypotheses as it has places. One group is beam search.

Legend: B sentences still searched, V vocabulary, K beam, W live hypotheses of a sentence (1 before the first step,
then K), R rows = B x W, N hypotheses of a group (1 before the first step, then K / groups), C = 2N extensions looked
at, F hypotheses that finish, T target length so far (BOS included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.model import DecodableModel, Memory
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import option
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.search.base import PENALTY_NAMES, Hypothesis, LengthPenalty, PenaltyName, Request
from deepspeed_nmt.search.left_to_right import (
    Extensions,
    LeftToRightSearch,
    LeftToRightSettings,
    Live,
    Sentence,
    best_of,
    largest,
)

_STEPS = 16
"""Steps of which one call of native code takes at most so many: Ctrl+C waits for it."""
_ROWS = 256
"""Hypotheses of all steps of such a call, for which the caches get room: in a large batch a sentence is done soon."""


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


class ExitsSettings(BeamSettings):
    """Settings of searches that decode by a beam from several exits of a model."""

    @override
    def from_one_exit(self) -> BeamConfig:
        return BeamConfig(**self.model_dump(include={*BeamSettings.model_fields}, exclude={"name"}))


class DiverseBeamConfig(BeamSettings):
    """Settings of diverse beam search."""

    name: Literal["diverse_beam"] = "diverse_beam"
    groups: int = Field(
        default=0, ge=0, le=MAX_HYPOTHESES, description="groups of hypotheses (G), a divisor of the beam; 0: the beam"
    )
    diversity: float = Field(
        default=0.5, ge=0.0, le=1e6, description="cost of a token for each earlier group's hypothesis that has it"
    )

    @model_validator(mode="after")
    def _check_groups(self) -> DiverseBeamConfig:
        if self.beam % (self.groups or self.beam):
            raise ValueError(
                f"{option('beam')} must be a multiple of {option('groups')}, but is {self.beam} and "
                f"{option('groups')} is {self.groups}; change one of them"
            )
        return self


@dataclass
class BeamSentence(Sentence):
    """A sentence in progress.

    Attributes:
        counts: number of finished hypotheses of each group.
        finished: those of all groups, by their tokens.
    """

    counts: list[int]
    finished: dict[tuple[int, ...], Hypothesis]


class BeamSearch(LeftToRightSearch[BeamSentence]):
    """Beam search with one model, in one group or several; see :class:`LeftToRightSearch` for its arguments.

    Hypotheses are scored by log-probability divided by the length penalty. For each sentence there is at least one,
    and at most ``beam`` different ones.
    """

    def __init__(self, config: BeamSettings, model: DecodableModel, vocabulary: Vocabulary) -> None:
        super().__init__(config, model, vocabulary)
        self.groups, self.diversity = 1, 0.0
        if isinstance(config, DiverseBeamConfig):
            self.groups, self.diversity = config.groups or config.beam, config.diversity
        self.beam, self.size = config.beam, config.beam // self.groups
        self.penalty = LengthPenalty.parse(config.length_penalty)

    def start(self, number: int, limit: int, request: Request) -> BeamSentence:
        """Return a sentence none of whose groups has finished."""
        return BeamSentence(number, limit, request, [0] * self.groups, {})

    @override
    def step(self, live: Live[BeamSentence], memory: Memory, cache: DecoderCache) -> Extensions:
        """Take a step, or with native code as many as :data:`_STEPS`, up to one after which a sentence is done."""
        sentences, size, rules, rows = live.sentences, self.size, live.rules, len(live.tokens_RT)
        steps = min(_STEPS, max(1, _ROWS // (len(sentences) * size)))
        steps = min(steps, min(sentence.limit for sentence in sentences) - live.length)
        is_able = self.native is not None and self.groups == 1 and steps > 0 and not rules.read_tokens(live.length)
        is_able = is_able and 2 * size <= live.width * self.model.vocab_size
        decoder = self.model.natively(rows, size, steps, memory, cache) if is_able else None
        if decoder is None:
            return super().step(live, memory, cache)
        counts = [sentence.counts[0] for sentence in sentences]
        so_far = live.tokens_RT, live.log_prob_RT, rules.never
        found = decoder.take_steps(*so_far, counts, size, self.vocabulary.eos)
        cache.take(found.taken, live.width + (found.taken - 1) * size, found.seen_RP)
        for number, tokens, totals in found.ended:
            by_token = tuple(after - before for before, after in pairwise(totals))
            self._end(sentences[number], 0, tokens, totals[-1], by_token)
        unfinished = self._unfinished(sentences, live.length + found.taken - 1)
        return Extensions(unfinished, found.row_BK, found.tokens_BKT, found.log_prob_BKT)

    def extend(self, live: Live[BeamSentence], logits_RV: Tensor) -> Extensions:
        """Extend all groups by a token, one group after another; see :meth:`LeftToRightSearch.extend`."""
        size, sentences, vocabulary = self.size, live.sentences, logits_RV.shape[1]
        if self._is_native(live, logits_RV):
            return self._extended_natively(live, logits_RV)
        total_BWV = self.extended(live, logits_RV).view(len(sentences), live.width, vocabulary)
        used_BV: Tensor | None = None  # number of hypotheses of earlier groups that continue with a token
        parts = []
        for group in range(self.groups):
            first = 0 if live.length == 1 else group * size  # the groups begin with one hypothesis
            total_BNV = total_BWV[:, first : first + size]
            ranked_BNV = total_BNV if used_BV is None else total_BNV - self.diversity * used_BV.unsqueeze(1)
            rank_BC, index_BC = largest(ranked_BNV.flatten(1), vocabulary, 2 * size)
            log_prob_BC = rank_BC
            if used_BV is not None:
                log_prob_BC = total_BNV.flatten(1).gather(1, index_BC).masked_fill(rank_BC == -torch.inf, -torch.inf)
            parent_BC, token_BC = torch.div(index_BC, vocabulary, rounding_mode="floor"), index_BC % vocabulary
            if first:
                parent_BC = parent_BC + first
            ends_BC = token_BC == self.vocabulary.eos
            # In most steps, only here the host waits for the device.
            row_F, rank_F = (ends_BC & (log_prob_BC > -torch.inf))[:, :size].nonzero(as_tuple=True)
            if len(row_F):
                parent_F = row_F * live.width + parent_BC[row_F, rank_F]
                self._record(live, group, parent_F.tolist(), log_prob_BC[row_F, rank_F].tolist())
            done = [sentence.counts[group] >= size for sentence in sentences]
            if self.groups > 1 and any(done):
                ends_BC = ends_BC | torch.tensor(done, device=ends_BC.device).unsqueeze(1)
            rank_BN, order_BN = rank_BC.masked_fill(ends_BC, -torch.inf).topk(size, dim=1)
            token_BN, log_prob_BN = token_BC.gather(1, order_BN), rank_BN
            if self.groups > 1:
                alive_BN = rank_BN > -torch.inf
                log_prob_BN = log_prob_BC.gather(1, order_BN).masked_fill(~alive_BN, -torch.inf)
                used_BV = torch.zeros_like(total_BWV[:, 0]) if used_BV is None else used_BV
                used_BV.scatter_add_(1, token_BN, alive_BN.to(used_BV.dtype))
            parts.append((parent_BC.gather(1, order_BN), token_BN, log_prob_BN))
        joined = parts[0] if len(parts) == 1 else [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]
        parent_BK, token_BK, log_prob_BK = joined
        first_B = torch.arange(0, len(logits_RV), live.width, device=parent_BK.device)
        row_BK = parent_BK + first_B.unsqueeze(1)
        return live.extended(self._unfinished(sentences, live.length), row_BK, token_BK, log_prob_BK)

    def finish(self, sentence: BeamSentence) -> list[Hypothesis]:
        """Return the best hypotheses of all groups."""
        return best_of(sentence.finished.values(), self.beam)

    def extended(self, live: Live[BeamSentence], logits_RV: Tensor) -> Tensor:
        """Return the log-probability of each hypothesis extended by each token; -inf for what is forbidden.

        Shape: -> (R,V)
        """
        eos, log_prob_R = self.vocabulary.eos, live.log_prob_RT[:, -1]
        log_prob_RV = torch.log_softmax(logits_RV, dim=1)
        eos_R = log_prob_RV[:, eos].clone()
        live.forbid(log_prob_RV)
        closing = _closing(live)
        if not any(closing):
            return log_prob_RV.add_(log_prob_R.unsqueeze(1))
        # At its length limit a hypothesis may only end, and no rule forbids that; rules still hold for the others.
        closing_R = torch.tensor(closing, device=log_prob_R.device).repeat_interleave(live.width)
        log_prob_RV += log_prob_R.masked_fill(closing_R, -torch.inf).unsqueeze(1)
        log_prob_RV[:, eos] = torch.where(closing_R, eos_R + log_prob_R, log_prob_RV[:, eos])
        return log_prob_RV

    def _is_native(self, live: Live[BeamSentence], logits_RV: Tensor) -> bool:
        """Return True if native code decodes, and can extend: one group, and no hypothesis at its limit."""
        if self.native is None or self.groups > 1 or not logits_RV.is_contiguous():
            return False
        return 2 * self.size <= live.width * logits_RV.shape[1] and not any(_closing(live))

    def _extended_natively(self, live: Live[BeamSentence], logits_RV: Tensor) -> Extensions:
        """Extend as :meth:`extend` does. The log-probabilities of all extensions are not written."""
        assert self.native is not None
        rules, log_sum_R = live.rules, None
        if rules.read_tokens(live.length):
            log_sum_R = self.native.log_sums(logits_RV)
            live.forbid(logits_RV)
        so_far = logits_RV, log_sum_R, live.tokens_RT, live.log_prob_RT, rules.never
        found = self.native.extend(*so_far, len(live.sentences), self.size, self.vocabulary.eos)
        if found.ended:
            self._record(live, 0, found.ended, found.ended_log_probs)
        unfinished = self._unfinished(live.sentences, live.length)
        return Extensions(unfinished, found.row_BK, found.tokens_BKT, found.log_prob_BKT)

    def _unfinished(self, sentences: Sequence[BeamSentence], length: int) -> list[bool]:
        return [sentence.limit > length and min(sentence.counts) < self.size for sentence in sentences]

    def _record(self, live: Live[BeamSentence], group: int, rows: Sequence[int], log_probs: Sequence[float]) -> None:
        """Record the hypotheses of a group that finish, which are those of these rows and EOS."""
        ended = live.ended(rows, log_probs)
        for row, (tokens, by_token), log_prob in zip(rows, ended, log_probs, strict=True):
            self._end(live.sentences[row // live.width], group, tokens, log_prob, by_token)

    def _end(
        self, sentence: BeamSentence, group: int, tokens: list[int], log_prob: float, by_token: tuple[float, ...]
    ) -> None:
        sentence.counts[group] += 1
        score = log_prob / self.penalty(len(tokens) + 1)
        sentence.finished.setdefault(tuple(tokens), Hypothesis(tokens, score, log_prob, token_log_probs=by_token))


def _closing(live: Live[BeamSentence]) -> list[bool]:
    """Return True for each sentence whose hypotheses are at their length limit."""
    return [sentence.limit == live.length for sentence in live.sentences]
