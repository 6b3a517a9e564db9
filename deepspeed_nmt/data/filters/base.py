"""Settings of a filter, and the form in which a command line gives them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from deepspeed_nmt.registry import Config

Test = Callable[[str, str], bool]
"""True if a pair (source, target) is to be removed."""
Key = Callable[[str, str], str]
"""Text of a pair (source, target) by which repetitions of it are found."""
ScoreTest = Callable[[float], bool]
"""True if a pair with this score is to be removed."""


class FilterConfig(Config):
    """Base of the settings of a filter.

    A subclass declares the setting that ``NAME=VALUE`` gives as its first field. Its entry in the registry builds the
    filter from (settings, form of the text): a :data:`Test`, a :data:`Key` if ``finds_repeats``, or a
    :data:`ScoreTest` if ``reads_scores``.
    """

    finds_repeats: ClassVar[bool] = False
    """True if a pair is removed because an earlier one has the same key; else each pair is judged for itself."""
    reads_scores: ClassVar[bool] = False
    """True if a pair is judged by the score that is given with it, not by its text."""

    @classmethod
    def fields_of(cls, value: str) -> dict[str, Any]:
        """Return the settings that a value on the command line stands for, unchecked.

        Raises:
            ValueError: if it is none; the message begins with "must".
        """
        return {next(iter(cls.model_fields)): value}

    @abstractmethod
    def describe(self) -> str:
        """Describe the pairs that are removed, for the report."""


UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no spaces between words, as the content of a set of `regex`."""


def share(part: int, whole: int) -> float:
    """Return part / whole; 0 if there is nothing."""
    return part / whole if whole else 0.0
