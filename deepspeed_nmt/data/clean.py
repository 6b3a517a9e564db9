r"""Cleaning: removal of pairs that hurt training, with counts by reason.

Text is read as bytes and cut at ``\n`` only. Cutting at U+2028, U+0085 and similar characters, which occur inside
lines, would shift every later line against its translation.

:meth:`PairChecker.check` checks the text before the vocabulary is trained on it, :func:`fits` token counts after. A
pair with several faults is counted under the first of them in the order of :meth:`CleaningConfig.reasons`.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

import numpy as np
import numpy.typing as npt
import regex
from pydantic import Field

from deepspeed_nmt.data.filters import Filter, Hashes, PairFilters, Removals, hashes_of
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import TextForm, normalise_whitespace

# C0 and C1 controls except white space (tab, line feed, \v, \f, \r, U+0085), and DEL
_CONTROL = "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f"
# Other programs replace bytes that they cannot decode by the replacement character.
_BAD_CHARACTER = re.compile(f"[{_CONTROL}\ufffd]")
# Joiners are letters' neighbours in Arabic and Indic scripts and join emoji. Between characters of Latin, Greek,
# Cyrillic and Armenian text (below U+0590) they are left over from a web page.
_BARE_JOINER = r"(?:(?<=[\x00-\u058f])|^)[\u200c\u200d]+(?=[\x00-\u058f]|$)"
_ZERO_WIDTH = rf"[\u00ad\u180e\u200b\u2060-\u2064\ufeff]|{_BARE_JOINER}"
_BIDI = "[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
_SHORT_LINE = 1000
_MANY_MARKS = regex.compile(r"\p{M}{100}")


def _without(pattern: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)
    return lambda line: compiled.sub("", line)


def _nfc(line: str) -> str:
    # Python orders a character's marks in quadratic time. Text has a few of them; Unicode's stream-safe format, 30.
    if len(line) > _SHORT_LINE and _MANY_MARKS.search(line):
        return line
    return unicodedata.normalize("NFC", line)


UNICODE_RULES: Mapping[str, Callable[[str], str]] = {
    "drop_control": _without(f"[{_CONTROL}]"),
    "drop_zero_width": _without(_ZERO_WIDTH),
    "drop_bidi": _without(_BIDI),
    "nfc": _nfc,
}
"""Rules that repair the characters of a line of training text, before filters and duplicates, in this order.

Each is off unless it is named. The normalization of a vocabulary, in contrast, is applied to all text of a model.
"""


def read_unicode_rules(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of rules, in the order in which they are applied; one text has them separated by commas."""
    chosen = set(filter(None, map(str.strip, names.split(",") if isinstance(names, str) else names)))
    for name in sorted(chosen - UNICODE_RULES.keys()):
        raise ConfigError(f"{shown(name)} of --unicode is no rule{did_you_mean(name, UNICODE_RULES)}")
    return tuple(name for name in UNICODE_RULES if name in chosen)


def repair(line: str, rules: Iterable[str]) -> tuple[str, list[str]]:
    """Apply rules to a line; return it with the names of the rules that changed it."""
    changed = []
    for name in rules:
        if (new := UNICODE_RULES[name](line)) != line:
            changed.append(name)
            line = new
    return line, changed


class CleaningConfig(Config):
    """Criteria for keeping pairs. Lengths are tokens of the vocabulary, without EOS."""

    max_length: int = Field(default=250, ge=1, description="longest sentence, in tokens")
    min_length: int = Field(default=1, ge=1)
    """Shortest sentence on either side (tokens)."""
    max_ratio: float = Field(
        default=3.0, ge=1.0, description="largest ratio of the two sides' lengths, in tokens of the vocabulary"
    )
    # "Ja." may be translated as "That's true."
    ratio_from: int = Field(
        default=10, ge=1, description="check the ratio only if a side has more than N tokens; 1: always"
    )
    keep_duplicates: bool = Field(default=False, description="keep duplicate pairs")
    # Identical sides are harmless names and numbers in small amounts.
    remove_identical: bool = Field(default=False, description="remove pairs whose source and target are equal")

    def reasons(self, filters: Mapping[str, Filter]) -> dict[str, str]:
        """Describe all reasons to remove a pair, filters included, in the order in which they are checked."""
        judging = {name: entry.describe() for name, entry in filters.items() if not entry.remembers}
        remembering = {name: entry.describe() for name, entry in filters.items() if entry.remembers}
        return {
            "undecodable": "not UTF-8",
            "bad_character": "control characters or U+FFFD",
            "empty": "a side is empty",
            "identical": "source and target are the same",
            "too_long": f"more than {self.max_length} tokens",
            **judging,
            "duplicate": "the same pair again",
            **remembering,
            "too_short": f"fewer than {self.min_length} tokens",
            "ratio": f"one side over {self.max_ratio:g} times as long (above {self.ratio_from} tokens)",
        }

    def repetitions(self, filters: Mapping[str, Filter]) -> tuple[str, ...]:
        """Return the reasons for which a pair is removed because of an earlier one, in order."""
        remembering = [name for name, entry in filters.items() if entry.remembers]
        return (*(() if self.keep_duplicates else ("duplicate",)), *remembering)


