"""Texts of `translate` beside the source, and the numbers of their lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.files import open_text, raw_lines, replaces, text_lines
from deepspeed_nmt.text import phrases_of


@dataclass(frozen=True)
class Beside:
    """Texts that have a line for each line of the source, by the names of arguments of ``Translator.stream``.

    Attributes:
        streams: the texts, each at its beginning.
        names: of their files.
    """

    streams: Mapping[str, BufferedReader[Any]]
    names: Mapping[str, str]

    def lines(self) -> dict[str, Iterator[Any]]:
        """Return the lines of the texts as arguments of ``Translator.stream``."""
        found: dict[str, Iterator[Any]] = {
            name: text_lines(stream, self.names[name]) for name, stream in self.streams.items()
        }
        if "constraints" in found:
            found["constraints"] = map(phrases_of, found["constraints"])
        return found


@contextmanager
def texts_beside(arguments: argparse.Namespace, source: BufferedReader[Any]) -> Iterator[Beside]:
    """Open the texts that have a line for each line of the source.

    If all are files, their lines are counted before anything is translated.

    Args:
        arguments: of the command.
        source: the source text, at its beginning.

    Yields:
        The texts of ``--prefix`` and ``--constraints``.

    Raises:
        ConfigError: if standard input is given twice, or an output would replace a text.
        DataError: if a file cannot be read or has another number of lines.
    """
    names = {"prefix": arguments.prefix, "constraints": arguments.constraints}
    given = {name: path for name, path in names.items() if path is not None}
    if [arguments.input, *given.values()].count("-") > 1:
        raise ConfigError("standard input (`-`) must be given at most once, but is given more often; give paths")
    with ExitStack() as stack:
        streams = {name: stack.enter_context(open_text(path)) for name, path in given.items()}
        outputs = {"--output": arguments.output, "--alignment": arguments.alignment}
        for option, output in outputs.items():
            for name, stream in {"input": source, **streams}.items():
                if output not in (None, "-") and replaces(Path(output), stream):
                    what = "the source text" if name == "input" else "that text"
                    raise ConfigError(
                        f"{option} must be another file than --{name}, but {output} is {what}; give another path"
                    )
        counts = {"source": count_lines(source, arguments.input)} if given else {}
        for name, stream in streams.items():
            counts[name] = count_lines(stream, given[name])
            if None not in counts.values() and counts[name] != counts["source"]:
                raise _misaligned(name, counts[name], counts["source"])
        yield Beside(streams, given)


def _misaligned(name: str, lines: int | None, source: int | None) -> Exception:
    return DataError(
        f"--{name} must have a line for each line of the source, but has {lines:,} and the source has {source:,}; "
        "give a text of the same lines, in which an empty line asks for nothing"
    )


def count_lines(stream: BufferedReader[Any], name: str) -> int | None:
    """Count the lines of a text, which is read again from where it stands; None if it can be read only once."""
    if not stream.seekable():
        return None
    start = stream.tell()
    count = sum(1 for _ in raw_lines(stream, name))
    stream.seek(start)
    return count
