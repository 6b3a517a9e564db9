"""Form of a corpus's text: raw, or tokenised by Moses' rules or by another tool.

A translation has the form of the text that its model was trained on. sacreBLEU is for plain text, multi-bleu for
tokens; :meth:`TextForm.convert` makes either of them, where that is possible. This is the only file that imports
sacremoses.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, import_optional, option, shown

Kind = Literal["plain", "tokenised"]
"""Kinds of text that metrics score: plain text, or tokens separated by spaces."""
Form = Literal["raw", "moses", "tokenised"]

_LINES_WORTH_A_WARNING = 0.3
"""Share of lines that shows the form of a text. Fewer show nothing: a tokenised line, too, can end in "etc."."""
_WITHOUT_ABBREVIATIONS = ("ja", "ko")
"""Languages for which sacremoses has rules, but no list of abbreviations."""
_WORD_WITH_STOP = re.compile(r"[^\W_][.!?]$")
_LINE_BREAK = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""Characters at which a program may cut lines: those of :meth:`str.splitlines`."""

_WORD = re.compile(r"[^\W\d_]+")  # numbers and punctuation are no words

# A translation that ends inside a word leaves `@@` at the end of its line.
_SEGMENT_MARK = re.compile(r"@@(?: |$)")
_SEGMENTED_WORD = re.compile(r"[^ \t\n\r\v\f]+")


class DamagedLine(str):
    """A line of text that had bytes that are not UTF-8, with U+FFFD in their place."""


def text_of(line: bytes) -> str:
    """Return a line of text without its end; a :class:`DamagedLine` if it is not UTF-8."""
    line = line.rstrip(b"\n").rstrip(b"\r")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return DamagedLine(line.decode("utf-8", errors="replace"))


def one_line(text: str) -> str:
    """Return text with spaces in place of line breaks, so that it remains one line of a file."""
    return _LINE_BREAK.sub(" ", text)


def shared_words(source: str, target: str) -> float:
    """Return the share of the different words of both sides, in lower case, that are on both; 0 if there are none."""
    ours, theirs = (set(_WORD.findall(side.lower())) for side in (source, target))
    return len(ours & theirs) / len(ours | theirs) if ours or theirs else 0.0


def segmented_words(text: str) -> list[str]:
    """Split already segmented text at ASCII white space; a no-break space belongs to its token."""
    return _SEGMENTED_WORD.findall(text)


def normalise_whitespace(text: str, segmented: bool = False) -> str:
    """Put single spaces between words and none around them; raw text may have any Unicode white space."""
    return " ".join(segmented_words(text) if segmented else text.split())


@dataclass(frozen=True)
class Tags:
    """Symbols in front of all sentences of a corpus; with the target's, a translation is forced to begin."""

    source: str | None = None
    target: str | None = None

    def of(self, side: Literal["source", "target"]) -> str | None:
        """Return the tag of a side."""
        return self.source if side == "source" else self.target

    def tagged(self, lines: Iterable[str]) -> Iterable[str]:
        """Put the source's tag in front of source lines. An empty line stays empty, a damaged one damaged."""
        if self.source is None:
            return lines
        return (type(line)(f"{self.source} {line}") if line.strip() else line for line in lines)

    def changed(self, source: str | None, target: str | None) -> Tags:
        """Return the tags with those that a user gives, "" for none; a side with None keeps its own."""
        given = {"source": source, "target": target}
        return replace(self, **{side: tag or None for side, tag in given.items() if tag is not None})

    def untagged(self, line: str, side: Literal["source", "target"] = "target") -> str:
        """Remove the tag of its side from a line."""
        tag = self.of(side)
        if tag is None or line.split(maxsplit=1)[:1] != [tag]:
            return line
        return line.lstrip()[len(tag) :].lstrip()


NO_TAGS = Tags()
_UNDIVIDED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]{5}")


