"""Filters of pairs whose sides are no translations of each other: numbers, ends of sentences, copies, repetition."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import regex
from pydantic import Field
from typing_extensions import override

from deepspeed_nmt.data.filters.base import UNSPACED, FilterConfig, Test
from deepspeed_nmt.text import TextForm

_NUMBER = re.compile(r"\d+")
_END_OF_SENTENCE = tuple(".!?…\u061f\u06d4\u0964\u0965\u1362")  # also Arabic, Urdu, Devanagari, Ethiopic
_CLOSING = "\"'”’“‘»«›‹)]}」』）"
_FULL_WIDTH_END = re.compile("[\u3002\uff01\uff1f\uff61]+")
_WORD = re.compile(r"[^\W\d_]+")
_PIECE = regex.compile(rf"(?V1)[{UNSPACED}]|[\w--[{UNSPACED}]]+")
"""Words; characters of scripts that put no spaces between words."""
_LONGEST_PERIOD = 50
"""Words after which a repetition is no longer found, to bound the time."""
_SHORTEST_REPEATED = 3
"""Characters of what is repeated: "no, no, no" is language. OpusFilter's value."""


class DigitsConfig(FilterConfig):
    """Settings of ``digits``, with the measure of Vázquez et al. (2019) and OpusFilter's default.

    Here the digits may have any order, and "8" may be translated as "eight": a side without digits is compared with
    the other side's numbers of three digits and more.
    """

    min_similarity: float = Field(default=0.5, gt=0, le=1)
    """Smallest similarity of the two sides' digits other than 0: twice the common ones, by their number in all."""

    @override
    def describe(self) -> str:
        return f"digits differ (similarity below {self.min_similarity:g})"


def digits(config: DigitsConfig, text: TextForm) -> Test:
    """Build the filter ``digits``, for digits of any script."""

    def counted(numbers: list[str]) -> Counter[int]:
        found = Counter(map(unicodedata.digit, "".join(numbers)))
        del found[0]
        return found

    def differ(source: str, target: str) -> bool:
        numbers = _NUMBER.findall(source), _NUMBER.findall(target)
        if not all(numbers):
            numbers = [each for each in numbers[0] if len(each) > 2], [each for each in numbers[1] if len(each) > 2]
        ours, theirs = map(counted, numbers)
        total = ours.total() + theirs.total()
        return total > 0 and 2 * (ours & theirs).total() < config.min_similarity * total

    return differ


class PunctuationConfig(FilterConfig):
    """Settings of ``punctuation``.

    The default is the difference that OpusFilter's `TerminalPunctuationFilter` (Vázquez et al. 2019) allows for a
    sentence with one full stop. Unlike its measure, this one does not remove lines of many sentences.
    """

    max_difference: int = Field(default=3, ge=0)
    """Largest difference of the two sides' numbers of words that end as sentences do."""

    @override
    def describe(self) -> str:
        return f"ends of sentences differ by more than {self.max_difference}"


def punctuation(config: PunctuationConfig, text: TextForm) -> Test:
    """Build the filter ``punctuation``. A stop inside a word or number is no end of a sentence."""

    def ends(side: str) -> int:
        words = sum(word.rstrip(_CLOSING).endswith(_END_OF_SENTENCE) for word in side.split())
        return words if side.isascii() else words + len(_FULL_WIDTH_END.findall(side))

    return lambda source, target: abs(ends(source) - ends(target)) > config.max_difference


class RepetitionConfig(FilterConfig):
    """Settings of ``repetition``. OpusFilter's `RepetitionFilter` has the same default, for strings of characters."""

    times: int = Field(default=3, ge=2)
    """Number of times that the same words in succession are too many."""

    @override
    def describe(self) -> str:
        return f"the same words {self.times} times in a row"


def repetition(config: RepetitionConfig, text: TextForm) -> Test:
    """Build the filter ``repetition`` of n-grams of up to 50 words, whatever their case and punctuation."""
    times = config.times

    def repeats(side: str) -> bool:
        words = _PIECE.findall(side.lower())
        if not words or max(Counter(words).values()) < times:
            return False
        for period in range(1, min(_LONGEST_PERIOD, len(words) // times) + 1):
            equal = 0
            for place in range(period, len(words)):
                equal = equal + 1 if words[place] == words[place - period] else 0
                if equal >= period * (times - 1) and _is_long(words[place - period + 1 : place + 1]):
                    return True
        return False

    return lambda source, target: repeats(source) or repeats(target)


def _is_long(words: list[str]) -> bool:
    return sum(map(len, words)) >= _SHORTEST_REPEATED


class CopyConfig(FilterConfig):
    """Settings of ``copy``, with the bound of Ott et al. (2018), "Analyzing Uncertainty in NMT"."""

    overlap: float = Field(default=0.5, gt=0, le=1)
    """Share of common words, among the different words of both sides, from which on a pair is a copy."""

    @override
    def describe(self) -> str:
        return f"a copy: {self.overlap:g} of the words or more are on both sides"


def copy(config: CopyConfig, text: TextForm) -> Test:
    """Build the filter ``copy``. Numbers and punctuation are no words, and case is ignored."""

    def is_copy(source: str, target: str) -> bool:
        ours, theirs = set(_WORD.findall(source.lower())), set(_WORD.findall(target.lower()))
        return bool(ours) and len(ours & theirs) >= config.overlap * len(ours | theirs)

    return is_copy
