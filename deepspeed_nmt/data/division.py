"""Division of sentences among rows of limited size, for the packed layout.

Sentences have two lengths, and rows two sizes: of the source and of the target. Sentences go to rows one by one, the
longest first, each to the row that has most room where the sentence needs it. So rows are filled evenly on both
sides. Then sentences are exchanged until all fit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt.data.batching import Indices

Sizes = NDArray[np.int64]

_TRIED = 64
"""Sentences of a row among which one to exchange is sought."""
_EXCHANGES = 100
"""Most exchanges of sentences between rows until a division is given up."""


def divide(lengths: Sizes, room: Sizes) -> Indices | None:
    """Divide sentences among rows.

    Args:
        lengths: source and target length of each sentence. Shape: (sentences, 2)
        room: size of each row of the source and of the target. Shape: (rows, 2)

    Returns:
        The row of each sentence, or None if no division was found. Shape: (sentences,)
    """
    left = room.copy()
    # Sides count by the share of their room that is needed.
    weights = lengths * (lengths.sum(axis=0) / (1.0 + room.sum(axis=0)) / room.mean(axis=0) ** 2)
    row_of = np.empty(len(lengths), dtype=np.int64)
    for sentence in np.argsort(-weights.max(axis=1), kind="stable").tolist():
        length = lengths[sentence]
        useful = left @ weights[sentence]
        row = int(useful.argmax())
        if left[row, 0] < length[0] or left[row, 1] < length[1]:
            fits = (left >= length).all(axis=1)
            if fits.any():
                row = int(np.where(fits, useful, -np.inf).argmax())
        row_of[sentence] = row
        left[row] -= length
    if np.count_nonzero(left.min(axis=1) < 0) > _EXCHANGES:
        return None
    for _ in range(_EXCHANGES):
        fullest = int(left.min(axis=1).argmin())
        if left[fullest].min() >= 0:
            return row_of
        if not _exchange(lengths, row_of, left, fullest):
            return None
    return None


def _exchange(lengths: Sizes, row_of: Indices, left: Sizes, giver: int) -> bool:
    """Exchange a sentence of the fullest row, which is too full, for a sentence of the one with most room.

    That exchange is made after which least is missing. Return False if none helps.

    Args:
        lengths: of all sentences. Shape: (sentences, 2)
        row_of: row of each sentence; changed in place. Shape: (sentences,)
        left: tokens left in each row; changed in place. Shape: (rows, 2)
        giver: the fullest row.
    """
    side = int(left[giver].argmin())
    taker = int(left[:, side].argmax())
    given, taken = (_spread(np.flatnonzero(row_of == row)) for row in (giver, taker))
    if taker == giver or not len(taken):
        return False
    moved = lengths[given][:, None] - lengths[taken][None]  # Shape: (given, taken, 2)
    missing = np.minimum(left[giver] + moved, 0).sum(axis=2) + np.minimum(left[taker] - moved, 0).sum(axis=2)
    best = int(missing.argmax())
    if missing.flat[best] <= np.minimum(left[[giver, taker]], 0).sum():
        return False
    one, other = given[best // len(taken)], taken[best % len(taken)]
    row_of[one], row_of[other] = taker, giver
    left[giver] += lengths[one] - lengths[other]
    left[taker] -= lengths[one] - lengths[other]
    return True


def _spread(sentences: Indices) -> Indices:
    """Return at most _TRIED of some sentences, of all lengths."""
    return sentences[:: max(1, -(-len(sentences) // _TRIED))]
