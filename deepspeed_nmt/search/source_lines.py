"""Encoding of the source lines of a translation, with a bound on their length and warnings of bad input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import DataError, option
from deepspeed_nmt.text import DamagedLine

MAX_SOURCE_TOKENS = 1024
"""Tokens of a source line that are translated by default, if the model was not trained on longer ones."""
UNKNOWN_WORTH_A_WARNING = 0.05
"""Share of unknown tokens that causes a warning. Rare characters and new words are a smaller share."""

_NAMED_LINES = 5
_WHOLE_LINE = 1 << 16
"""Characters of a line that are encoded at once. Tokenizing many times more takes gigabytes, and minutes."""


class SourceTokenizer(Protocol):
    """The part of a tokenizer that translation needs."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Sizes and special tokens of both sides."""
        ...

    def encode(self, text: str, /) -> list[int]:
        """Encode a source sentence as tokens, without EOS."""
        ...

    def decode(self, tokens: list[int], /) -> str:
        """Decode target tokens into a sentence."""
        ...


@runtime_checkable
class PairTokenizer(SourceTokenizer, Protocol):
    """The part of a tokenizer that given target text needs."""

    def encode_batch(self, texts: Sequence[str], side: Side, threads: int = 1) -> list[list[int]]:
        """Encode lines of one side as tokens, without EOS."""
        ...


@dataclass
class SourceCounts:
    """Counts of the lines of a text, or of a stretch of it, from which warnings are made.

    Attributes:
        lines: number of lines.
        tokens: number of tokens.
        unknown: number of tokens that are unknown to the vocabulary.
        cut: number of lines whose end is not translated.
        first_cut: the first of these lines, each with its number from 1, its length in tokens, and True if this is
            the length of the whole line, False if of its beginning.
        alone: lines longer than a batch, each with its number from 1 and its length in tokens; they are translated in
            batches of their own.
        damaged: number of lines that were not UTF-8.
        first_damaged: number of the first of these lines, from 1; 0 without such.
        first_unknown_beside: number of the first line whose prefix or constraints have unknown tokens; 0 without.
    """

    lines: int = 0
    tokens: int = 0
    unknown: int = 0
    cut: int = 0
    first_cut: list[tuple[int, int, bool]] = field(default_factory=list)
    alone: list[tuple[int, int]] = field(default_factory=list)
    damaged: int = 0
    first_damaged: int = 0
    first_unknown_beside: int = 0


