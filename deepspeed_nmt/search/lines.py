"""Lines of a text to translate, by whatever program: encoding, prefixes and constraints, warnings, batches.

Lines are read a buffer at a time. The sentences of a buffer are batched by length and put back into order. Nothing
here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import ConfigError, DataError, option, shown
from deepspeed_nmt.search.base import MisalignedError, Request, Translation
from deepspeed_nmt.text import NO_TAGS, DamagedLine, Tags, TextForm, looks_plain, looks_tokenised

BUFFER_LINES = 4096
"""Lines of a text in memory, by default."""
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
        self._alone = 0

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
            self.note_alone(line, tokens, max_tokens)

    def note_alone(self, line: int, tokens: int, max_tokens: int) -> None:
        """Count a line that is longer than a batch, and warn of the first.

        Args:
            line: its number, from 1.
            tokens: its length, with EOS.
            max_tokens: bound of a batch.
        """
        self._alone += 1
        if self._alone == 1:
            logger.warning(
                "line %s has %s tokens, more than %s (%s): it is translated in a batch of its own",
                f"{line:,}",
                f"{tokens:,}",
                option("max_tokens"),
                f"{max_tokens:,}",
            )

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
        """Warn at the end of the text if more lines than one were cut, damaged or longer than a batch."""
        if self._alone > 1:
            logger.warning(
                "%s of %s lines are longer than a batch (%s)",
                f"{self._alone:,}",
                f"{self.counts.lines:,}",
                option("max_tokens"),
            )
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


def longest_line(tokens: int, longest_source: int | None) -> tuple[int, str]:
    """Return the most tokens of a line that are translated, without EOS, and what sets this bound.

    Args:
        tokens: bound of a line by the options.
        longest_source: most tokens that the model reads, with EOS; None if unlimited.
    """
    if longest_source is not None and longest_source - 1 < tokens:
        return longest_source - 1, "all that the model reads"
    return tokens, option("max_source_tokens")


class SourceLines:
    """Encoder of the lines of a text, in their order.

    The time and the memory of a line grow faster than its length, and a translation far longer than those that the
    model was trained on is bad. So of a longer line only the beginning is translated, or the line is refused. Of a
    line that is longer still, the rest is not even encoded.

    Args:
        tokenizer: vocabulary of the model.
        longest: most tokens of a line, without EOS.
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
        longest: int,
        longest_source: int | None,
        strict: bool = False,
        warn: bool = True,
        counts: SourceCounts | None = None,
        before: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._unk = tokenizer.vocabulary.source.unk
        self._longest, self._bound = longest_line(longest, longest_source)
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
                f"line {number:,} of the source has {_length(len(tokens), whole)}, more than {self._longest:,} "
                f"({self._bound}); split it, or leave out {option('strict')} to translate its "
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
            raise _not_utf8("source", number)
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
            self._warnings.note_alone(self._before + line, tokens, max_tokens)
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
        f"line {number:,} of the {lines} is not UTF-8; convert the text, for example by `iconv -f LATIN1 -t "
        f"UTF-8`, or leave out {option('strict')} to read U+FFFD in place of what is not UTF-8"
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

    def check(self, search: SearchConfig, tokenizer: SourceTokenizer) -> None:
        """Check that a search respects the inputs.

        Raises:
            ConfigError: if it does not.
        """
        left_to_right = "a search from left to right"
        for name, given, taken, remedy in (
            ("prefix", self.prefix, "prefix", left_to_right),
            ("tag_target", self.tags.target, "prefix", left_to_right),
            ("constraints", self.constraints, "constraints", "search constrained_beam"),
        ):
            if given is None:
                continue
            if taken not in search.takes:
                raise ConfigError(
                    f"{option(name)} needs {remedy}, but search.name={search.name} decodes here; change the search, "
                    f"or leave out {option(name)}"
                )
            assert isinstance(tokenizer, PairTokenizer), "the tokenizer must encode target text"


