"""Translation of the input of `translate` in pieces. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from deepspeed_nmt.commands.translate_outputs import aligned, target_of, writes_lists, written
from deepspeed_nmt.commands.translate_texts import Beside
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import is_replaceable
from deepspeed_nmt.parallel.launched import place
from deepspeed_nmt.run.divided_text import MAX_LINES, Text, count_lines, lines_of_a_piece
from deepspeed_nmt.run.translated_file import FileToTranslate, FileTranslator
from deepspeed_nmt.run.translation import pieces_directory, translate_in_pieces

_WORKERS_A_CORE = 4
"""Most workers for each CPU core: each takes the memory of a process with torch and the model."""
_INDEPENDENT = (
    {"command", "run", "export", "checkpoint", "input", "output", "device", "workers", "strict", "local_rank"}
    | {"rerank", "suppress", "buffer_lines"}
    | {"prefix", "constraints", "alignment", "precision"}
)
"""Options on which the translation of a line does not depend, or whose files or settings are compared instead."""


@dataclass(frozen=True)
class Layout:
    """A division of the input into pieces.

    Attributes:
        in_pieces: True if it is translated in pieces, which can be resumed; False for a stream.
        lines: number of lines; None for a stream that can be read only once.
        piece_lines: number of lines that are translated together.
    """

    in_pieces: bool
    lines: int | None
    piece_lines: int


def layout(arguments: argparse.Namespace, source: BufferedReader, beside: Beside) -> Layout:
    """Return the division of the input into pieces.

    Args:
        arguments: of the command line.
        source: the text.
        beside: texts beside it.

    Raises:
        ConfigError: if several ranks are to translate what is no file, or with options for one process.
    """
    target = target_of(arguments.output, "--output")
    ranks = place().ranks
    if arguments.workers < 1:
        raise ConfigError(f"--workers must be at least 1, but is {arguments.workers}")
    cores = len(os.sched_getaffinity(0))
    if arguments.workers > (most := _WORKERS_A_CORE * cores):
        raise ConfigError(
            f"--workers must be at most {most}, {_WORKERS_A_CORE} for each CPU core of this process, but is "
            f"{arguments.workers}; {cores} are usually fastest"
        )
    if arguments.workers > 1 and ranks > 1:
        raise ConfigError(
            f"--workers must be 1 under a launcher, which has started {ranks} processes, but is {arguments.workers}; "
            "leave it out"
        )
    if arguments.workers > 1 and arguments.device == "cuda":
        raise ConfigError(
            f"--workers {arguments.workers} starts processes on the CPU, but --device is cuda; give one of them, and "
            "start a process for each GPU with `torchrun` or `deepspeed`"
        )
    readable = _is_file(arguments.input, source)
    several = max(ranks, arguments.workers) > 1
    wrong = [] if readable else ["input"]
    wrong += [name for name, stream in beside.streams.items() if not _is_file(beside.names[name], stream)]
    wrong += [
        name
        for name in ("output", "alignment")
        if (path := getattr(arguments, name)) is not None and (path == "-" or not is_replaceable(Path(path)))
    ]
    if several and wrong:
        raise ConfigError(
            f"--{wrong[0]} must be a file to be translated by several processes, but is "
            f"{getattr(arguments, wrong[0])}; give a file, or start one process"
        )
    if not readable:
        return Layout(False, None, MAX_LINES)
    lines = count_lines(source)
    piece_lines = lines_of_a_piece(lines, arguments.max_tokens)
    begun = target is not None and pieces_directory(target).exists()
    return Layout(not wrong and (several or begun or lines > piece_lines), lines, piece_lines)


def _is_file(name: str, stream: BufferedReader[Any]) -> bool:
    """Return True if a text is a file, which can be read again."""
    return name != "-" and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def file_of(arguments: argparse.Namespace, source: BufferedReader, layout: Layout, beside: Beside) -> FileToTranslate:
    """Return what is translated in pieces.

    Args:
        arguments: of the command line.
        source: the text.
        layout: its division.
        beside: texts beside it.
    """
    assert layout.lines is not None
    options: Mapping[str, Any] = {
        f"--{name.replace('_', '-')}": value for name, value in vars(arguments).items() if name not in _INDEPENDENT
    }
    return FileToTranslate(
        source,
        arguments.input,
        Path(arguments.output),
        layout.lines,
        layout.piece_lines,
        arguments.max_tokens,
        arguments.max_source_tokens,
        arguments.strict,
        arguments.nbest,
        arguments.token_scores,
        options,
        {name: Text(stream, getattr(arguments, name)) for name, stream in beside.streams.items()},
        None if arguments.alignment is None else Path(arguments.alignment),
        arguments.alignment_layer,
    )


def translate_file(translator: FileTranslator, arguments: argparse.Namespace, file: FileToTranslate) -> int:
    """Translate a file in pieces, and return the exit status.

    Raises:
        UserError: as :func:`deepspeed_nmt.run.translation.translate_in_pieces`.
        OSError: if a file cannot be written.
    """
    text = partial(written, lists=writes_lists(arguments))
    return translate_in_pieces(translator, file, text, None if file.alignment is None else aligned)
