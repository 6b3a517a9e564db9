"""Lines that do not survive encoding and decoding: no model with this vocabulary can read or write them exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from deepspeed_nmt.core.vocabulary import Side
from deepspeed_nmt.data.clean import normalise_whitespace
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.registry import Config

SAMPLE_LINES = 10_000
"""Lines of each side of a split that are decoded."""
EXAMPLES = 3
"""Changed lines that are kept as examples."""

_BEFORE, _SHOWN = 15, 50


class RoundTrip(Config):
    """Lines of one side of a split that encoding and decoding changes, apart from white space.

    Attributes:
        lines: number of lines tried.
        changed: number of those that change.
        examples: the first of them, each with what it becomes.
    """

    lines: int = 0
    changed: int = 0
    examples: tuple[tuple[str, str], ...] = ()

    def followed_by(self, other: RoundTrip) -> RoundTrip:
        """Return the sum of this and of later lines."""
        return RoundTrip(
            lines=self.lines + other.lines,
            changed=self.changed + other.changed,
            examples=(self.examples + other.examples)[:EXAMPLES],
        )


class RoundTrips:
    """A check of every k-th line of one side of a split. Lines have places, so that processes can share the work.

    Args:
        tokenizer: that has encoded the lines.
        side: of the lines.
        total: number of lines of the split; about :data:`SAMPLE_LINES` of them are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, side: Side, total: int) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._every = max(1, -(-total // SAMPLE_LINES))

    def check(self, places: Iterable[int], texts: Iterable[str], encoded: Iterable[list[int]]) -> RoundTrip:
        """Check lines against their tokens.

        Args:
            places: places of the lines in the split, from 0. Shape: (N,)
            texts: the lines. Shape: (N,)
            encoded: their tokens. Shape: (N,)
        """
        lines = changed = 0
        examples: list[tuple[str, str]] = []
        for place, text, tokens in zip(places, texts, encoded, strict=True):
            if (place + 1) % self._every:
                continue
            # Decoding joins segmented text, which loses nothing.
            original = self._tokenizer.reference(text) if self._tokenizer.segmented else text
            decoded = self._tokenizer.decode(tokens, self._side)
            lines += 1
            if normalise_whitespace(decoded) == normalise_whitespace(original):
                continue
            changed += 1
            if len(examples) < EXAMPLES:
                examples.append((original, decoded))
        return RoundTrip(lines=lines, changed=changed, examples=tuple(examples))


def excerpts(original: str, decoded: str) -> str:
    """Return the places of two lines where they begin to differ, as ``original -> decoded``."""
    pairs = enumerate(itertools.zip_longest(original, decoded))
    start = max(0, next((place for place, (left, right) in pairs if left != right), 0) - _BEFORE)
    return " -> ".join(_excerpt(each, start) for each in (original, decoded))


def _excerpt(text: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
