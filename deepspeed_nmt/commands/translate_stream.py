"""Streams of `translate`: text that is translated as it is read, and written as it is translated."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BufferedReader
from typing import TYPE_CHECKING, Any, Protocol

from deepspeed_nmt.commands.translate_outputs import Outputs
from deepspeed_nmt.console import counting
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import text_lines
from deepspeed_nmt.search.base import MisalignedError

if TYPE_CHECKING:
    from deepspeed_nmt.search.base import Translation


class StreamTranslator(Protocol):
    """A translator of either program; see ``deepspeed_nmt.api.Translator``."""

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long."""
        ...

    @property
    def stream(self) -> Callable[..., Iterator[list[Translation]]]:
        """Function that yields the best translations of each sentence."""
        ...


def translate_stream(
    translator: StreamTranslator,
    arguments: argparse.Namespace,
    source: BufferedReader,
    beside: Mapping[str, Any],
    lines: int | None,
    buffer_lines: int,
) -> None:
    """Translate a text in the order of its lines.

    Args:
        translator: the program.
        arguments: of the command line.
        source: the text.
        beside: further arguments of its ``stream``.
        lines: number of lines; None if it is not known.
        buffer_lines: number of lines that are translated together, if the user gives no other; 1 for a terminal.

    Raises:
        UserError: if a line cannot be translated.
        OSError: if the output cannot be written.
    """
    if arguments.strict and source.seekable():  # a pipe is checked as it is read
        start = source.tell()
        translator.check(text_lines(source, arguments.input), arguments.max_source_tokens)
        source.seek(start)
    flushed = arguments.buffer_lines or (1 if source.isatty() else None)
    problem: MisalignedError | None = None
    number = -1
    with Outputs.open(arguments) as outputs, counting("translate", "sentences", lines) as advance:
        translations = translator.stream(
            text_lines(source, arguments.input),
            max_tokens=arguments.max_tokens,
            buffer_lines=flushed or buffer_lines,
            nbest=arguments.nbest,
            advance=advance,
            max_source_tokens=arguments.max_source_tokens,
            strict=arguments.strict,
            **beside,
        )
        try:
            for number, best in enumerate(translations):
                outputs.write(number, best)
                if flushed is not None and (number + 1) % flushed == 0:  # another program may wait for it
                    outputs.flush()
        except MisalignedError as error:  # what was translated is kept
            problem = error
    if problem is not None:
        raise DataError(f"{problem}; lines translated: {number + 1:,}") from problem
