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

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.deep_shallow_score import ALPHA, EXITS, EXPONENT, total_of
from deepspeed_nmt.search.base import MAX_EXPONENT, Hypothesis, Request
from deepspeed_nmt.search.beam import BeamSearch, BeamSettings
from deepspeed_nmt.search.forced import token_log_probs

_LogProbs = dict[tuple[int, ...], float]
"""Log-probabilities (nats) of candidates by their tokens."""


class DeepShallowConfig(BeamSettings):
    """Settings of deep-shallow decoding."""

    needs_exits: ClassVar[tuple[str, ...]] = EXITS
    lists: ClassVar[int] = len(needs_exits)
    name: Literal["deep_shallow"] = "deep_shallow"
    alpha: float = Field(default=ALPHA, ge=0.0, le=1.0, description="weight of the exit that proposed a candidate")
    exponent: float = Field(
        default=EXPONENT, ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="exponent of length + 1 in the total"
    )


class DeepShallow:
    """Deep-shallow decoding with a model that has the exits ``deep`` and ``shallow``.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.

    Raises:
        ConfigError: if the model has no such exits.
    """

    def __init__(self, config: DeepShallowConfig, model: TranslationModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.models = [model.at_exit(name) for name in config.needs_exits]
        self.searches = [BeamSearch(config, each, vocabulary) for each in self.models]
        self.vocabulary = vocabulary

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences into the candidates of both exits, best first.

        See :meth:`RequestSearch.search`.
        """
        lists = [search.search(source_BS, padded, requests) for search in self.searches]
        own = [[{tuple(each.tokens): each.log_prob for each in one} for one in each_list] for each_list in lists]
        scores = [
            self._completed(model, ours, theirs, source_BS, padded)
            for model, ours, theirs in zip(self.models, own, reversed(own), strict=True)
        ]
        results = []
        for row, (deep, shallow) in enumerate(zip(*own, strict=True)):
            found = [
                self._hypothesis(
                    tokens, [score[row][tokens] for score in scores], [tokens in deep, tokens in shallow]
                )
                for tokens in {**deep, **shallow}
            ]
            results.append(sorted(found, key=lambda hypothesis: -hypothesis.score))
        return results

    def _completed(
        self, model: TranslationModel, ours: list[_LogProbs], theirs: list[_LogProbs], source_BS: Tensor, padded: bool
    ) -> list[_LogProbs]:
        """Return the log-probabilities of all candidates by a model, which has scored its own in its search.

        Args:
            model: at one of the exits.
            ours: log-probabilities of its own candidates of each sentence.
            theirs: candidates of the other exit.
            source_BS: source tokens.
            padded: False promises that no position is padding.
        """
        missing = [[each for each in other if each not in own] for own, other in zip(ours, theirs, strict=True)]
        scored = token_log_probs([model], self.vocabulary, source_BS, padded, missing)
        return [
            own | {tokens: math.fsum(log_probs) for tokens, log_probs in zip(asked, found, strict=True)}
            for own, asked, found in zip(ours, missing, scored, strict=True)
        ]

    def _hypothesis(self, tokens: tuple[int, ...], log_probs: list[float], proposed: list[bool]) -> Hypothesis:
        """Return a candidate with its total.

        Args:
            tokens: of the candidate.
            log_probs: its log-probability by each exit.
            proposed: for each exit, True if it proposed the candidate.
        """
        length = len(tokens) + 1
        means = [log_prob / length for log_prob in log_probs]
        total = max(
            total_of(means[own], means[1 - own], length, self.config.alpha, self.config.exponent)
            for own in range(2)
            if proposed[own]
        )
        names = self.config.needs_exits
        features = dict(zip(names, means, strict=True))
        features |= {f"by_{name}": float(by) for name, by in zip(names, proposed, strict=True)}
        return Hypothesis(list(tokens), total, log_probs[0], features)
