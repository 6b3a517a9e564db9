"""Filter of pairs that differ from an earlier one in case, digits, punctuation and white space only.

A key of each pair is remembered, in 8 bytes. MinHash would also find pairs that differ in some words, but needs
several such numbers for each pair, and removes sentences that differ in a name or a negation.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import regex
from typing_extensions import override

from deepspeed_nmt.data.filters.base import FilterConfig, Key
from deepspeed_nmt.text import TextForm

_NO_LETTERS = regex.compile(r"[^\p{L}\p{M}]+")


class NearDuplicatesConfig(FilterConfig):
    """Settings of ``near_duplicates``. OpusFilter's `remove_duplicates` has the same choices; case is ignored."""

    finds_repeats: ClassVar[bool] = True

    of: Literal["pair", "source", "target"] = "pair"
    """Text that is compared: both sides, or one: then only the first translation of a sentence is kept."""

    @override
    def describe(self) -> str:
        what = {"pair": "both sides as in", "source": "the source of", "target": "the target of"}[self.of]
        return f"{what} an earlier pair, but for case, digits, marks"


def near_duplicates(config: NearDuplicatesConfig, text: TextForm) -> Key:
    """Build the keys of ``near_duplicates``. A side without letters is compared as it is."""

    def letters_of(side: str) -> str:
        return _NO_LETTERS.sub("", side).casefold() or side

    if config.of == "source":
        return lambda source, target: letters_of(source)
    if config.of == "target":
        return lambda source, target: letters_of(target)
    return lambda source, target: f"{letters_of(source)}\n{letters_of(target)}"
