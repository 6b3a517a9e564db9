"""Inputs of a translation that come line by line beside the source: prefixes and lexical constraints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.search.base import MisalignedError, Request
from deepspeed_nmt.search.source_lines import PairTokenizer, SourceCounts, SourceTokenizer, warn_of_unknown_beside
from deepspeed_nmt.text import NO_TAGS, Tags


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
            raise ConfigError(f"{option('prefix')} must be a list of strings, but has {shown(prefix)}")
        if isinstance(constraints, str) or not isinstance(constraints, (Sequence, type(None))):
            raise ConfigError(
                f"{option('constraints')} must be a list with a list of phrases for each sentence, but has "
                f"{shown(constraints)}"
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
            f"{option(name)} must have a line for each line of the source, but {what} and the source {end}; give a "
            "text of the same lines, in which an empty line asks for nothing"
        )

    def _check(self, request: Request, number: int) -> None:
        """Warn of unknown tokens, and refuse more tokens than the model reads."""
        phrases = (request.prefix, *request.constraints)
        needed = sum(map(len, phrases)) + 1
        if self._longest is not None and needed > self._longest:
            raise MisalignedError(
                f"a prefix and constraints must have {self._longest - 1:,} tokens at most, which is all that the "
                f"model writes, but those of line {number + 1:,} have {needed - 1:,}; shorten them"
            )
        if not self._counts.first_unknown_beside and any(
            self._tokenizer.vocabulary.unk in phrase for phrase in phrases
        ):
            self._counts.first_unknown_beside = number + 1
            if self._logs:
                warn_of_unknown_beside(number + 1)
