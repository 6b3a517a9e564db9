"""Encoding of the source lines of a translation, with a bound on their length and warnings of bad input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import DataError, option
from deepspeed_nmt.text import TextForm, looks_plain, looks_tokenised

MAX_SOURCE_TOKENS = 1024
"""Tokens of a source line that are translated by default, if the model was not trained on longer ones."""
UNKNOWN_WORTH_A_WARNING = 0.05
"""Share of unknown tokens that causes a warning. Rare characters and new words are a smaller share."""

_NAMED_LINES = 5
_LINES_OF_A_FORM = 100
"""Lines that show the form of a text."""


class Tokenizer(Protocol):
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
class PairTokenizer(Tokenizer, Protocol):
    """The part of a tokenizer that given target text needs."""

    def encode_batch(self, texts: Sequence[str], side: Side, threads: int = 1) -> list[list[int]]:
        """Encode lines of one side as tokens, without EOS."""
        ...


def warn_of_form(lines: Iterable[str], text: TextForm) -> Iterator[str]:
    """Yield the lines of a source text, and warn if the first of them are not in the form of the training text.

    Args:
        lines: the text.
        text: form of the training text.
    """
    first: list[str] | None = []
    for line in lines:
        yield line
        if first is not None:
            first.append(line.rstrip())
            if len(first) == _LINES_OF_A_FORM:
                _warn_of_form(first, text)
                first = None
    if first:
        _warn_of_form(first, text)


def _warn_of_form(lines: Sequence[str], text: TextForm) -> None:
    if text.form == "raw" and (count := looks_tokenised(lines)):
        look, trained, remedy = "end in ' .' and look tokenised", "raw text", "give plain text"
    elif text.form in ("moses", "tokenised") and (count := looks_plain(lines)):
        look, trained = "end in a word with its stop and look like plain text", "tokenised text"
        remedy = "tokenise it as the training text was"
        if text.form == "moses":
            remedy += f", for example by `sacremoses -l {text.source_lang or 'LANGUAGE'} tokenize`"
    else:
        return
    logger.warning(
        "%s of the first %s lines %s, but the run was trained on %s; %s", count, len(lines), look, trained, remedy
    )


class SourceLines:
    """Encoder of the lines of a text, in their order.

    The time and the memory of a line grow faster than its length, and a translation far longer than those that the
    model was trained on is bad. So of a longer line only the beginning is translated, or the line is refused.

    Args:
        tokenizer: vocabulary of the model.
        max_source_tokens: most tokens of a line, without EOS.
        longest_source: most tokens that the model reads, with EOS; None if unlimited.
        strict: True to refuse longer lines, False to cut them.
        warn: False to log nothing, for text that is translated again.

    Attributes:
        warns: True if it logs warnings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_source_tokens: int,
        longest_source: int | None,
        strict: bool = False,
        warn: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._unk = tokenizer.vocabulary.source.unk
        self._longest, self._bound = max_source_tokens, option("max_source_tokens")
        if longest_source is not None and longest_source - 1 < max_source_tokens:
            self._longest, self._bound = longest_source - 1, "all that the model reads"
        self._strict = strict
        self.warns = warn
        self._lines = self._tokens = self._unknown = self._cut = 0
        self._first_cut: list[int] = []
        self._warned_of_unknown = False

    def encode(self, line: str) -> list[int]:
        """Encode the next line as tokens, without EOS.

        Raises:
            DataError: if it is too long, and ``strict`` is True.
        """
        self._lines += 1
        tokens = self._tokenizer.encode(line.rstrip("\r\n"))
        self._tokens += len(tokens)
        self._unknown += tokens.count(self._unk)
        if len(tokens) <= self._longest:
            return tokens
        if self._strict:
            raise DataError(
                f"source lines must have {self._longest:,} tokens at most ({self._bound}), but line {self._lines:,} "
                f"has {len(tokens):,} tokens; split it, or leave out {option('strict')} to translate its beginning"
            )
        if self.warns and self._cut == 0:
            logger.warning(
                "line %s has %s tokens, more than %s (%s): its end is not translated",
                f"{self._lines:,}",
                f"{len(tokens):,}",
                f"{self._longest:,}",
                self._bound,
            )
        self._cut += 1
        if len(self._first_cut) < _NAMED_LINES:
            self._first_cut.append(self._lines)
        return tokens[: self._longest]

    def warn_of_unknown(self) -> None:
        """Warn once if many tokens of the lines so far are unknown."""
        few = self._unknown < UNKNOWN_WORTH_A_WARNING * max(1, self._tokens)
        if not self.warns or self._warned_of_unknown or few:
            return
        self._warned_of_unknown = True
        logger.warning(
            "%s of the %s tokens up to line %s (%.0f%%) are unknown to the vocabulary, and their meaning is lost; "
            "give text in the source language of the run, and in the form of its training text",
            f"{self._unknown:,}",
            f"{self._tokens:,}",
            f"{self._lines:,}",
            100.0 * self._unknown / self._tokens,
        )

    def warn_of_cuts(self) -> None:
        """Warn at the end of the text if more lines than one were cut, naming the first of them."""
        if self.warns and self._cut > 1:
            logger.warning(
                "%s of %s lines were cut to %s tokens: lines %s%s",
                f"{self._cut:,}",
                f"{self._lines:,}",
                f"{self._longest:,}",
                ", ".join(f"{number:,}" for number in self._first_cut),
                ", ..." if self._cut > _NAMED_LINES else "",
            )
