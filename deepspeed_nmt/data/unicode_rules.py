"""Rules that repair the characters of training text before it is checked, each off unless it is named.

The normalization of a vocabulary (:mod:`deepspeed_nmt.data.normalization`) is part of the model and applied to all
text that it reads. These rules change training text only, before filters and duplicates. They are for characters that
text to be translated does not have, or that the vocabulary normalises anyway.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping

import regex

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown

# Joiners are letters' neighbours in Arabic and Indic scripts and join emoji. Between characters of Latin, Greek,
# Cyrillic and Armenian text (below U+0590) they are left over from a web page.
_BARE_JOINER = r"(?:(?<=[\x00-\u058f])|^)[\u200c\u200d]+(?=[\x00-\u058f]|$)"
_ZERO_WIDTH = re.compile(rf"[\u00ad\u180e\u200b\u2060-\u2064\ufeff]|{_BARE_JOINER}")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
CONTROL = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"
"""C0 and C1 controls except white space (tab, line feed, \\v, \\f, \\r, U+0085), and DEL: ranges of a pattern."""
_CONTROL = re.compile(f"[{CONTROL}]")
_SHORT_LINE = 1000
_MANY_MARKS = regex.compile(r"\p{M}{100}")


def _without(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda line: pattern.sub("", line)


def _nfc(line: str) -> str:
    # Python orders a character's marks in quadratic time. Text has a few of them; Unicode's stream-safe format, 30.
    if len(line) > _SHORT_LINE and _MANY_MARKS.search(line):
        return line
    return unicodedata.normalize("NFC", line)


UNICODE_RULES: Mapping[str, Callable[[str], str]] = {
    "drop_control": _without(_CONTROL),
    "drop_zero_width": _without(_ZERO_WIDTH),
    "drop_bidi": _without(_BIDI),
    "nfc": _nfc,
}
"""Functions of a line, by the name of the rule, in the order in which they are applied."""
_OF_ASCII = ("drop_control",)
"""Rules that may change lines of ASCII."""


def read_unicode_rules(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of rules, in the order in which they are applied.

    Args:
        given: names, separated by commas if they are one text.

    Raises:
        ConfigError: if a name is unknown.
    """
    words = given.split(",") if isinstance(given, str) else given
    names = set(filter(None, map(str.strip, words)))
    for name in sorted(names - UNICODE_RULES.keys()):
        raise ConfigError(
            f"--unicode must name known rules, but has {shown(name)}{did_you_mean(name, UNICODE_RULES)}"
        )
    return tuple(name for name in UNICODE_RULES if name in names)


def repair(line: str, rules: Iterable[str]) -> tuple[str, list[str]]:
    """Apply rules to a line.

    Args:
        line: to repair.
        rules: names from :data:`UNICODE_RULES`, in their order.

    Returns:
        The new line, and the names of the rules that changed it.
    """
    changed = []
    ascii_only = line.isascii()
    for name in rules:
        if ascii_only and name not in _OF_ASCII:
            continue
        new = UNICODE_RULES[name](line)
        if new != line:
            changed.append(name)
            line = new
    return line, changed
