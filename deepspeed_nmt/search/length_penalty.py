"""Length penalties, by which log-probabilities of translations of different lengths are compared, and length bounds.

A hypothesis of n tokens, *its end-of-sentence token included*, scores log p / penalty(n). Log-probabilities are
negative sums over tokens, so a penalty that grows with n compensates for the cost of each further token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

from deepspeed_nmt.errors import ConfigError, shown

MAX_EXPONENT = 10.0
"""Far above every useful exponent, and far below those that overflow at thousands of tokens."""

_FORMULAS: dict[str, Callable[[int, float], float]] = {
    "gnmt": lambda length, exponent: ((5.0 + length) / 6.0) ** exponent,
    "power": lambda length, exponent: float(length) ** exponent,
}


@dataclass(frozen=True)
class LengthPenalty:
    """A length penalty.

    - ``gnmt:A``:  ((5 + n) / 6)^A (Wu et al., "Google's Neural Machine Translation System", 2016, eq. 14)
    - ``power:A``: n^A
    - ``mean``:    n, the mean log-probability of a token; the same as power:1
    - ``none``:    1, the bare log-probability; the same as power:0

    Attributes:
        family: "gnmt" or "power".
        exponent: the exponent A.
    """

    family: str
    exponent: float

    @classmethod
    def parse(cls, text: str) -> LengthPenalty:
        """Parse the name of a penalty.

        Raises:
            ConfigError: if there is no such penalty, or its exponent is not a number from 0 to 10.
        """
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
        return _FORMULAS[self.family](length, self.exponent)


def length_bound(source_tokens: int, ratio: float, extra: int, most: int) -> int:
    """Return the most tokens that a translation may have, EOS included.

    Args:
        source_tokens: tokens of the source, EOS included.
        ratio: target tokens for each source token (``max_length_ratio``).
        extra: target tokens on top of the ratio (``max_length_extra``).
        most: bound whatever the source is (``max_length``); 0 for none.
    """
    bound = max(1, int(ratio * source_tokens) + extra)
    return min(bound, most or bound)


def _known(name: str) -> str:
    LengthPenalty.parse(name)
    return name


PenaltyName = Annotated[str, AfterValidator(_known)]
"""Type of settings that name a length penalty."""
PENALTY_NAMES = "gnmt:A ((5 + length) / 6)^A, power:A length^A, mean, or none"
"""Description of the values of such settings."""
