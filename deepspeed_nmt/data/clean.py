r"""Cleaning: removal of pairs that hurt training, with counts by reason.

Text is read as bytes and cut at ``\n`` only. Cutting at U+2028, U+0085 and similar characters, which occur inside
lines, would shift every later line against its translation.

Cleaning has two stages, because lengths are counted in tokens and the vocabulary is trained on clean text:
:meth:`PairCleaner.texts` checks the text, :meth:`PairCleaner.fits` token counts. A pair with several faults is
counted under the first of them in the order of :class:`Reason`, faults of the text first.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import compress, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from deepspeed_nmt.registry import Config

T = TypeVar("T")

# C0 and C1 controls except white space (tab, line feed, \v, \f, \r, U+0085), DEL, and the replacement character, by
# which other programs replace bytes that they cannot decode.
_BAD_CHARACTER = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")
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
    """The outcome of :meth:`PairCleaner.check`.

    Attributes:
        read: number of pairs checked.
        removed: those with a fault, by reason.
        texts: the other pairs, N of them.
        places: their places among the pairs checked. Shape: (N,)
        hashes: by which duplicates are recognised; none if these are kept. Shape: (N,)
    """

    read: int
    removed: Counter[Reason]
    texts: list[tuple[str, str]]
    places: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]


class PairCleaner:
    """A filter of pairs that counts removed ones. It remembers 8 bytes of each pair, to recognise duplicates.

    Args:
        config: criteria for keeping pairs.
        segmented: True if the text is already segmented, its tokens separated by ASCII spaces.

    Attributes:
        read: pairs seen so far.
        removed: pairs removed so far, by reason.
    """

    def __init__(self, config: CleaningConfig, segmented: bool = False) -> None:
        self.config = config
        self.segmented = segmented
        self.read = 0
        self.removed: Counter[Reason] = Counter()
        self._seen = _SeenHashes()

    @property
    def kept(self) -> int:
        """Number of pairs that passed every check made so far."""
        return self.read - self.removed.total()

    def texts(self, lines: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, str]]:
        """Yield the pairs with acceptable text, decoded and with normalised white space, in their order."""
        for chunk in batched(lines, _CHUNK_PAIRS):
            checked = self.check(chunk)
            yield from compress(checked.texts, self.accept(checked))

    def check(self, lines: Iterable[tuple[bytes, bytes]]) -> CheckedPairs:
        """Check the text of pairs, each by itself, so that other processes can do it; nothing is counted yet."""
        texts: list[tuple[str, str]] = []
        places: list[int] = []
        removed: Counter[Reason] = Counter()
        place = -1
        for place, (source_line, target_line) in enumerate(lines):
            checked = self._check(source_line, target_line)
            if isinstance(checked, Reason):
                removed[checked] += 1
            else:
                texts.append(checked)
                places.append(place)
        hashes = () if self.config.keep_duplicates else map(_pair_hash, texts)
        return CheckedPairs(place + 1, removed, texts, np.array(places, np.int64), np.fromiter(hashes, np.uint64))

    def accept(self, checked: CheckedPairs) -> npt.NDArray[np.bool_]:
        """Count the next pairs in their order, and find those that are no duplicates.

        Returns:
            True for pairs to keep. Shape: -> (N,), of the N pairs whose text is acceptable
        """
        self.read += checked.read
        self.removed.update(checked.removed)
        if self.config.keep_duplicates:
            return np.ones(len(checked.places), np.bool_)
        new = self._seen.add(checked.hashes)
        self.removed[Reason.DUPLICATE] += len(new) - int(new.sum())
        return new

    def fits(self, source_lengths: Sequence[int], target_lengths: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Find the pairs with allowed lengths, and count the others as removed.

        Args:
            source_lengths: source lengths in tokens. Shape: (N,)
            target_lengths: target lengths in tokens. Shape: (N,)

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
            self.removed[reason] += int((keep & faulty).sum())
            keep &= ~faulty
        return keep

    def _check(self, source_line: bytes, target_line: bytes) -> tuple[str, str] | Reason:
        try:
            source, target = source_line.decode("utf-8"), target_line.decode("utf-8")
        except UnicodeDecodeError:
            return Reason.UNDECODABLE
        if _BAD_CHARACTER.search(source) or _BAD_CHARACTER.search(target):
            return Reason.BAD_CHARACTER
        source = normalise_whitespace(source, self.segmented)
        target = normalise_whitespace(target, self.segmented)
        if not source or not target:
            return Reason.EMPTY
        if self.config.remove_identical and source == target:
            return Reason.IDENTICAL
        # A word has at least one token, so this needs no vocabulary, and keeps such pairs out of it.
        if max(source.count(" "), target.count(" ")) >= self.config.max_length:
            return Reason.TOO_LONG
        return source, target


def _pair_hash(pair: tuple[str, str]) -> int:
    """Hash a pair to 64 bits: among 20 million pairs, any two collide with a probability of 1 in 100,000."""
    return int.from_bytes(hashlib.blake2b("\n".join(pair).encode("utf-8"), digest_size=8).digest(), "little")


class _SeenHashes:
    """A set of 64-bit numbers in 8 bytes each; a Python set takes about 80.

    It consists of sorted runs, each more than twice as long as the next. Adding merges runs of similar size, so every
    number is moved only a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.uint64]] = []

    def add(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Add all numbers.

        Returns:
            True for numbers that are neither in the set nor earlier in ``hashes``. Shape: (N,) -> (N,)
        """
        unique, first = np.unique(hashes, return_index=True)
        fresh = np.ones(len(unique), dtype=np.bool_)
        for run in self._runs:
            position = np.minimum(np.searchsorted(run, unique), len(run) - 1)
            fresh &= run[position] != unique
        new = np.zeros(len(hashes), dtype=np.bool_)
        new[first[fresh]] = True
        added = unique[fresh]
        if len(added):
            while self._runs and len(self._runs[-1]) <= 2 * len(added):
                added = np.sort(np.concatenate((self._runs.pop(), added)), kind="stable")
            self._runs.append(added)
        return new
