"""Lines of a text to translate, by whatever program: encoding, prefixes and constraints, warnings, batches.

Lines are read a buffer at a time. The sentences of a buffer are batched by length and put back into order. Nothing
here imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Protocol

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import ConfigError, DataError, option
from deepspeed_nmt.search.base import MisalignedError, Request, Translation
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.text import NO_TAGS, DamagedLine, Tags, TextForm, looks_plain, looks_tokenised

BUFFER_LINES = 4096
"""Lines of a text in memory, by default."""
UNKNOWN_WORTH_A_WARNING = 0.05
"""Share of unknown tokens that causes a warning. Rare characters and new words are a smaller share."""
LINES_OF_A_FORM = 100
"""Lines that show the form of a text."""

_WHOLE_LINE = 1 << 16
"""Characters of a line that are encoded at once. Tokenizing many times more takes gigabytes, and minutes."""
_KINDS = {
    "damaged": "have bytes that are not UTF-8",
    "damaged beside": "have bytes beside the source that are not UTF-8",
    "unknown beside": "have prefixes or constraints with unknown tokens",
    "cut": "were cut",
}
"""Kinds of lines to warn of."""
_CONVERT = "convert the text, for example by `iconv -f LATIN1 -t UTF-8`"


class LineTokenizer(Protocol):
    """The part of a tokenizer that translation needs."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Sizes and special tokens of both sides."""

    def encode(self, text: str, /) -> list[int]:
        """Encode a source sentence as tokens, without EOS."""

    def encode_batch(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        """Encode lines of one side as tokens, without EOS."""

    def decode(self, tokens: list[int], /) -> str:
        """Decode target tokens into a sentence."""

    def reference(self, text: str, /) -> str:
        """Convert text to the form of :meth:`decode`."""


@dataclass
class SourceCounts:
    """Counts of the lines of a text, or of a stretch of it, from which warnings are made.

    Attributes:
        drafts: counts of a search that drafts; none of others.
        unknown: number of tokens that are unknown to the vocabulary.
        noted: number of lines to warn of, by kind.
        first: message on the first of them, by kind.
    """

    lines: int = 0
    tokens: int = 0
    unknown: int = 0
    noted: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)

    def note(self, kind: str, message: str) -> None:
        """Count a line to warn of."""
        self.noted[kind] = self.noted.get(kind, 0) + 1
        self.first.setdefault(kind, message)

    def add_drafts(self, counts: Mapping[str, int]) -> None:
        """Add counts of a search that drafts."""
        self.drafts = dict(Counter(self.drafts) + Counter(counts))

    def warn_of(self, more: SourceCounts) -> None:
        """Add the counts of the next stretch, and warn of the first line of each kind, and of unknown tokens."""
        self.lines, self.tokens = self.lines + more.lines, self.tokens + more.tokens
        self.unknown += more.unknown
        self.add_drafts(more.drafts)
        for kind, message in more.first.items():
            self.noted[kind] = self.noted.get(kind, 0) + more.noted.get(kind, 0)
            self._warn_once(kind, message)
        if self.unknown >= max(1, UNKNOWN_WORTH_A_WARNING * self.tokens):
            self._warn_once(
                "unknown",
                f"{self.unknown:,} of the {self.tokens:,} tokens up to line {self.lines:,} "
                f"({100.0 * self.unknown / self.tokens:.0f}%) are unknown to the vocabulary, and their meaning is "
                "lost; give text in the source language of the run, and in the form of its training text",
            )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self.first:
            self.first[kind] = message
            logger.warning("%s", message)

    def warn_at_end(self) -> None:
        """Log the number of lines of each kind that has more than the first, and the acceptance of drafts."""
        if passes := self.drafts.get("passes"):
            drafted, accepted = (self.drafts.get(name, 0) for name in ("drafted", "accepted"))
            logger.info(
                f"{accepted:,} of {drafted:,} drafted tokens were accepted "
                f"({100.0 * accepted / max(1, drafted):.0f}%); "
                f"a pass through the whole decoder gave {self.drafts['tokens'] / passes:.2f} tokens of a line"
            )
        for kind, what in _KINDS.items():
            if (count := self.noted.get(kind, 0)) > 1:
                logger.warning("%s of %s lines %s", f"{count:,}", f"{self.lines:,}", what)


