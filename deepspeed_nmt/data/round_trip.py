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


class RoundTrips:
    """A check of every k-th line of one side of a split.

    Args:
        tokenizer: that has encoded the lines.
        side: of the lines.
        total: number of lines of the split; about :data:`SAMPLE_LINES` of them are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, side: Side, total: int) -> None:
        self._tokenizer = tokenizer
        self._side = side
        self._every = max(1, -(-total // SAMPLE_LINES))
        self._seen = self._lines = self._changed = 0
        self._examples: list[tuple[str, str]] = []

    def add(self, texts: Iterable[str], encoded: Iterable[list[int]]) -> None:
        """Check lines against their tokens."""
        for text, tokens in zip(texts, encoded, strict=True):
            self._seen += 1
            if self._seen % self._every:
                continue
            # Decoding joins segmented text, which loses nothing.
            original = self._tokenizer.reference(text) if self._tokenizer.segmented else text
            decoded = self._tokenizer.decode(tokens, self._side)
            self._lines += 1
            if normalise_whitespace(decoded) == normalise_whitespace(original):
                continue
            self._changed += 1
            if len(self._examples) < EXAMPLES:
                self._examples.append((original, decoded))

    @property
    def result(self) -> RoundTrip:
        """The lines checked so far."""
        return RoundTrip(lines=self._lines, changed=self._changed, examples=tuple(self._examples))


def excerpts(original: str, decoded: str) -> str:
    """Return the places of two lines where they begin to differ, as ``original -> decoded``."""
    pairs = enumerate(itertools.zip_longest(original, decoded))
    start = max(0, next((place for place, (left, right) in pairs if left != right), 0) - _BEFORE)
    return " -> ".join(_excerpt(each, start) for each in (original, decoded))


def _excerpt(text: str, start: int) -> str:
    end = start + _SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