class PairChecker:
    """All checks of text that judge each pair for itself. Text that is ``segmented`` has tokens between ASCII spaces.

    Attributes:
        removals: pairs removed so far, of those ``read``.
        repaired: lines that a Unicode rule changed so far, by ``<rule>.<side>``.
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
        self.read, self.removals, self.repaired = 0, Removals(), Counter[str]()

    def check(
        self, lines: Sequence[tuple[bytes, bytes]], scores: Iterable[float] | None = None
    ) -> tuple[list[int], list[tuple[str, str]]]:
        """Check a batch of pairs (source, target), with their scores if a filter reads them.

        Return the places of the pairs without a fault, and their texts with normalised white space.
        """
        texts: list[tuple[str, str]] = []
        places: list[int] = []
        self.read += len(lines)
        scored = zip(lines, repeat(None) if scores is None else scores, strict=scores is not None)
        for place, (pair, score) in enumerate(scored):
            outcome = self._check(*pair, score)
            if isinstance(outcome, str):
                self.removals.add(outcome, *pair)
            else:
                texts.append(outcome)
                places.append(place)
        return places, texts

    def hashes(self, reason: str, texts: Sequence[tuple[str, str]]) -> Hashes:
        """Hash the keys by which repetitions are recognised that are removed for a reason. Shape: -> (N,)."""
        if reason == "duplicate":
            return hashes_of(map("\n".join, texts), len(texts))
        return self.filters.hashes(reason, texts)

    def _check(self, source_line: bytes, target_line: bytes, score: float | None) -> tuple[str, str] | str:
        """Return the text of a pair, or the reason to remove it."""
        try:
            source, target = source_line.decode("utf-8"), target_line.decode("utf-8")
        except UnicodeDecodeError:
            return "undecodable"
        if self.unicode_rules:
            (source, of_source), (target, of_target) = (repair(side, self.unicode_rules) for side in (source, target))
            self.repaired.update(f"{rule}.source" for rule in of_source)
            self.repaired.update(f"{rule}.target" for rule in of_target)
        if _BAD_CHARACTER.search(source) or _BAD_CHARACTER.search(target):
            return "bad_character"
        source = normalise_whitespace(source, self.segmented)
        target = normalise_whitespace(target, self.segmented)
        if not source or not target:
            return "empty"
        if self.config.remove_identical and source == target:
            return "identical"
        # A word has at least one token, so this needs no vocabulary, and keeps such pairs out of it.
        if max(source.count(" "), target.count(" ")) >= self.config.max_length:
            return "too_long"
        return self.filters.fault(source, target, score) or (source, target)


def fits(
    config: CleaningConfig, lengths: npt.NDArray[np.int64], pairs: Sequence[tuple[str, str]], removals: Removals
) -> npt.NDArray[np.bool_]:
    """Return True for pairs with allowed lengths; ``removals`` receives the others. Shape: (2, N) -> (N,)."""
    shorter, longer = lengths.min(axis=0), lengths.max(axis=0)
    keep = np.ones(len(longer), dtype=np.bool_)
    for reason, faulty in (
        ("too_long", longer > config.max_length),
        ("too_short", shorter < config.min_length),
        ("ratio", (longer > config.ratio_from) & (longer > config.max_ratio * shorter)),
    ):
        for number in np.flatnonzero(keep & faulty).tolist():
            removals.add(reason, *pairs[number])
        keep &= ~faulty
    return keep
