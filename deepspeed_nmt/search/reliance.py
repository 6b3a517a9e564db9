"""Doubtful translations: by how much the source raises the probability of each token, and other signs of doubt.

The *reliance* of a token is log p(token | source, tokens before) - log p(token | empty source, tokens before), in
nats; that of a translation is the mean over its tokens and EOS. It is near 0 where the decoder goes on as a language
model would. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepspeed_nmt.text import shared_words

COVERED = 0.2
"""Attention, summed over a translation, with which a source token counts as covered.

The bound of Berard et al., "Naver Labs Europe's Systems for the WMT19 Machine Translation Robustness Task", 2019.
"""
DETACHED = 0.5
"""Share of the surprisal that the source removes, below which a translation is flagged as detached."""
REPEATING = 0.5
"""Repetition from which a translation is flagged as repeating."""
TRUNCATED = math.log(0.01)
"""Log-probability (nats) of EOS below which a translation is flagged as truncated."""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / max(1, len(values))


@dataclass(frozen=True)
class ScoredTranslation:
    """A translation with the log-probability of each of its tokens.

    Attributes:
        tokens: tokens without BOS and EOS; none for an empty translation.
        log_probs: log-probability (nats) of each token, given the source and the tokens before it, and of the EOS
            after them. Shape: (T + 1,)
        blind_log_probs: the same given a source without words; None if they were not requested.
    """

    tokens: list[int]
    log_probs: list[float]
    blind_log_probs: list[float] | None = None

    @property
    def log_prob(self) -> float:
        """Log-probability (nats) of the translation, EOS included."""
        return math.fsum(self.log_probs)

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability (nats) of a token, EOS included; minus it is the log of the perplexity."""
        return _mean(self.log_probs)

    @property
    def token_reliance(self) -> list[float] | None:
        """Rise of each token's log-probability (nats) by the source; near 0 where the model does without it."""
        if self.blind_log_probs is None:
            return None
        return [seen - blind for seen, blind in zip(self.log_probs, self.blind_log_probs, strict=True)]

    @property
    def reliance(self) -> float | None:
        """Mean of :attr:`token_reliance`; None if it was not requested."""
        return None if self.token_reliance is None else _mean(self.token_reliance)

    @property
    def source_share(self) -> float | None:
        """Share of the surprisal without the source, -sum log p(token | empty source), that the source removes."""
        if self.blind_log_probs is None:
            return None
        blind = -math.fsum(self.blind_log_probs)
        return (blind + self.log_prob) / blind if blind > 0.0 else 0.0


@dataclass(frozen=True)
class Reliance(ScoredTranslation):
    """A scored translation with further signs of doubt. That of an empty line has no tokens, and is not flagged.

    Attributes:
        coverage: share of the source tokens with a sum of attention of :data:`COVERED` or more, in the layer that
            aligns (1 - Attn-ign-SRC of Berard et al. 2019); None if nothing was aligned.
        repetition: see :func:`repetition`, above that of the source.
        copy: see :func:`~deepspeed_nmt.text.shared_words`.
    """

    coverage: float | None = None
    repetition: float = 0.0
    copy: float = 0.0

    @classmethod
    def of(
        cls,
        scored: ScoredTranslation,
        text: str,
        source: tuple[str, Sequence[int]],
        coverage: float | None,
    ) -> Reliance:
        """Return what a translation, its text, and the text and tokens of its source show."""
        line, source_tokens = source
        repeated = max(0.0, repetition(scored.tokens) - repetition(source_tokens))
        values = scored.tokens, scored.log_probs, scored.blind_log_probs
        return cls(*values, coverage, repeated, shared_words(line, text))

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons for doubt: detached, repeating, truncated."""
        if not self.log_probs:
            return ()
        signs = {
            "detached": self.source_share is not None and self.source_share < DETACHED,
            "repeating": self.repetition >= REPEATING,
            "truncated": self.log_probs[-1] < TRUNCATED,
        }
        return tuple(name for name, shown in signs.items() if shown)

    def fields(self, pieces: Sequence[str]) -> str:
        """Return the fields of a line of a file, separated by tabs, given the spelling of the tokens."""
        means = self.reliance or 0.0, self.source_share or 0.0, self.mean_log_prob
        numbers = *means, self.coverage, self.repetition, self.copy
        by_token = " ".join(pieces), joined(self.log_probs), joined(self.token_reliance or ())
        return "\t".join(
            (*("" if number is None else f"{number:.9g}" for number in numbers), ",".join(self.flags), *by_token)
        )


def repetition(tokens: Sequence[int]) -> float:
    """Return the share of the pairs of adjacent tokens that occurred before; 0 if there are none."""
    pairs = list(pairwise(tokens))
    return 1.0 - len(set(pairs)) / len(pairs) if pairs else 0.0


def joined(values: Iterable[float]) -> str:
    """Return numbers as they are written, separated by spaces."""
    return " ".join(f"{value:.9g}" for value in values)
