r"""Cleaning: removal of pairs that hurt training, with counts by reason.

Text is read as bytes and cut at ``\n`` only. Cutting at U+2028, U+0085 and similar characters, which occur inside
lines, would shift every later line against its translation.

Cleaning has two stages, because lengths are counted in tokens and the vocabulary is trained on clean text:
:meth:`PairCleaner.texts` checks the text, :meth:`PairCleaner.fits` token counts. A pair with several faults is
counted under the first of them in the order of :class:`Reason`, faults of the text first.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import compress, islice, repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from deepspeed_nmt.data.duplicates import Repetitions, TextOf, hashes_of
from deepspeed_nmt.data.filters import FilterConfigs, PairFilters
from deepspeed_nmt.data.removals import Removals
from deepspeed_nmt.data.unicode_rules import CONTROL, repair
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import TextForm

T = TypeVar("T")

# Control characters, and the replacement character, by which other programs replace bytes that they cannot decode.
_BAD_CHARACTER = re.compile(f"[{CONTROL}\ufffd]")
_SEGMENTED_WORD = re.compile(r"[^ \t\n\r\v\f]+")
_CHUNK_PAIRS = 1 << 13


class Reason(str, Enum):
    """Reasons to remove a pair; the value is the key in ``meta.json``."""

    UNDECODABLE = "undecodable"
    BAD_CHARACTER = "bad_character"
    EMPTY = "empty"
    IDENTICAL = "identical"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    TOO_SHORT = "too_short"
    RATIO = "ratio"


class CleaningConfig(Config):
    """Criteria for keeping pairs. Lengths are tokens of the vocabulary, without EOS."""

    max_length: int = Field(default=250, ge=1)
    """Longest sentence on either side (tokens)."""
    min_length: int = Field(default=1, ge=1)
    """Shortest sentence on either side (tokens)."""
    max_ratio: float = Field(default=3.0, ge=1.0)
    """Most tokens of the longer side per token of the shorter."""
    ratio_from: int = Field(default=10, ge=1)
    """The ratio is checked only if the longer side has more tokens: "Ja." may be translated as "That's true."."""
    keep_duplicates: bool = False
    """Keep every copy of a pair that occurs more than once."""
    remove_identical: bool = False
    """Remove pairs whose two sides are the same text: harmless names and numbers in small amounts."""

    def describe(self, reason: Reason) -> str:
        """Describe a reason under these settings, for the report."""
        return {
            Reason.UNDECODABLE: "not UTF-8",
            Reason.BAD_CHARACTER: "control characters or U+FFFD",
            Reason.EMPTY: "a side is empty",
            Reason.IDENTICAL: "source and target are the same",
            Reason.TOO_LONG: f"more than {self.max_length} tokens",
            Reason.DUPLICATE: "the same pair again",
            Reason.TOO_SHORT: f"fewer than {self.min_length} tokens",
            Reason.RATIO: f"one side over {self.max_ratio:g} times as long (above {self.ratio_from} tokens)",
        }[reason]


def describe(reason: str, cleaning: CleaningConfig, filters: FilterConfigs) -> str:
    """Describe a reason to remove a pair, for the report.

    Args:
        reason: value of a :class:`Reason`, or the name of a filter.
        cleaning: criteria that were applied.
        filters: settings of the filters that were applied.
    """
    return filters[reason].describe() if reason in filters else cleaning.describe(Reason(reason))


def read_lines(paths: Sequence[Path]) -> Iterator[bytes]:
    r"""Yield the lines of several files in turn, without line ends (``\n``, ``\r\n``) and byte order mark."""
    for path in paths:
        with path.open("rb") as file:
            yield from plain_lines(file)


def plain_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the lines of a file, without line ends (``\n``, ``\r\n``) and byte order mark."""
    for number, line in enumerate(file):
        if number == 0 and not (line := line.removeprefix(codecs.BOM_UTF8)):
            return  # nothing but the mark
        yield line.rstrip(b"\r\n")


def segmented_words(text: str) -> list[str]:
    """Split already segmented text at ASCII white space; a no-break space belongs to its token."""
    return _SEGMENTED_WORD.findall(text)


