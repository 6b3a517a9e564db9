"""Diverse beam search (Vijayakumar et al., "Diverse Beam Search", 2016), with Hamming diversity.

The beam is divided into groups of equal size, each of which is a beam search of its own. In each step the groups
follow one another, and a token costs ``diversity`` for each hypothesis of an earlier group that continues with it in
this step. The cost decides only which extensions live on or finish in this step: log-probabilities and scores are
those of the model. EOS costs nothing, because groups that must not end at the same time would differ in length
instead of words.

A sentence is done when every group has finished as many hypotheses as it has places, or at its length limit. One
group is beam search.

Legend: B sentences, S source length, V vocabulary, K beam, G groups, N hypotheses of a group (1 before the first
step, then K / G), W live hypotheses of a sentence (1, then K), R rows = B x W, C extensions looked at, T target
length so far (BOS included).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import option
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty, Request
from deepspeed_nmt.search.beam import BeamSettings
from deepspeed_nmt.search.left_to_right import (
    TokenRules,
    best_of,
    bounded_requests,
    extended,
    largest,
    never_predicted,
    rows_of,
)


class DiverseBeamConfig(BeamSettings):
    """Settings of diverse beam search."""

    name: Literal["diverse_beam"] = "diverse_beam"
    groups: int = Field(
        default=0,
        ge=0,
        le=MAX_HYPOTHESES,
        description="groups of hypotheses (G), a divisor of the beam; 0: the beam",
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
class _Sentence:
    """A sentence in progress.

    Attributes:
        number: of the sentence in the batch.
        limit: most tokens of its translations, EOS included.
        finished: number of finished hypotheses of each group.
    """

    number: int
    limit: int
    finished: list[int]


class DiverseBeam:
    """Diverse beam search with one model.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.
    """

    def __init__(self, config: DiverseBeamConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.groups = config.groups or config.beam
        self.penalty = LengthPenalty.parse(config.length_penalty)
        self._never = never_predicted(vocabulary, model)

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        Returns:
            For each sentence at least one and at most ``beam`` different hypotheses of all groups, best first.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        requests, limits = bounded_requests(self.config, self.model, self.vocabulary, source_BS, requests)
        if not limits:
            return []
        device, never = source_BS.device, self._never.to(source_BS.device)
        rules = TokenRules.of(self.config, self.vocabulary, requests, device)
        sentences = [_Sentence(number, limit, [0] * self.groups) for number, limit in enumerate(limits)]
        found: list[dict[tuple[int, ...], Hypothesis]] = [{} for _ in limits]
        memory, cache = self.model.encode(source_BS, padded), self.model.begin()
        tokens_BWT = source_BS.new_full((len(limits), 1, 1), self.vocabulary.bos)
        log_prob_BW = torch.zeros(len(limits), 1, device=device)
        for length in count(1):
            logits_RV = self.model.step(tokens_BWT[:, :, -1].flatten(), memory, cache)
            closing_R = rows_of([each.limit == length for each in sentences], tokens_BWT.shape[1], device)
            numbers = [each.number for each in sentences]
            forbid = None if rules is None else rules.after(tokens_BWT.flatten(0, 1), numbers)
            total_RV = extended(logits_RV, log_prob_BW.flatten(), never, self.vocabulary.eos, forbid, closing_R)
            total_BWV = total_RV.view(*tokens_BWT.shape[:2], -1)
            survivors = self._step(total_BWV, tokens_BWT, sentences, found, length)
            kept = [
                row
                for row, each in enumerate(sentences)
                if each.limit > length and min(each.finished) < self.config.beam // self.groups
            ]
            if not kept:
                break
            kept_B = torch.tensor(kept, device=device)
            sentences = [sentences[row] for row in kept]
            log_prob_BW, token_BW, parent_BW = (x.index_select(0, kept_B) for x in survivors)
            width = tokens_BWT.shape[1]
            rows_R = (kept_B.unsqueeze(1) * width + parent_BW).flatten()
            tokens_RT = torch.cat([tokens_BWT.flatten(0, 1)[rows_R], token_BW.view(-1, 1)], dim=1)
            tokens_BWT = tokens_RT.view(len(kept), self.config.beam, -1)
            everything = len(kept) == total_BWV.shape[0]
            memory = memory if everything else memory.select(kept_B)
            cache.select(rows_R, None if everything else kept_B)
        return [best_of(each.values(), self.config.beam) for each in found]

    def _step(
        self,
        total_BWV: Tensor,
        tokens_BWT: Tensor,
        sentences: Sequence[_Sentence],
        found: list[dict[tuple[int, ...], Hypothesis]],
        length: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Extend all groups by a token, and record the hypotheses that finish.

        Args:
            total_BWV: log-probability of each hypothesis extended by each token.
            tokens_BWT: tokens of the hypotheses.
            sentences: in progress.
            found: finished hypotheses of each sentence by their tokens.
            length: of the extended hypotheses.

        Returns:
            Log-probability, last token and parent of the live hypotheses of all groups. Shape: -> three of (B,K)
        """
        size, eos = self.config.beam // self.groups, self.vocabulary.eos
        used_BV, vocabulary = torch.zeros_like(total_BWV[:, 0]), total_BWV.shape[2]
        parts = []
        for group in range(self.groups):
            first = 0 if length == 1 else group * size
            width = 1 if length == 1 else size
            total_BNV = total_BWV[:, first : first + width]
            ranked_BC = (total_BNV - self.config.diversity * used_BV.unsqueeze(1)).flatten(1)
            rank_BC, index_BC = largest(ranked_BC, vocabulary, 2 * size)
            log_prob_BC = total_BNV.flatten(1).gather(1, index_BC).masked_fill(rank_BC == -torch.inf, -torch.inf)
            parent_BC, token_BC = first + index_BC // vocabulary, index_BC % vocabulary
            ends_BC = (token_BC == eos) & log_prob_BC.isfinite()
            self._finish(ends_BC[:, :size], log_prob_BC, parent_BC, tokens_BWT, sentences, found, (group, length))
            done_B = torch.tensor([each.finished[group] >= size for each in sentences], device=rank_BC.device)
            open_BC = rank_BC.masked_fill((token_BC == eos) | done_B.unsqueeze(1), -torch.inf)
            order_BN = open_BC.topk(size, dim=1).indices
            alive_BN = open_BC.gather(1, order_BN).isfinite()
            token_BN = token_BC.gather(1, order_BN)
            used_BV.scatter_add_(1, token_BN, alive_BN.to(used_BV.dtype))
            live_BN = log_prob_BC.gather(1, order_BN).masked_fill(~alive_BN, -torch.inf)
            parts.append((live_BN, token_BN, parent_BC.gather(1, order_BN)))
        log_prob_BK, token_BK, parent_BK = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return log_prob_BK, token_BK, parent_BK

    def _finish(
        self,
        ends_BN: Tensor,
        log_prob_BC: Tensor,
        parent_BC: Tensor,
        tokens_BWT: Tensor,
        sentences: Sequence[_Sentence],
        found: list[dict[tuple[int, ...], Hypothesis]],
        at: tuple[int, int],
    ) -> None:
        """Record the hypotheses of a group that finish.

        Args:
            ends_BN: True for extensions by EOS that finish.
            log_prob_BC: log-probability of each extension.
            parent_BC: the hypothesis that it extends.
            tokens_BWT: tokens of all hypotheses.
            sentences: in progress.
            found: finished hypotheses of each sentence by their tokens, of all groups.
            at: the group, and the length of the hypotheses, EOS included.
        """
        group, length = at
        row_N, rank_N = ends_BN.nonzero(as_tuple=True)
        if row_N.shape[0] == 0:
            return
        tokens_NT = tokens_BWT[row_N, parent_BC[row_N, rank_N], 1:]
        pairs = zip(row_N.tolist(), tokens_NT.tolist(), log_prob_BC[row_N, rank_N].tolist(), strict=True)
        for row, tokens, log_prob in pairs:
            sentence = sentences[row]
            sentence.finished[group] += 1
            hypothesis = Hypothesis(tokens, log_prob / self.penalty(length), log_prob)
            found[sentence.number].setdefault(tuple(tokens), hypothesis)
