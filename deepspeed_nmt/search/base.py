"""The interface of all searches, their results, and length penalties. Nothing here imports torch.

A hypothesis of n tokens, *its end-of-sentence token included*, scores log p / penalty(n). Log-probabilities are
negative sums over tokens, so a penalty that grows with n compensates for the cost of each further token.

Legend: B sentences, S source length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

from pydantic import AfterValidator

from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError, shown
from deepspeed_nmt.search.reliance import Reliance

if TYPE_CHECKING:
    from torch import Tensor

Links = tuple[tuple[int, int], ...]
"""Pairs of a source word and a target word, from 0, in ascending order."""


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
        tags: number of tokens at the beginning of the prefix that do not count in the translation's length.
    """

    line: int = 0
    prefix: tuple[int, ...] = ()
    constraints: tuple[tuple[int, ...], ...] = ()
    tags: int = 0


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Attributes:
        tokens: tokens without BOS and EOS.
        score: number by which a search ranks hypotheses; the higher the better.
        log_prob: log-probability (nats) of the tokens and the EOS after them.
        features: further scores by name, which n-best lists show.
        token_log_probs: log-probability (nats) of each token, given the tokens before it, and of the EOS after them;
            None if the search does not keep them.
    """

    tokens: list[int]
    score: float
    log_prob: float
    features: Mapping[str, float] = field(default_factory=dict)
    token_log_probs: tuple[float, ...] | None = None


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
            none for an empty line. None if they were not requested.
        alignment: linked words of the source and the text; see :mod:`deepspeed_nmt.search.alignment`. None if it was
            not requested.
        reliance: by how much the source raises the probability of the tokens, and reasons for doubt. None if it was
            not requested.
    """

    text: str
    score: float
    tokens: list[int]
    log_prob: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)
    token_scores: tuple[float, ...] | None = None
    alignment: Links | None = None
    reliance: Reliance | None = None


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


class RequestSearch(Search, Protocol):
    """A search that takes a request for each sentence: its configuration names fields in ``takes``."""

    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences, with a request for each; see :meth:`Search.search`.

        None are those of lines 0, 1 and so on, without prefixes and constraints.
        """


def check_finite(log_prob: float) -> None:
    """Check that a log-probability that a model predicts is finite, or raise a CheckpointError."""
    if not math.isfinite(log_prob):
        raise CheckpointError(
            "the model predicts NaN or infinity for a sentence; its weights are damaged "
            "or overflow: translate with another checkpoint, or in fp32"
        )


@runtime_checkable
class RanksTexts(Protocol):
    """A search that ranks its hypotheses by their texts."""

    def rank(self, hypotheses: Sequence[Hypothesis], texts: Sequence[str]) -> list[Hypothesis]:
        """Rank the hypotheses of a sentence by their texts.

        Return one for each different text, best first, at least one.
        """


MAX_EXPONENT = 10.0
"""Far above every useful exponent, and far below those that overflow at thousands of tokens."""


@dataclass(frozen=True)
class LengthPenalty:
    """A length penalty.

    - ``gnmt:A``:  ((5 + n) / 6)^A (Wu et al., "Google's Neural Machine Translation System", 2016, eq. 14)
    - ``power:A``: n^A
    - ``mean``:    n, the mean log-probability of a token; the same as power:1
    - ``none``:    1, the bare log-probability; the same as power:0
    """

    family: str
    exponent: float

    @classmethod
    def parse(cls, text: str) -> LengthPenalty:
        """Parse the name of a penalty, or raise a ConfigError."""
        if text in ("mean", "none"):
            return cls("power", 1.0 if text == "mean" else 0.0)
        match = re.fullmatch(r"(gnmt|power):(\d+(?:\.\d*)?|\.\d+)", text, flags=re.ASCII)
        if match is None or float(match[2]) > MAX_EXPONENT:
            raise ConfigError(
                f"must be gnmt:A or power:A with A from 0 to {MAX_EXPONENT:g}, mean, or none, but is {shown(text)}; "
                "the usual one is gnmt:0.6"
            )
        return cls(match[1], float(match[2]))

    def __call__(self, length: int) -> float:
        """Compute the divisor for the log-probability of ``length`` tokens, the end-of-sentence token included."""
        base = (5.0 + length) / 6.0 if self.family == "gnmt" else float(length)
        return float(base**self.exponent)


def length_bound(source_tokens: int, ratio: float, extra: int, most: int) -> int:
    """Return min(ratio source_tokens + extra, most), the most tokens of a translation; ``most`` 0: no such bound."""
    bound = max(1, int(ratio * source_tokens) + extra)
    return min(bound, most or bound)


def _known(name: str) -> str:
    LengthPenalty.parse(name)
    return name


PenaltyName = Annotated[str, AfterValidator(_known)]
"""Type of settings that name a length penalty."""
PENALTY_NAMES = "gnmt:A ((5 + length) / 6)^A, power:A length^A, mean, or none"
"""Description of the values of such settings."""
