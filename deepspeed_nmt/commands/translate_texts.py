"""Texts of `translate` beside the source, and the numbers of their lines."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.files import open_text, raw_lines, replaces, text_lines

Beside = dict[str, Iterator[Any] | None]
"""Texts that have a line for each line of the source, by the names of arguments of ``Translator.stream``."""


@contextmanager
def texts_beside(
    arguments: argparse.Namespace, source: BufferedReader[Any]
) -> Iterator[dict[str, Iterator[Any] | None]]:
    """Open the texts that have a line for each line of the source.

    If all are files, their lines are counted before anything is translated.

    Args:
        arguments: of the command.
        source: the source text, at its beginning.

    Yields:
        The arguments ``prefix`` and ``constraints`` of :meth:`Translator.stream`.

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
        prefix = text_lines(streams["prefix"], given["prefix"]) if "prefix" in given else None
        constraints = None
        if "constraints" in given:
            lines = text_lines(streams["constraints"], given["constraints"])
            constraints = (line.split("\t") if line else [] for line in lines)
        yield {"prefix": prefix, "constraints": constraints}


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
