"""The interface of all searches, and their results.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Attributes:
        tokens: tokens without BOS and EOS.
        score: number by which a search ranks hypotheses; the higher the better.
        log_prob: log-probability (nats) of the tokens and the EOS after them.
        features: further scores by name, which n-best lists show.
    """

    tokens: list[int]
    score: float
    log_prob: float
    features: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Translation:
    """One translation of one line.

    Attributes:
        text: the translation.
        score: its score in the search; 0 for an empty line.
        tokens: its tokens, without BOS and EOS.
        log_prob: log-probability (nats) of its tokens and the EOS; 0 for an empty line.
        features: further scores of the search by name; see :class:`Hypothesis`.
    """

    text: str
    score: float
    tokens: list[int]
    log_prob: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)


class Search(Protocol):
    """A search for translations with one model, which must be in eval mode."""

    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences.

        Args:
            source_BS: source tokens on the model's device, each row ending in EOS, padded on the right.
            padded: False promises that no position is padding.

        Returns:
            For each sentence at least one hypothesis, best first.
        """
        ...
