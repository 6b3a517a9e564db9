"""Scores of deep-shallow decoding (Wu et al., "Depth Growing for Neural Machine Translation", 2019), without torch.

The search and the choice of its weights from n-best lists compute the same totals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = TypeVar("Numbers", float, NDArray[np.float64])

EXITS = ("deep", "shallow")
"""Exits of the two models."""
ALPHA, EXPONENT = 0.5, 0.4
"""Weight of the score of the model that proposed a candidate, and exponent of the length, of the paper."""


def total_of(own: Numbers, other: Numbers, length: Numbers, alpha: float, exponent: float) -> Numbers:
    """Return the totals by which candidates are ranked; the higher the better.

    ``own`` is the mean log-probability (nats) of a token by the model that proposed the candidate, ``other`` that by
    the other model, and ``length`` the number of tokens, EOS included.
    """
    total: Numbers = (alpha * own + (1.0 - alpha) * other) * length**exponent
    return total
