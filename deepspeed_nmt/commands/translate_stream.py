"""Streams of `translate`: text that is translated as it is read, and written as it is translated."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from deepspeed_nmt.console import counting
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.nbest import Candidate
from deepspeed_nmt.files import atomic_text_writer, replaces, text_lines

if TYPE_CHECKING:
    from deepspeed_nmt.search.base import Translation


class StreamTranslator(Protocol):
    """A translator of either program; see ``deepspeed_nmt.api.Translator``."""

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long."""
        ...

    def stream(
        self,
        sentences: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        nbest: int = 1,
        advance: Callable[[int], object] = ...,
        max_source_tokens: int | None = None,
        strict: bool = False,
    ) -> Iterator[list[Translation]]:
        """Yield the best translations of each sentence."""
        ...


def checked_target(arguments: argparse.Namespace) -> Path | None:
    """Return the output file; None for standard output.

    Raises:
        ConfigError: if it cannot be written.
    """
    target = None if arguments.output == "-" else Path(arguments.output)
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        what = "is a directory" if target.is_dir() else f"is in {target.parent}, which is no directory"
        raise ConfigError(f"--output must be a writable file, but {target} {what}; give another path")
    return target


def refuse_source_as_output(target: Path | None, source: BufferedReader) -> None:
    """Check that the output would not replace the source text.

    Raises:
        ConfigError: if it would.
    """
    if target is not None and replaces(target, source):
        raise ConfigError(
            f"--output must be another file than --input, but {target} is the source text; give another path"
        )


def translate_stream(
    translator: StreamTranslator,
    arguments: argparse.Namespace,
    source: BufferedReader,
    target: Path | None,
    lines: int | None,
    buffer_lines: int,
) -> None:
    """Translate a text in the order of its lines.

    Args:
        translator: the program.
        arguments: of the command line.
        source: the text.
        target: output file; None for standard output.
        lines: number of lines; None if it is not known.
        buffer_lines: number of lines that are translated together; 1 for a terminal.

    Raises:
        UserError: if a line cannot be translated.
        OSError: if the output cannot be written.
    """
    if arguments.strict and source.seekable():  # a pipe is checked as it is read
        start = source.tell()
        translator.check(text_lines(source, arguments.input), arguments.max_source_tokens)
        source.seek(start)
    interactive = source.isatty()
    writer = nullcontext(sys.stdout) if target is None else atomic_text_writer(target)
    with writer as output, counting("translate", "sentences", lines) as advance:
        translations = translator.stream(
            text_lines(source, arguments.input),
            max_tokens=arguments.max_tokens,
            buffer_lines=1 if interactive else buffer_lines,
            nbest=arguments.nbest,
            advance=advance,
            max_source_tokens=arguments.max_source_tokens,
            strict=arguments.strict,
        )
        for number, best in enumerate(translations):
            output.write(written(arguments, number, best))
            if interactive:
                output.flush()
        output.flush()


def written(arguments: argparse.Namespace, line: int, translations: Sequence[Translation]) -> str:
    """Return the translations of a line, numbered from 0, as they are written."""
    if arguments.nbest == 1:
        return translations[0].text + "\n"
    return "".join(f"{candidate}\n" for candidate in _candidates(line, translations))


def _candidates(line: int, translations: Sequence[Translation]) -> Iterator[Candidate]:
    """Yield the translations of a line as an n-best list."""
    for each in translations:
        features = {**each.features, "log_prob": each.log_prob, "tokens": len(each.tokens)}
        yield Candidate(line, each.text, features, each.score)
