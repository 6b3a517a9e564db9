"""The interface of all searches, and their results.

Legend: B sentences, S source length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from deepspeed_nmt.search.alignment import Links

from deepspeed_nmt.errors import CheckpointError, DataError


class MisalignedError(DataError):
    """A line beside the source that is missing, unexpected, or cannot be used.

    It is raised after all lines before it have been translated.
    """


@dataclass(frozen=True)
class Request:
    """Inputs of a search for one sentence, besides its source.

    Attributes:
        line: number of the sentence in its text, from 0. The random choices for a sentence are a function of it.
        prefix: tokens with which the translation begins.
        constraints: phrases, each a sequence of tokens, that the translation contains.
    """

    line: int = 0
    prefix: tuple[int, ...] = ()
    constraints: tuple[tuple[int, ...], ...] = ()


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
        token_scores: log-probability (nats) of each token, given the tokens before it, and of the EOS after them;
            none for an empty line. None if they were not asked for.
        alignment: pairs of a word of the source and a word of the text that are linked, from 0, in ascending order;
            see :mod:`deepspeed_nmt.search.alignment`. None if it was not asked for.
    """

    text: str
    score: float
    tokens: list[int]
    log_prob: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)
    token_scores: tuple[float, ...] | None = None
    alignment: Links | None = None


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


class RequestSearch(Search, Protocol):
    """A search that takes a request for each sentence: its configuration names fields in ``takes``."""

    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`Search.search`.

        Args:
            source_BS: source tokens.
            padded: False promises that no position is padding.
            requests: one for each sentence; None for requests without prefixes and constraints, of lines 0, 1 and so
                on.
        """
        ...


def or_default(requests: Sequence[Request] | None, sentences: int) -> Sequence[Request]:
    """Return the requests of a batch, or those of its lines 0, 1 and so on if there are none."""
    if requests is None:
        return [Request(line) for line in range(sentences)]
    assert len(requests) == sentences, "every sentence needs a request"
    return requests


def check_finite(log_prob: float) -> None:
    """Check a log-probability that a model predicts.

    Raises:
        CheckpointError: if it is no finite number.
    """
    if not math.isfinite(log_prob):
        raise not_finite()


def not_finite() -> CheckpointError:
    """Return the error of a model that predicts numbers that are not finite."""
    return CheckpointError(
        "the model must predict finite numbers, but predicts NaN or infinity for a sentence; its weights are damaged "
        "or overflow: translate with another checkpoint, or in fp32"
    )


@runtime_checkable
class RanksTexts(Protocol):
    """A search that ranks its hypotheses by their texts."""

    def rank(self, hypotheses: Sequence[Hypothesis], texts: Sequence[str]) -> list[tuple[Hypothesis, str]]:
        """Rank the hypotheses of a sentence.

        Args:
            hypotheses: found by the search.
            texts: their texts.

        Returns:
            Different hypotheses with their texts, best first, at least one.
        """
        ...