class RequestedLines:
    """Reader of source lines with their requests.

    Args:
        lines: source lines.
        inputs: beside them.
        tokenizer: vocabulary of the model.
        longest_target: most tokens of a translation, EOS included; None if unlimited.
        counts: record of the first line to warn of, for a stretch of a text; None to log the warning.

    Attributes:
        problem: error of the line after the last one that was read; None if there is none.
    """

    def __init__(
        self,
        lines: Iterable[str],
        inputs: LineInputs,
        tokenizer: SourceTokenizer,
        longest_target: int | None,
        counts: SourceCounts | None = None,
    ) -> None:
        self._lines = iter(lines)
        self._prefix = None if inputs.prefix is None else iter(inputs.prefix)
        self._constraints = None if inputs.constraints is None else iter(inputs.constraints)
        self._inputs = inputs
        self._begin: list[int] = []
        if inputs.tags.target is not None:
            assert isinstance(tokenizer, PairTokenizer)
            self._begin = tokenizer.encode_batch([inputs.tags.target], "target")[0]
        self._tokenizer = tokenizer
        self._longest = longest_target
        self._read = 0
        self._counts = SourceCounts() if counts is None else counts
        self._logs = counts is None
        self.problem: MisalignedError | None = None

    def read(self, count: int) -> list[tuple[str, Request]]:
        """Return at most ``count`` further lines; fewer at the end, or before a :attr:`problem`."""
        found: list[tuple[str, Request]] = []
        try:
            while len(found) < count and self.problem is None:
                if (pair := self._next()) is None:
                    break
                found.append(pair)
        except MisalignedError as error:
            self.problem = error
        return found

    def _next(self) -> tuple[str, Request] | None:
        line = next(self._lines, None)
        prefix = self._beside(self._prefix, "prefix", line is None)
        constraints = self._beside(self._constraints, "constraints", line is None)
        if line is None:
            return None
        number = self._inputs.first + self._read * self._inputs.step
        self._read += 1
        if prefix is None and constraints is None:
            return line, Request(number, tuple(self._begin))
        if not isinstance(prefix, (str, type(None))):
            raise ConfigError(f"{option('prefix')} has {shown(prefix)}; give a list of strings")
        if isinstance(constraints, str) or not isinstance(constraints, (Sequence, type(None))):
            raise ConfigError(
                f"{option('constraints')} has {shown(constraints)}; give a list of phrases for each sentence"
            )
        texts = [prefix or "", *(constraints or [])]
        assert isinstance(self._tokenizer, PairTokenizer)
        first, *phrases = self._tokenizer.encode_batch([text.strip() for text in texts], "target")
        request = Request(number, (*self._begin, *first), tuple(tuple(phrase) for phrase in phrases if phrase))
        self._check(request, number)
        return line, request

    def _beside(self, texts: Iterator[object] | None, name: str, ended: bool) -> object:
        """Return the next line of a text beside the source.

        Raises:
            MisalignedError: if exactly one of the two has ended.
        """
        if texts is None:
            return None
        found = next(texts, None)
        if (found is None) == ended:
            return found
        what = "has more" if ended else f"has {self._read:,}"
        end = f"has {self._read:,}" if ended else "has more"
        raise MisalignedError(
            f"{option(name)} {what} lines, and the source {end}; give a text of the same lines, in which an empty "
            "line asks for nothing"
        )

    def _check(self, request: Request, number: int) -> None:
        """Warn of unknown tokens, and refuse more tokens than the model reads."""
        phrases = (request.prefix, *request.constraints)
        needed = sum(map(len, phrases)) + 1
        if self._longest is not None and needed > self._longest:
            raise MisalignedError(
                f"the prefix and constraints of line {number + 1:,} have {needed - 1:,} tokens, more than "
                f"{self._longest - 1:,}, which is all that the model writes; shorten them"
            )
        if not self._counts.first_unknown_beside and any(
            self._tokenizer.vocabulary.unk in phrase for phrase in phrases
        ):
            self._counts.first_unknown_beside = number + 1
            if self._logs:
                warn_of_unknown_beside(number + 1)


LINES_OF_A_FORM = 100
"""Lines that show the form of a text."""


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
            if len(first) == LINES_OF_A_FORM:
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


def length_buckets(lengths: Sequence[int], max_tokens: int, width: int = 1) -> Iterator[list[int]]:
    """Cut sentences into batches of similar length, the longest first.

    With the longest first, a batch that does not fit into memory fails at once and not after an hour.

    Args:
        lengths: length of each sentence in tokens.
        max_tokens: bound of sentences times the longest of a batch; a longer sentence gets a batch of its own.
        width: hypotheses of a sentence. Sentences times hypotheses have the same bound, so that a step of the search
            has an end soon, and fits into memory.

    Yields:
        The sentences' numbers, each once.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    start = 0
    while start < len(order):
        size = max(1, max_tokens // max(1, width, lengths[order[start]]))
        yield order[start : start + size]
        start += size


Line = TypeVar("Line")
Found = tuple[int, list[Translation]]
"""A sentence, by its number among those that were asked for, and its translations, best first."""


class BatchSearch(Protocol[Line]):
    """A program that translates the sentences of a buffer, batch by batch."""

    def __call__(self, lines: list[Line], sources: list[list[int]], /) -> Iterable[list[Found]]:
        """Yield the sentences of each batch.

        Args:
            lines: sentences that have tokens.
            sources: their tokens, without EOS.
        """
        ...


def translated(
    read: Callable[[int], Sequence[Line]],
    encode: Callable[[Sequence[Line]], list[list[int]]],
    search: BatchSearch[Line],
    reader: SourceLines,
    nothing: Translation,
    max_tokens: int,
    buffer_lines: int,
    advance: Callable[[int], object],
) -> Iterator[list[Translation]]:
    """Yield the translations of lines in their order, and log warnings of the lines.

    Args:
        read: returns at most as many further lines; none at the end.
        encode: returns the tokens of lines, by ``reader``.
        search: translates.
        reader: of the lines.
        nothing: translation of a line without tokens.
        max_tokens: bound of a batch: sentences times the longest source, in tokens with EOS.
        buffer_lines: lines that are read before the first of them is yielded.
        advance: called with the number of further lines that are done.
    """
    before = 0
    while buffer := read(buffer_lines):
        sources = encode(buffer)
        reader.warn_of_unknown()
        translations = [[nothing] for _ in buffer]
        filled = [number for number, source in enumerate(sources) if source]
        advance(len(buffer) - len(filled))
        for number in filled:
            if (length := len(sources[number]) + 1) > max_tokens:
                reader.note_batch(before + number + 1, length, max_tokens)
        for batch in search([buffer[number] for number in filled], [sources[number] for number in filled]):
            for place, best in batch:
                translations[filled[place]] = best
            advance(len(batch))
        yield from translations
        before += len(buffer)
    reader.warn_at_end()


def check_nbest(nbest: int, search: SearchConfig) -> None:
    """Check that a search keeps ``nbest`` translations of a line.

    Raises:
        ConfigError: if it keeps fewer.
    """
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