class SourceLines:
    """Encoder of the lines of a text, in their order.

    The time and the memory of a line grow faster than its length, and a translation far longer than those that the
    model was trained on is bad. So of a longer line only the beginning is translated, or the line is refused. Of a
    line that is longer still, the rest is not even encoded.

    Args:
        longest: most tokens of a line, without EOS.
        longest_source: most tokens that the model reads, with EOS; None if unlimited.
        strict: True to refuse longer lines and those that were not UTF-8; False to cut them, and to read U+FFFD.
        counts: record of what there is to warn of, for a stretch of a text that is warned of as a whole, or not at
            all. None to log it.
        before: number of lines of the text before the first.

    Attributes:
        counts: of the lines since the last :meth:`warn`.
        number: of the last line that was encoded, from 1.
    """

    def __init__(
        self,
        tokenizer: LineTokenizer,
        longest: int,
        longest_source: int | None,
        strict: bool = False,
        counts: SourceCounts | None = None,
        before: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self._longest, self._bound = longest, option("max_source_tokens")
        if longest_source is not None and longest_source - 1 < longest:
            self._longest, self._bound = longest_source - 1, "all that the model reads"
        self._strict = strict
        self._total = SourceCounts() if counts is None else None
        self.counts = SourceCounts() if counts is None else counts
        self.number = before

    def encode(self, line: str) -> list[int]:
        """Encode the next line as tokens, without EOS, or refuse it by a DataError."""
        self.number += 1
        self.check_utf8(self.number, "source", line)
        tokens, is_whole = self._beginning(line.rstrip("\r\n"))
        self.counts.lines += 1
        self.counts.tokens += len(tokens)
        self.counts.unknown += tokens.count(self.tokenizer.vocabulary.source.unk)
        if len(tokens) <= self._longest:
            return tokens
        length = f"{len(tokens):,} tokens{'' if is_whole else ' or more'}"
        if self._strict:
            raise DataError(
                f"line {self.number:,} of the source has {length}, more than {self._longest:,} ({self._bound}); "
                f"split it, or leave out {option('strict')} to translate its beginning"
            )
        self.counts.note(
            "cut",
            f"line {self.number:,} has {length}, more than {self._longest:,} ({self._bound}): its end is not "
            "translated",
        )
        return tokens[: self._longest]

    def _beginning(self, line: str) -> tuple[list[int], bool]:
        """Return the tokens of as much of a line as is sure to hold those to translate, and True if that is all."""
        characters = _WHOLE_LINE
        while characters < len(line):
            # The last tokens depend on what follows, so many more tokens than are translated must be there.
            tokens = self.tokenizer.encode(line[:characters])
            if len(tokens) > 2 * self._longest + 100:
                return tokens, False
            characters *= 4
        return self.tokenizer.encode(line), True

    def check_utf8(self, number: int, name: str, *texts: str) -> None:
        """Note a line that was not UTF-8, or refuse it, by its number from 1, the name of its text, and its parts."""
        if self._strict:
            refuse_damaged(number, name, *texts)
        if any(isinstance(text, DamagedLine) for text in texts):
            kind = "damaged" if name == "source" else "damaged beside"
            what = "has bytes that are not UTF-8, which are read as U+FFFD"
            self.counts.note(kind, f"line {number:,} of the {name} {what}; {_CONVERT}")

    def warn(self) -> None:
        """Log what the lines since the last call give cause to, unless they are counted for somebody else."""
        if self._total is not None:
            self._total.warn_of(self.counts)
            self.counts = SourceCounts()

    def warn_at_end(self) -> None:
        """Log how many lines there were to warn of."""
        self.warn()
        if self._total is not None:
            self._total.warn_at_end()


def refuse_damaged(number: int, name: str, *texts: str) -> None:
    """Refuse a line that was not UTF-8 by a DataError; see :meth:`SourceLines.check_utf8`."""
    if any(isinstance(text, DamagedLine) for text in texts):
        raise DataError(
            f"line {number:,} of the {name} is not UTF-8; {_CONVERT}, or leave out {option('strict')} to read U+FFFD"
        )


@dataclass(frozen=True)
class LineInputs:
    """Inputs of a translation beside the source.

    Attributes:
        prefix: text with which each translation begins, "" for any; None for no prefixes.
        constraints: phrases that each translation contains; None for no constraints.
        first: number of the first line in its text, from 0. Random choices depend on it.
        tags: symbols in front of all source lines, and at the beginning of all translations, which are returned bare.
        step: difference between the numbers of two lines; above 1 if the lines between are translated elsewhere.
    """

    prefix: Iterable[str] | None = None
    constraints: Iterable[Sequence[str]] | None = None
    first: int = 0
    step: int = 1
    tags: Tags = NO_TAGS

    def check(self, search: SearchConfig) -> None:
        """Check that a search respects the inputs, or raise a ConfigError."""
        prefix = ("prefix", "a search from left to right")
        for name, text, taken, remedy in (
            ("prefix", self.prefix, *prefix),
            ("tag_target", self.tags.target, *prefix),
            ("constraints", self.constraints, "constraints", "search constrained_beam"),
        ):
            if text is not None and taken not in search.takes:
                raise ConfigError(
                    f"{option(name)} needs {remedy}, but search.name={search.name} decodes here; change the search, "
                    f"or leave out {option(name)}"
                )

    def requests(
        self, lines: Iterable[str], reader: SourceLines, longest_target: int | None
    ) -> Iterator[tuple[str, Request]]:
        """Yield source lines, with the source's tag in front, and their requests.

        Args:
            longest_target: most tokens of a translation, EOS included; None if unlimited.

        Raises:
            MisalignedError: if a text beside the source ends before it or after it, or a line has more tokens than
                the model writes.
        """
        tokenizer = reader.tokenizer
        tag = () if self.tags.target is None else _target_tokens(tokenizer, [self.tags.target])[0]
        beside = {
            name: iter(texts)
            for name, texts in (("prefix", self.prefix), ("constraints", self.constraints))
            if texts is not None
        }
        for read, line in enumerate(chain(self.tags.tagged(lines), (None,))):
            given: dict[str, Any] = {name: next(texts, None) for name, texts in beside.items()}
            for name, text in given.items():
                if (text is None) != (line is None):
                    counts = ("has more", f"has {read:,}")
                    own, other = counts if line is None else counts[::-1]
                    raise MisalignedError(
                        f"{option(name)} {own} lines, and the source {other}; give a text of the same lines, in "
                        "which an empty line asks for nothing"
                    )
            if line is None:
                return
            number = self.first + read * self.step
            if not given:
                yield line, Request(number, tag, tags=len(tag))
                continue
            texts = [given.get("prefix", ""), *given.get("constraints", ())]
            reader.check_utf8(number + 1, "prefix", texts[0])
            reader.check_utf8(number + 1, "constraints", *texts[1:])
            begin, *phrases = _target_tokens(tokenizer, [text.strip() for text in texts])
            request = Request(number, (*tag, *begin), tuple(phrase for phrase in phrases if phrase), len(tag))
            tokens = [token for phrase in (request.prefix, *request.constraints) for token in phrase]
            if longest_target is not None and len(tokens) >= longest_target:
                raise MisalignedError(
                    f"the prefix and constraints of line {number + 1:,} have {len(tokens):,} tokens, more than "
                    f"{longest_target - 1:,}, which is all that the model writes; shorten them"
                )
            if tokenizer.vocabulary.unk in tokens:
                reader.counts.note(
                    "unknown beside",
                    f"the prefix or a constraint of line {number + 1:,} has tokens that are unknown to the "
                    "vocabulary, which the translation shows as such",
                )
            yield line, request


def _target_tokens(tokenizer: LineTokenizer, texts: list[str]) -> list[tuple[int, ...]]:
    return [tuple(tokens) for tokens in tokenizer.encode_batch(texts, "target")]


def warn_of_form(lines: Iterable[str], text: TextForm) -> Iterator[str]:
    """Yield the lines of a source text, and warn if the first are not in ``text``, the form of the training text."""
    lines = iter(lines)
    first: list[str] = []
    for line in islice(lines, LINES_OF_A_FORM):
        yield line
        first.append(line.rstrip())
    if text.form == "raw" and (count := looks_tokenised(first)):
        look, trained, remedy = "end in ' .' and look tokenised", "raw text", "give plain text"
    elif text.form in ("moses", "tokenised") and (count := looks_plain(first)):
        look, trained = "end in a word with its stop and look like plain text", "tokenised text"
        remedy = "tokenise it as the training text was"
        if text.form == "moses":
            remedy += f", for example by `sacremoses -l {text.source_lang or 'LANGUAGE'} tokenize`"
    else:
        count = 0
    if count:
        logger.warning(
            "%s of the first %s lines %s, but the run was trained on %s; %s", count, len(first), look, trained, remedy
        )
    yield from lines


def length_buckets(lengths: Sequence[int], max_tokens: int, width: int = 1) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, and yield their numbers.

    The longest are first, so that a batch that does not fit into memory fails at once and not after an hour.

    Args:
        lengths: length of each sentence in tokens.
        max_tokens: bound of sentences times the longest of a batch, and of sentences times ``width``, the hypotheses
            of each; a longer sentence gets a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(1, width, lengths[order[start]]))
        yield order[start : start + size]
        start += size