def normalise_whitespace(text: str, segmented: bool = False) -> str:
    """Put single spaces between words and none around them; raw text may have any Unicode white space."""
    return " ".join(segmented_words(text) if segmented else text.split())


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` successive items; the last may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class CheckedPairs(NamedTuple):
    """The outcome of :meth:`PairChecker.check`; it can be pickled.

    Attributes:
        read: number of pairs checked.
        texts: the pairs without a fault, decoded and with normalised white space, N of them.
        places: their places among the pairs checked. Shape: (N,)
        hashes: hashes of their keys, by the reason to remove a repetition. Shape of each: (N,)
        removals: pairs with a fault.
        repaired: number of lines that a Unicode rule changed, by (rule, side).
    """

    read: int
    texts: list[tuple[str, str]]
    places: npt.NDArray[np.int64]
    hashes: dict[str, npt.NDArray[np.uint64]]
    removals: Removals
    repaired: Counter[tuple[str, str]]


class PairChecker:
    """All checks of text that judge each pair for itself: a pure function, so that processes can share the lines.

    It can be pickled.

    Args:
        config: criteria for keeping pairs.
        segmented: True if the text is already segmented, its tokens separated by ASCII spaces.
        filters: further criteria.
        unicode_rules: names of rules by which lines are repaired first.
    """

    def __init__(
        self,
        config: CleaningConfig,
        segmented: bool = False,
        filters: PairFilters | None = None,
        unicode_rules: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.segmented = segmented
        self.filters = filters or PairFilters({}, TextForm())
        self.unicode_rules = unicode_rules
        self._has_filters = bool(self.filters.judging)

    @property
    def repetitions(self) -> tuple[str, ...]:
        """Reasons for which a pair is removed because of an earlier one, in order."""
        return (*(() if self.config.keep_duplicates else (Reason.DUPLICATE.value,)), *self.filters.remembering)

    def check(self, lines: Iterable[tuple[bytes, bytes]], scores: Iterable[float] | None = None) -> CheckedPairs:
        """Check a batch of pairs (source, target), with their scores if a filter reads them."""
        texts: list[tuple[str, str]] = []
        places: list[int] = []
        removals, repaired = Removals(), Counter[tuple[str, str]]()
        place = -1
        scored = zip(lines, repeat(None) if scores is None else scores, strict=scores is not None)
        for place, ((source_line, target_line), score) in enumerate(scored):
            found = self._check(source_line, target_line, score, repaired)
            if isinstance(found, str):
                removals.add(found, source_line, target_line)
            else:
                texts.append(found)
                places.append(place)
        hashes = {}
        for reason in self.repetitions:
            duplicate = reason == Reason.DUPLICATE.value
            keys = map("\n".join, texts) if duplicate else self.filters.keys(reason, texts)
            hashes[reason] = hashes_of(keys, len(texts))
        return CheckedPairs(place + 1, texts, np.array(places, np.int64), hashes, removals, repaired)

    def _check(
        self, source_line: bytes, target_line: bytes, score: float | None, repaired: Counter[tuple[str, str]]
    ) -> tuple[str, str] | str:
        """Return the text of a pair, or the reason to remove it."""
        try:
            source, target = source_line.decode("utf-8"), target_line.decode("utf-8")
        except UnicodeDecodeError:
            return Reason.UNDECODABLE.value
        if self.unicode_rules:
            source = self._repaired(source, "source", repaired)
            target = self._repaired(target, "target", repaired)
        if _BAD_CHARACTER.search(source) or _BAD_CHARACTER.search(target):
            return Reason.BAD_CHARACTER.value
        source = normalise_whitespace(source, self.segmented)
        target = normalise_whitespace(target, self.segmented)
        if not source or not target:
            return Reason.EMPTY.value
        if self.config.remove_identical and source == target:
            return Reason.IDENTICAL.value
        # A word has at least one token, so this needs no vocabulary, and keeps such pairs out of it.
        if max(source.count(" "), target.count(" ")) >= self.config.max_length:
            return Reason.TOO_LONG.value
        if self._has_filters and (fault := self.filters.fault(source, target, score)):
            return fault
        return source, target

    def _repaired(self, line: str, side: str, repaired: Counter[tuple[str, str]]) -> str:
        line, changed = repair(line, self.unicode_rules)
        repaired.update((rule, side) for rule in changed)
        return line


class PairCleaner:
    """A filter of pairs that counts removed ones. It remembers 8 bytes of each pair, to recognise duplicates.

    It is for one process, which takes the batches in order. Others may have checked them with ``checker``.

    Args:
        config: criteria for keeping pairs.
        segmented: True if the text is already segmented, its tokens separated by ASCII spaces.
        filters: further criteria; ``near_duplicates`` remembers another 8 bytes of each pair.
        unicode_rules: names of rules by which lines are repaired first.

    Attributes:
        checker: the checks that need no other pair.
        read: pairs seen so far.
        removals: pairs removed so far.
        repaired: lines that a Unicode rule changed, by (rule, side).
    """

    def __init__(
        self,
        config: CleaningConfig,
        segmented: bool = False,
        filters: PairFilters | None = None,
        unicode_rules: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.checker = PairChecker(config, segmented, filters, unicode_rules)
        self.read = 0
        self.removals = Removals()
        self.repaired: Counter[tuple[str, str]] = Counter()
        self._repetitions = Repetitions(self.checker.repetitions)

    @property
    def removed(self) -> Counter[str]:
        """Number of pairs removed so far, by reason."""
        return self.removals.counts

    @property
    def kept(self) -> int:
        """Number of pairs that passed every check made so far."""
        return self.read - self.removed.total()

    @property
    def reasons(self) -> tuple[str, ...]:
        """All reasons for which pairs may be removed, in the order in which they are checked."""
        filters, order = self.checker.filters, [reason.value for reason in Reason]
        duplicate = order.index(Reason.DUPLICATE.value)
        return (*order[:duplicate], *filters.judging, order[duplicate], *filters.remembering, *order[duplicate + 1 :])

    def describe(self, reason: str) -> str:
        """Describe a reason, for the report."""
        return describe(reason, self.config, self.checker.filters.configs)

    def texts(self, lines: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
        """Yield the pairs with acceptable text, decoded and with normalised white space, in their order."""
        for chunk in batched(lines, _CHUNK_PAIRS):
            checked = self.checker.check(chunk)
            yield from compress(checked.texts, self.accept(checked))

    def accept(self, checked: CheckedPairs, text_of: TextOf | None = None) -> npt.NDArray[np.bool_]:
        """Count the next pairs that ``checker`` has checked, in their order, and find those that are no repetitions.

        Args:
            checked: N of the pairs have no fault.
            text_of: returns the text of one of these, for examples; None takes ``checked.texts``.

        Returns:
            True for pairs to keep. Shape: (N,)
        """
        self.read += checked.read
        self.removals.merge(checked.removals)
        self.repaired.update(checked.repaired)
        text_of = text_of or checked.texts.__getitem__
        return self._repetitions.remove(len(checked.places), checked.hashes, self.removals, text_of)

    def fits(
        self, source_lengths: Sequence[int], target_lengths: Sequence[int], pairs: Sequence[tuple[str, str]] = ()
    ) -> npt.NDArray[np.bool_]:
        """Find the pairs with allowed lengths, and count the others as removed.

        Args:
            source_lengths: source lengths in tokens. Shape: (N,)
            target_lengths: target lengths in tokens. Shape: (N,)
            pairs: their text, for examples of removed pairs; empty if it is not known.

        Returns:
            True for pairs to keep. Shape: (N,)
        """
        lengths = np.array([source_lengths, target_lengths], dtype=np.int64).reshape(2, -1)
        shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
        config = self.config
        keep = np.ones(len(longer), dtype=np.bool_)
        for reason, faulty in (
            (Reason.TOO_LONG, longer > config.max_length),
            (Reason.TOO_SHORT, shorter < config.min_length),
            (Reason.RATIO, (longer > config.ratio_from) & (longer > config.max_ratio * shorter)),
        ):
            for number in np.flatnonzero(keep & faulty).tolist():
                self.removals.add(reason.value, *(pairs[number] if pairs else ()))
            keep &= ~faulty
        return keep