class SourceWarnings:
    """Warnings of bad input, made once for a whole text.

    Args:
        longest: most tokens of a line that are translated, without EOS.
        bound: option or property that sets it.

    Attributes:
        counts: counts of the text so far.
    """

    def __init__(self, longest: int, bound: str) -> None:
        self.longest, self.bound = longest, bound
        self.counts = SourceCounts()
        self._warned_of_unknown = False

    def add(self, counts: SourceCounts, max_tokens: int) -> None:
        """Add the counts of the next stretch of the text, and log what they give cause to.

        Args:
            counts: of the stretch, with lines numbered over the whole text.
            max_tokens: bound of a batch.
        """
        for cut in counts.first_cut:
            self.note_cut(*cut)
        if counts.damaged:
            self.note_damaged(counts.first_damaged, counts.damaged)
        if counts.first_unknown_beside and not self.counts.first_unknown_beside:
            self.counts.first_unknown_beside = counts.first_unknown_beside
            warn_of_unknown_beside(counts.first_unknown_beside)
        self.counts.lines += counts.lines
        self.counts.tokens += counts.tokens
        self.counts.unknown += counts.unknown
        self.counts.cut += counts.cut - len(counts.first_cut)
        self.warn_of_unknown()
        for line, tokens in counts.alone:
            warn_of_batch(line, tokens, max_tokens)

    def note_cut(self, line: int, tokens: int, whole: bool) -> None:
        """Count a line whose end is not translated, and warn of the first.

        Args:
            line: its number, from 1.
            tokens: number of its tokens that are known.
            whole: True if it has no others.
        """
        if self.counts.cut == 0:
            logger.warning(
                "line %s has %s, more than %s (%s): its end is not translated",
                f"{line:,}",
                _length(tokens, whole),
                f"{self.longest:,}",
                self.bound,
            )
        self.counts.cut += 1
        if len(self.counts.first_cut) < _NAMED_LINES:
            self.counts.first_cut.append((line, tokens, whole))

    def note_damaged(self, line: int, count: int = 1) -> None:
        """Count lines that were not UTF-8, and warn of the first.

        Args:
            line: number of the first of them.
            count: number of them.
        """
        if self.counts.damaged == 0:
            self.counts.first_damaged = line
            logger.warning(
                "line %s has bytes that are not UTF-8, which are read as U+FFFD; convert the text, for example by "
                "`iconv -f LATIN1 -t UTF-8`",
                f"{line:,}",
            )
        self.counts.damaged += count

    def warn_of_unknown(self) -> None:
        """Warn once if many tokens of the lines so far are unknown."""
        counts = self.counts
        few = counts.unknown < UNKNOWN_WORTH_A_WARNING * max(1, counts.tokens)
        if self._warned_of_unknown or few:
            return
        self._warned_of_unknown = True
        logger.warning(
            "%s of the %s tokens up to line %s (%.0f%%) are unknown to the vocabulary, and their meaning is lost; "
            "give text in the source language of the run, and in the form of its training text",
            f"{counts.unknown:,}",
            f"{counts.tokens:,}",
            f"{counts.lines:,}",
            100.0 * counts.unknown / counts.tokens,
        )

    def warn_at_end(self) -> None:
        """Warn at the end of the text if more lines than one were cut or damaged, naming the first of them."""
        if self.counts.damaged > 1:
            logger.warning(
                "%s of %s lines have bytes that are not UTF-8; the first is line %s",
                f"{self.counts.damaged:,}",
                f"{self.counts.lines:,}",
                f"{self.counts.first_damaged:,}",
            )
        if self.counts.cut > 1:
            logger.warning(
                "%s of %s lines were cut to %s tokens: lines %s%s",
                f"{self.counts.cut:,}",
                f"{self.counts.lines:,}",
                f"{self.longest:,}",
                ", ".join(f"{number:,}" for number, *_ in self.counts.first_cut),
                ", ..." if self.counts.cut > _NAMED_LINES else "",
            )


def warn_of_batch(line: int, tokens: int, max_tokens: int) -> None:
    """Warn of a line that is longer than a batch.

    Args:
        line: its number, from 1.
        tokens: its length, with EOS.
        max_tokens: bound of a batch.
    """
    logger.warning(
        "line %s has %s tokens, more than %s (%s): it is translated in a batch of its own",
        f"{line:,}",
        f"{tokens:,}",
        option("max_tokens"),
        f"{max_tokens:,}",
    )


def warn_of_unknown_beside(line: int) -> None:
    """Warn of the first line whose prefix or constraints have unknown tokens.

    Args:
        line: its number, from 1.
    """
    logger.warning(
        "the prefix or a constraint of line %s has tokens that are unknown to the vocabulary, which the translation "
        "shows as such",
        f"{line:,}",
    )


def longest_line(max_source_tokens: int, longest_source: int | None) -> tuple[int, str]:
    """Return the most tokens of a line that are translated, without EOS, and what sets this bound.

    Args:
        max_source_tokens: most tokens that the user wants.
        longest_source: most tokens that the model reads, with EOS; None if unlimited.
    """
    if longest_source is not None and longest_source - 1 < max_source_tokens:
        return longest_source - 1, "all that the model reads"
    return max_source_tokens, option("max_source_tokens")