Line = tuple[str, Request]
Found = tuple[int, list[Translation]]
"""A sentence, by its number among those that were asked for, and its translations, best first."""


def translated(
    lines: Iterator[Line],
    search: Callable[[list[Line], list[list[int]]], Iterable[list[Found]]],
    reader: SourceLines,
    nothing: Translation,
    options: DecodeOptions,
    advance: Callable[[int], object],
    tags: Tags,
    lock: AbstractContextManager[object] | None = None,
) -> Iterator[list[Translation]]:
    """Yield the translations of lines in their order, and log warnings of the lines.

    ``search`` translates the lines that have tokens besides the source's tag, given those without EOS, batch by
    batch; the translation of others is ``nothing``. The lock is held while lines are encoded. A MisalignedError of
    ``lines`` is raised after the lines before are translated.
    """
    problem: MisalignedError | None = None
    while problem is None:
        buffer: list[Line] = []
        try:
            for line in islice(lines, options.buffer_lines or BUFFER_LINES):
                buffer.append(line)
        except MisalignedError as error:
            problem = error
        if not buffer:
            break
        with lock or nullcontext():
            sources = [reader.encode(line) for line, _ in buffer]
            wordless: tuple[list[int], ...] = [], reader.tokenizer.encode(tags.source or "")
        filled = [number for number, source in enumerate(sources) if source not in wordless]
        reader.warn()
        translations = [[nothing] for _ in buffer]
        advance(len(buffer) - len(filled))
        for batch in search([buffer[number] for number in filled], [sources[number] for number in filled]):
            for place, best in batch:
                translations[filled[place]] = best
            advance(len(batch))
        yield from translations
    reader.warn_at_end()
    if problem is not None:
        raise problem


def in_plain_text(translations: Iterable[list[Translation]], form: TextForm) -> Iterator[list[Translation]]:
    """Yield translations of lines with plain text, given the form in which the model writes."""
    for best in translations:
        texts = form.convert("plain", [one.text for one in best])
        yield [replace(one, text=text) for one, text in zip(best, texts, strict=True)]


def check_nbest(nbest: int, search: SearchConfig) -> None:
    """Check that a search keeps ``nbest`` translations of a line, or raise a ConfigError."""
    if nbest <= search.width:
        return
    if search.width_setting is None:
        raise ConfigError(f"{option('nbest')} is {nbest}, but search.name={search.name} finds one; use another")
    width = option(search.width_setting)
    bound = width if search.lists == 1 else f"{search.lists} x {width}"
    raise ConfigError(
        f"{option('nbest')} is {nbest}, more than {bound}, which is {search.width}; raise {width} to "
        f"{-(-nbest // search.lists)}"
    )
