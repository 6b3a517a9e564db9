"""Arguments of the Python API: checks of their types, and sentences as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.text import TextForm

Paths = str | Path | Sequence[str | Path]
"""A run directory, or several."""


class StreamOptions(TypedDict, total=False):
    """Options of ``Translator.stream`` that ``Translator.translate`` shares."""

    max_source_tokens: int | None
    strict: bool
    prefix: Iterable[str] | None
    constraints: Iterable[Sequence[str]] | None
    token_scores: bool
    alignment: bool
    alignment_layer: int | None


MAX_LINE = 2**62
"""Largest number of the first sentence in its text."""


def made_plain(found: Iterable[list[Translation]], text: TextForm) -> Iterator[list[Translation]]:
    """Yield translations with plain text."""
    for best in found:
        lines = text.convert("plain", [each.text for each in best])
        yield [replace(each, text=line) for each, line in zip(best, lines, strict=True)]


def check_type(name: str, value: object, types: tuple[type, ...], requirement: str) -> None:
    """Check the type of an argument.

    Raises:
        ConfigError: if the value is of none of the types.
    """
    if not isinstance(value, types):
        raise ConfigError(f"{option(name)} must be {requirement}, but is {shown(value)}")


def paths_of(run: Paths) -> list[Path]:
    """Return the run directories that the user gave.

    Raises:
        ConfigError: if one is no path.
    """
    several = [run] if isinstance(run, (str, Path)) or not isinstance(run, Iterable) else list(run)
    for each in several:
        check_type("run", each, (str, Path), "a run directory or several")
    return [Path(each) for each in several]


def checked_texts(sentences: Iterable[str], name: str = "sentences") -> Iterator[str]:
    """Return an iterator over sentences that refuses everything else; it reads on demand.

    Args:
        sentences: to check.
        name: of the argument, for messages.

    Raises:
        ConfigError: if they are one string, or no iterable. The iterator raises it for what is no string.
    """
    if isinstance(sentences, (str, bytes)):
        raise ConfigError(f"`{name}` must be a list of sentences, but is one string; put it into a list: [sentence]")
    check_type(name, sentences, (Iterable,), "a list of sentences")

    def text(sentence: str) -> str:
        check_type(name, sentence, (str,), "a list of strings")
        check_unicode(name, sentence)
        return sentence

    return map(text, sentences)


def checked_phrases(constraints: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Return an iterator over the phrases of each sentence that refuses phrases that are no text.

    Args:
        constraints: to check.

    Raises:
        ConfigError: if they are one string, or no iterable. The iterator raises it for what is no list of text.
    """
    requirement = "a list with a list of phrases for each sentence"
    if isinstance(constraints, (str, bytes)):
        raise ConfigError(f"{option('constraints')} must be {requirement}, but is {shown(constraints)}")
    check_type("constraints", constraints, (Iterable,), requirement)

    def texts(phrases: Sequence[str]) -> Sequence[str]:
        if isinstance(phrases, str) or not isinstance(phrases, Sequence):
            raise ConfigError(f"{option('constraints')} must be {requirement}, but has {shown(phrases)}")
        for phrase in phrases:
            check_type("constraints", phrase, (str,), requirement)
            check_unicode("constraints", phrase)
        return phrases

    return map(texts, constraints)


def check_details(
    search: SearchConfig, token_scores: bool, alignment: bool, layer: int | None, detokenise: TextForm | None
) -> None:
    """Check that a translation can return what is asked for beside the text.

    Args:
        search: which decodes.
        token_scores: True for the scores of tokens.
        alignment: True for links of words.
        layer: decoder layer that aligns; None if none is given.
        detokenise: form of the text that is made plain; None if none is.

    Raises:
        ConfigError: if it cannot.
    """
    if layer is not None and not alignment:
        raise ConfigError(f"{option('alignment_layer')} is for {option('alignment')}, which is missing; give both")
    if (token_scores or alignment) and not search.left_to_right:
        raise ConfigError(
            f"{option('alignment' if alignment else 'token_scores')} needs a run that translates from left to right, "
            "but this one predicts masked tokens; leave it out, or use another run"
        )
    if alignment and detokenise is not None:
        raise ConfigError(
            f"{option('alignment')} links the words that the model writes, which {option('detokenise')} changes; "
            "leave out one of them"
        )


def check_unicode(name: str, text: str) -> None:
    """Check that text can be encoded as UTF-8.

    Raises:
        ConfigError: if it has surrogates, as Python makes of bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{option(name)} must be Unicode text, but has a lone surrogate in {shown(text)}; decode the bytes by "
            "their encoding"
        ) from error


def check_flags(**flags: object) -> None:
    """Check that arguments are True or False.

    Raises:
        ConfigError: if one is not.
    """
    for name, value in flags.items():
        check_type(name, value, (bool,), "True or False")


def beside_of(
    prefix: Iterable[str] | None, constraints: Iterable[Sequence[str]] | None, first_line: int
) -> tuple[Iterator[str] | None, Iterator[Sequence[str]] | None, int]:
    """Return inputs of a translation beside the source, checked as they are read, and the number of the first line.

    Raises:
        ConfigError: if one is of another type, or the number is out of range.
    """
    check_type("first_line", first_line, (int,), "a whole number")
    if not 0 <= first_line <= MAX_LINE:
        raise ConfigError(f"{option('first_line')} must be from 0 to {MAX_LINE:,}, but is {shown(first_line)}")
    texts = None if prefix is None else checked_texts(prefix, "prefix")
    return texts, None if constraints is None else checked_phrases(constraints), first_line
