"""Arguments of the Python API: checks of their types, and sentences as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.search.translate import Translation
from deepspeed_nmt.text import TextForm

Paths = str | Path | Sequence[str | Path]
"""A run directory, or several."""


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
        return sentence

    return map(text, sentences)
