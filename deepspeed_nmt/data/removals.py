"""Counts and examples of pairs that cleaning removed."""

from __future__ import annotations

from collections import Counter

EXAMPLES = 3
"""Removed pairs that are kept as examples of each reason: the first ones."""
_SHOWN = 200


class Removals:
    """Removed pairs by reason, counted, with examples. Batches are counted apart, and added in order.

    Attributes:
        counts: number of removed pairs by reason.
        examples: the first of them, as (source, target), shortened, and with escapes for what is not printable.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[tuple[str, str]]] = {}

    def add(self, reason: str, *pair: str | bytes) -> None:
        """Count a removed pair: source and target, if they are known. Bytes are text that may not be UTF-8."""
        self.counts[reason] += 1
        if pair and self.lacks_examples(reason):
            source, target = map(_excerpt, pair)
            self.examples.setdefault(reason, []).append((source, target))

    def lacks_examples(self, reason: str) -> bool:
        """Return True if another example of a reason is kept."""
        return len(self.examples.get(reason, ())) < EXAMPLES

    def merge(self, later: Removals) -> None:
        """Add the removals of a later batch."""
        self.counts.update(later.counts)
        for reason, more in later.examples.items():
            examples = self.examples.setdefault(reason, [])
            examples += more[: EXAMPLES - len(examples)]


def _excerpt(line: str | bytes) -> str:
    """Return the beginning of a line, printable, of 200 characters before escaping."""
    text = line[: 4 * _SHOWN].decode("utf-8", errors="backslashreplace") if isinstance(line, bytes) else line
    more = "..." if len(line) > 4 * _SHOWN or len(text) > _SHOWN else ""
    shown = "".join(each if each.isprintable() else _escaped(each) for each in text[:_SHOWN])
    return shown + more


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
