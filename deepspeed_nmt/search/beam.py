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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import PENALTY_NAMES, Hypothesis, LengthPenalty, PenaltyName, Request
from deepspeed_nmt.search.left_to_right import (
    Extensions,
    Forbid,
    LeftToRightSettings,
    TokenRules,
    best_extensions,
    best_of,
    bounded_requests,
    extended,
    never_predicted,
    rows_of,
    survivors,
)


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
        self._never = never_predicted(vocabulary, model)

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
        requests, limits = bounded_requests(self.config, self.model, self.vocabulary, source_BS, requests)
        if not limits:
            return []
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
            forbid = None if rules is None else rules.after(live.tokens_BWT.flatten(0, 1), numbers)
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
        return [best_of(hypotheses, self.config.beam) for hypotheses in finished]

    def _extend(self, live: _Live, logits_RV: Tensor, closing: list[bool], forbid: Forbid | None) -> Extensions:
        """Find the best 2K extensions of each sentence.

        Args:
            live: unfinished hypotheses.
            logits_RV: logits of their next tokens.
            closing: for each sentence, True if only EOS may follow.
            forbid: the rules of the next token; None if there are none.
        """
        eos, device = self.vocabulary.eos, logits_RV.device
        sentences, width = live.log_prob_BW.shape
        closing_R, never = rows_of(closing, width, device), self._never.to(device)
        log_prob_RV = extended(logits_RV, live.log_prob_BW.flatten(), never, eos, forbid, closing_R)
        return best_extensions(log_prob_RV, sentences, self.config.beam, eos)

    def _ended(self, live: _Live, extensions: Extensions, length: int) -> Iterator[tuple[int, Hypothesis]]:
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

    def _survivors(self, live: _Live, extensions: Extensions, kept_B: Tensor | None) -> tuple[_Live, Tensor]:
        """Select the best K unfinished extensions of sentences ``kept_B`` (None: all) and the rows they extend."""
        log_prob_BK, token_BK, parent_BK = survivors(extensions, self.config.beam)
        sentences, width, _ = live.tokens_BWT.shape
        first_row_B1 = torch.arange(sentences, device=parent_BK.device).unsqueeze(1) * width
        row_BK = first_row_B1 + parent_BK
        if kept_B is not None:
            log_prob_BK, token_BK, row_BK = (x.index_select(0, kept_B) for x in (log_prob_BK, token_BK, row_BK))
        tokens_BKT = live.tokens_BWT.flatten(0, 1)[row_BK]
        tokens_BKT = torch.cat([tokens_BKT, token_BK.unsqueeze(2)], dim=2)
        return _Live(tokens_BKT, log_prob_BK), row_BK.flatten()
