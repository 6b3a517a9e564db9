"""Deep-shallow decoding of Wu et al., "Depth Growing for Neural Machine Translation" (2019).

The deep and the shallow exit of a model propose candidates, and both judge them. A beam search from each exit gives
two lists. Both exits score every candidate by the mean log-probability of its tokens and EOS. The candidate of the
union with the highest

    (alpha own + (1 - alpha) other) (length + 1)^exponent

wins, where *own* is the score by the exit that proposed it, *other* that by the other exit, and length + 1 counts the
EOS. A candidate that both exits proposed gets the higher of its two totals. If totals are equal, a candidate of the
deep exit wins. :mod:`deepspeed_nmt.deep_shallow_score` has the total and its defaults.

The candidates and their scores do not depend on alpha and the exponent, so one n-best list of all candidates suffices
to choose both.

Legend: B sentences, S source length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.deep_shallow_score import ALPHA, EXITS, EXPONENT, total_of
from deepspeed_nmt.search.base import MAX_EXPONENT, Hypothesis, Request
from deepspeed_nmt.search.beam import BeamSearch, ExitsSettings
from deepspeed_nmt.search.forced import token_log_probs


class DeepShallowConfig(ExitsSettings):
    """Settings of deep-shallow decoding."""

    needs_exits: ClassVar[tuple[str, ...]] = EXITS
    lists: ClassVar[int] = len(EXITS)
    name: Literal["deep_shallow"] = "deep_shallow"
    alpha: float = Field(default=ALPHA, ge=0.0, le=1.0, description="weight of the exit that proposed a candidate")
    exponent: float = Field(
        default=EXPONENT, ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="exponent of length + 1 in the total"
    )


class DeepShallow:
    """Deep-shallow decoding with a model that has the exits ``deep`` and ``shallow``."""

    def __init__(self, config: DeepShallowConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.models = [model.at_exit(name) for name in EXITS]
        self.searches = [BeamSearch(config, exit, vocabulary) for exit in self.models]
        self.vocabulary = vocabulary

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences into the candidates of both exits, best first.

        See :meth:`RequestSearch.search`.
        """
        # For each exit and sentence, the log-probabilities (nats) of candidates by their tokens.
        own = [
            [{tuple(new.tokens): new.log_prob for new in beam} for beam in search.search(source_BS, padded, requests)]
            for search in self.searches
        ]
        totals = []
        for model, ours, theirs in zip(self.models, own, reversed(own), strict=True):
            missing = [
                [tokens for tokens in other if tokens not in known] for known, other in zip(ours, theirs, strict=True)
            ]
            scored = token_log_probs(model, self.vocabulary, source_BS, padded, missing)
            sums = (dict(zip(new, map(math.fsum, p), strict=True)) for new, p in zip(missing, scored, strict=True))
            totals.append([known | new for known, new in zip(ours, sums, strict=True)])
        results = []
        for row, proposed in enumerate(zip(*own, strict=True)):
            candidates = [
                self._hypothesis(tokens, [total[row][tokens] for total in totals], [tokens in by for by in proposed])
                for tokens in {**proposed[0], **proposed[1]}
            ]
            results.append(sorted(candidates, key=lambda hypothesis: -hypothesis.score))
        return results

    def _hypothesis(self, tokens: tuple[int, ...], log_probs: list[float], proposed: list[bool]) -> Hypothesis:
        """Return a candidate, given for each exit its log-probability, and True if the exit proposed it."""
        length = len(tokens) + 1
        means = [log_prob / length for log_prob in log_probs]
        total = max(
            total_of(means[own], means[1 - own], length, self.config.alpha, self.config.exponent)
            for own in range(2)
            if proposed[own]
        )
        features = dict(zip(EXITS, means, strict=True))
        features |= {f"by_{name}": float(by) for name, by in zip(EXITS, proposed, strict=True)}
        return Hypothesis(list(tokens), total, log_probs[0], features)