@dataclass(frozen=True)
class TextForm:
    """Form of a corpus's text. Segmented text has the form of the words that its segments make.

    It is raw; moses: tokenised and escaped by Moses' tokenizer; or tokenised: by another tool. Language codes, for
    example "de", are None if they are not known.
    """

    form: Form = "raw"
    source_lang: str | None = None
    target_lang: str | None = None

    def __str__(self) -> str:
        """Return the form and the languages, as far as they are known."""
        languages = "-".join(filter(None, (self.source_lang, self.target_lang)))
        return f"{self.form} ({languages})" if languages else self.form

    def contradicts(self, other: TextForm) -> bool:
        """Return True if two texts differ in form or language; what one does not record is no difference."""
        sources = {self.source_lang, other.source_lang} - {None}
        targets = {self.target_lang, other.target_lang} - {None}
        return any(len(values) > 1 for values in ({self.form, other.form}, sources, targets))

    def problem(self, kind: Kind) -> str:
        """Return the reason why translations cannot be made plain or tokenised, as a clause; "" if they can."""
        if kind == "plain":
            if self.form == "tokenised":
                return "the text is tokenised by unknown rules"
            if self.form == "moses" and self.target_lang is None:
                return "the text is tokenised, and its target language is not recorded"
        elif self.form == "raw" and self.target_lang is None:
            return "the text is raw, and its target language is not recorded"
        return ""

    def how(self, kind: Kind) -> str:
        """Return a phrase for the log about :meth:`convert`; "" if it keeps the text."""
        verbs = {("plain", "moses"): "detokenised", ("tokenised", "raw"): "tokenised"}
        verb = verbs.get((kind, self.form))
        return f"{verb} by Moses' rules for {self.target_lang}" if verb else ""

    def convert(self, kind: Kind, lines: Sequence[str]) -> list[str]:
        """Make lines of the target side plain, or tokenised; raise a ConfigError if that is not possible."""
        if reason := self.problem(kind):
            raise ConfigError(
                f"{kind} text is needed, but {reason}; run `prepare` again with --text and --target-lang"
            )
        if not self.how(kind):
            return list(lines)
        language = self.target_lang or ""
        return detokenise(lines, language) if kind == "plain" else list(tokenise(lines, language))


def without_spaces(line: str) -> bool:
    """Return True if a line has words of a script that does not divide them: of China, Japan or Southeast Asia."""
    return _UNDIVIDED.search(line) is not None


def check_language(code: str) -> str:
    """Return a language code (ISO 639), or raise a ValueError if it is none."""
    if not re.fullmatch("[a-z]{2,3}", code):
        raise ValueError(f"{shown(code)} is no language code, for example de")
    return code


def plain_form(text: TextForm, language: str, owner: Path) -> TextForm:
    """Return the form of the text that a run (``owner``) writes, to make it plain, or raise a ConfigError.

    ``language`` is that given by the user; "" to take that of the run.
    """
    name = option("detokenise")
    form = text
    if language:
        try:
            form = TextForm("moses", target_lang=check_language(language))
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    if reason := form.problem("plain"):
        raise ConfigError(f"{name}: {reason}; if Moses' tokenizer made it, give the language, for example de")
    form.convert("plain", [])  # imports what it needs before anything is translated
    if language:
        warn_of_missing_rules(language, name)
    if not form.how("plain"):
        logger.warning("%s changes nothing, because %s was trained on plain text; leave it out", name, owner)
    return form


def tokenise(lines: Iterable[str], language: str, dashes: bool = False) -> Iterable[str]:
    """Yield raw lines tokenised and escaped by the rules of Moses' tokenizer.perl; ``dashes`` is its option -a."""
    tokenizer = sacremoses().MosesTokenizer(language)
    for line in lines:
        yield tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True, escape=True)


def detokenise(lines: Iterable[str], language: str) -> list[str]:
    """Undo :func:`tokenise`, by the rules of Moses' detokenizer.perl, escapes and split dashes included."""
    detokenizer = sacremoses().MosesDetokenizer(language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def join_segments(line: str) -> str:
    """Undo subword-nmt's segmentation: ``er sch@@ läft`` becomes ``er schläft``."""
    return _SEGMENT_MARK.sub("", line)


def looks_tokenised(lines: Sequence[str]) -> int:
    """Return the number of lines that end in " .", as plain text does not; 0 if they are few."""
    return _if_many(sum(line.endswith(" .") for line in lines), lines)


def looks_plain(lines: Sequence[str]) -> int:
    """Return the number of lines that end in a word with its stop, which a tokenizer separates; 0 if they are few."""
    return _if_many(sum(_WORD_WITH_STOP.search(line) is not None for line in lines), lines)


def _if_many(count: int, lines: Sequence[str]) -> int:
    return count if count >= _LINES_WORTH_A_WARNING * max(1, len(lines)) else 0


def warn_of_missing_rules(language: str, option: str) -> None:
    """Warn if sacremoses, which may not be installed, has no rules for a language, given by ``option``."""
    try:
        corpus = importlib.import_module("sacremoses.corpus")
    except ImportError:
        return
    if language not in (*corpus.NonbreakingPrefixes().available_langs, *_WITHOUT_ABBREVIATIONS):
        logger.warning(
            f"{option} {language}: sacremoses has no rules for this language, so the rules common to all languages "
            "are used, with the abbreviations of English"
        )


def sacremoses() -> Any:
    """Import sacremoses, or raise a ConfigError if it is not installed."""
    return import_optional("sacremoses", "Moses' tokenizer", "pip install sacremoses")