class SourceLines:
    """Encoder of the lines of a text, in their order.

    The time and the memory of a line grow faster than its length, and a translation far longer than those that the
    model was trained on is bad. So of a longer line only the beginning is translated, or the line is refused. Of a
    line that is longer still, the rest is not even encoded.

    Args:
        tokenizer: vocabulary of the model.
        max_source_tokens: most tokens of a line, without EOS.
        longest_source: most tokens that the model reads, with EOS; None if unlimited.
        strict: True to refuse longer lines and those that were not UTF-8; False to cut them, and to read U+FFFD.
        warn: False to log nothing, for text that is translated again.
        counts: record of what there is to warn of, for a stretch of a text that is warned of as a whole; nothing is
            logged then. None to log it.
        before: number of lines of the text before the first.

    Attributes:
        warns: True if it logs warnings.
    """

    def __init__(
        self,
        tokenizer: SourceTokenizer,
        max_source_tokens: int,
        longest_source: int | None,
        strict: bool = False,
        warn: bool = True,
        counts: SourceCounts | None = None,
        before: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._unk = tokenizer.vocabulary.source.unk
        self._longest, self._bound = longest_line(max_source_tokens, longest_source)
        self._strict = strict
        self.warns = warn and counts is None
        self._warnings = SourceWarnings(self._longest, self._bound)
        self._counts = self._warnings.counts if counts is None else counts
        self._before = before
        self._warned_beside = False

    def encode(self, line: str) -> list[int]:
        """Encode the next line as tokens, without EOS.

        Raises:
            DataError: if it is too long or was not UTF-8, and ``strict`` is True.
        """
        counts = self._counts
        counts.lines += 1
        number = self._before + counts.lines
        if isinstance(line, DamagedLine):
            self._note_damaged(number)
        tokens, whole = self._beginning(line.rstrip("\r\n"))
        counts.tokens += len(tokens)
        counts.unknown += tokens.count(self._unk)
        if len(tokens) <= self._longest:
            return tokens
        if self._strict:
            raise DataError(
                f"source lines must have {self._longest:,} tokens at most ({self._bound}), but line {number:,} "
                f"has {_length(len(tokens), whole)}; split it, or leave out {option('strict')} to translate its "
                "beginning"
            )
        if self.warns:
            self._warnings.note_cut(number, len(tokens), whole)
        else:
            counts.cut += 1
            if len(counts.first_cut) < _NAMED_LINES:
                counts.first_cut.append((number, len(tokens), whole))
        return tokens[: self._longest]

    def _beginning(self, line: str) -> tuple[list[int], bool]:
        """Encode as much of a line as is sure to hold the tokens that are translated.

        Returns:
            The tokens, and True if they are those of the whole line.
        """
        characters = _WHOLE_LINE
        while characters < len(line):
            # The last tokens depend on what follows, so many more tokens than are translated must be there.
            tokens = self._tokenizer.encode(line[:characters])
            if len(tokens) > 2 * self._longest + 100:
                return tokens, False
            characters *= 4
        return self._tokenizer.encode(line), True

    def check_beside(self, text: str, number: int, what: str) -> None:
        """Warn of the first line beside the source that was not UTF-8, or refuse it.

        Args:
            text: the line.
            number: its number, from 1.
            what: it is, for messages.

        Raises:
            DataError: if it was not UTF-8, and ``strict`` is True.
        """
        if not isinstance(text, DamagedLine):
            return
        if self._strict:
            raise _not_utf8(f"{what}s", number)
        if self.warns and not self._warned_beside:
            self._warned_beside = True
            logger.warning("%s %s has bytes that are not UTF-8, which are read as U+FFFD", what, f"{number:,}")

    def _note_damaged(self, number: int) -> None:
        if self._strict:
            raise _not_utf8("source lines", number)
        if self.warns:
            self._warnings.note_damaged(number)
        else:
            self._counts.first_damaged = self._counts.first_damaged or number
            self._counts.damaged += 1

    def note_batch(self, line: int, tokens: int, max_tokens: int) -> None:
        """Note a line that is longer than a batch.

        Args:
            line: its number among those of this reader, from 1.
            tokens: its length, with EOS.
            max_tokens: bound of a batch.
        """
        if self.warns:
            warn_of_batch(self._before + line, tokens, max_tokens)
        else:
            self._counts.alone.append((self._before + line, tokens))

    def warn_of_unknown(self) -> None:
        """Warn once if many tokens of the lines so far are unknown."""
        if self.warns:
            self._warnings.warn_of_unknown()

    def warn_at_end(self) -> None:
        """Warn at the end of the text if more lines than one were cut or damaged, naming the first of them."""
        if self.warns:
            self._warnings.warn_at_end()


def _length(tokens: int, whole: bool) -> str:
    """Return a phrase for the length of a line, or with ``whole`` False for that of its beginning."""
    return f"{tokens:,} tokens{'' if whole else ' or more'}"


def _not_utf8(lines: str, number: int) -> DataError:
    return DataError(
        f"{lines} must be UTF-8, but line {number:,} is not; convert the text, for example by `iconv -f LATIN1 -t "
        f"UTF-8`, or leave out {option('strict')} to read U+FFFD in place of what is not UTF-8"
    )
