"""Deep-shallow decoding of Wu et al., "Depth Growing for Neural Machine Translation" (2019).

A deep and a shallow net propose candidates, and both judge them. A beam search with each net gives two lists. Both
nets score every candidate by the mean log-probability of its tokens and EOS. The candidate of the union with the
highest

    (alpha own + (1 - alpha) other) (length + 1)^exponent

wins, where *own* is the score of the net that proposed it, *other* that of the other net, and length + 1 counts the
EOS. A candidate that both nets proposed gets the higher of its two totals. If totals are equal, a candidate of the
deep net wins.

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
from deepspeed_nmt.search.base import Hypothesis, Request
from deepspeed_nmt.search.beam import BeamSearch, BeamSettings
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.length_penalty import MAX_EXPONENT

_LogProbs = dict[tuple[int, ...], float]
"""Log-probabilities (nats) of candidates by their tokens."""


class DeepShallowConfig(BeamSettings):
    """Settings of deep-shallow decoding."""

    needs_exits: ClassVar[tuple[str, ...]] = ("deep", "shallow")
    lists: ClassVar[int] = len(needs_exits)
    name: Literal["deep_shallow"] = "deep_shallow"
    alpha: float = Field(default=0.5, ge=0.0, le=1.0, description="weight of the exit that proposed a candidate")
    exponent: float = Field(
        default=0.4, ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="exponent of length + 1 in the total"
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
        self.nets = [model.at_exit(name) for name in config.needs_exits]
        self.searches = [BeamSearch(config, net, vocabulary) for net in self.nets]
        self.vocabulary = vocabulary

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences into the candidates of both nets, best first.

        See :meth:`RequestSearch.search`.
        """
        lists = [search.search(source_BS, padded, requests) for search in self.searches]
        own = [[{tuple(each.tokens): each.log_prob for each in one} for one in each_list] for each_list in lists]
        scores = [
            self._completed(net, ours, theirs, source_BS, padded)
            for net, ours, theirs in zip(self.nets, own, reversed(own), strict=True)
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
        self, net: TranslationModel, ours: list[_LogProbs], theirs: list[_LogProbs], source_BS: Tensor, padded: bool
    ) -> list[_LogProbs]:
        """Return the log-probabilities of all candidates under a net, which has scored its own in its search.

        Args:
            net: the net.
            ours: log-probabilities of its own candidates of each sentence.
            theirs: candidates of the other net.
            source_BS: source tokens.
            padded: False promises that no position is padding.
        """
        missing = [[each for each in other if each not in own] for own, other in zip(ours, theirs, strict=True)]
        scored = token_log_probs([net], self.vocabulary, source_BS, padded, missing)
        return [
            own | {tokens: math.fsum(log_probs) for tokens, log_probs in zip(asked, found, strict=True)}
            for own, asked, found in zip(ours, missing, scored, strict=True)
        ]

    def _hypothesis(self, tokens: tuple[int, ...], log_probs: list[float], proposed: list[bool]) -> Hypothesis:
        """Return a candidate with its total.

        Args:
            tokens: of the candidate.
            log_probs: its log-probability under each net.
            proposed: for each net, True if it proposed the candidate.
        """
        alpha, length = self.config.alpha, len(tokens) + 1
        means = [log_prob / length for log_prob in log_probs]
        total = max(
            (alpha * means[own] + (1.0 - alpha) * means[1 - own]) * length**self.config.exponent
            for own in range(2)
            if proposed[own]
        )
        names = self.config.needs_exits
        features = dict(zip(names, means, strict=True))
        features |= {f"by_{name}": float(by) for name, by in zip(names, proposed, strict=True)}
        return Hypothesis(list(tokens), total, log_probs[0], features)
