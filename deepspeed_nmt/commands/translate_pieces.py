"""Files of `translate` that are translated in pieces, by how many ranks, and by workers."""

from __future__ import annotations

import argparse
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from signal import SIGUSR1
from typing import Any

from deepspeed_nmt.api import Translator
from deepspeed_nmt.commands.translate_options import weights_of
from deepspeed_nmt.commands.translate_outputs import target_of, writes_lists, written
from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import is_replaceable
from deepspeed_nmt.interruption import interruptible
from deepspeed_nmt.parallel.device import uses_cuda
from deepspeed_nmt.parallel.launched import place
from deepspeed_nmt.parallel.workers import run_workers
from deepspeed_nmt.parallel.world import take_gpu
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.opening import check_ensemble, chosen_search
from deepspeed_nmt.run.pieces import MAX_LINES, count_lines, lines_of_a_piece
from deepspeed_nmt.run.translation import (
    FileToTranslate,
    check_resumable,
    pieces_directory,
    translate_in_pieces,
)

_INDEPENDENT = {"command", "run", "checkpoint", "input", "output", "device", "workers", "strict", "local_rank"} | {
    "rerank",
    "suppress",
}
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


_WHOLE = ("prefix", "constraints", "alignment")
"""Options with which a text is translated whole."""


def layout(arguments: argparse.Namespace, source: BufferedReader) -> Layout:
    """Return the division of the input into pieces.

    Raises:
        ConfigError: if several ranks are to translate what is no file, or with options for one process.
    """
    target = target_of(arguments.output, "--output")
    ranks = place().ranks
    if arguments.workers < 1:
        raise ConfigError(f"--workers must be at least 1, but is {arguments.workers}")
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
    readable = str(arguments.input) != "-" and stat.S_ISREG(os.fstat(source.fileno()).st_mode)
    writable = target is not None and is_replaceable(target)
    several = max(ranks, arguments.workers) > 1
    if several and not (readable and writable):
        option = "--output" if readable else "--input"
        raise ConfigError(
            f"{option} must be a file to be translated by several processes, but is "
            f"{arguments.output if readable else arguments.input}; give a file, or start one process"
        )
    whole = [name for name in _WHOLE if getattr(arguments, name) is not None]
    if several and whole:
        raise ConfigError(
            f"--{whole[0]} is for one process, but several are to start; leave it out, or start one process"
        )
    if not readable:
        return Layout(False, None, MAX_LINES)
    lines = count_lines(source)
    piece_lines = lines_of_a_piece(lines, arguments.max_tokens)
    begun = target is not None and writable and pieces_directory(target).exists()
    divided = writable and not whole and (several or begun or lines > piece_lines)
    return Layout(divided, lines, piece_lines)


def take_device(arguments: argparse.Namespace) -> None:
    """Make this rank's GPU the current one, if several ranks decode on GPUs.

    Raises:
        ConfigError: if there is no GPU for it.
    """
    here = place()
    if here.ranks > 1 and uses_cuda(arguments.device, "--device"):
        take_gpu(here.local_rank)


@contextmanager
def warned_once() -> Iterator[None]:
    """Let only rank 0 log warnings of the block, which are the same on all ranks."""
    level = logger.level
    if place().rank:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def translate(translator: Translator, arguments: argparse.Namespace, source: BufferedReader, layout: Layout) -> int:
    """Translate a file in pieces, and return the exit status.

    Raises:
        UserError: as :func:`deepspeed_nmt.run.translation.translate_in_pieces`.
        OSError: if a file cannot be written.
    """
    file = _file(arguments, source, layout)
    with interruptible(SIGUSR1):  # batch systems announce a time limit by it
        return translate_in_pieces(translator, file, partial(written, lists=writes_lists(arguments)))


def _file(arguments: argparse.Namespace, source: BufferedReader, layout: Layout) -> FileToTranslate:
    """Return what is translated in pieces."""
    assert layout.lines is not None
    options = {
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
    )


def translate_by_workers(
    arguments: argparse.Namespace, search: Mapping[str, Any], source: BufferedReader, layout: Layout
) -> int:
    """Translate a file with workers on this host's CPU, and return their exit status.

    Args:
        arguments: of the command line.
        search: settings of the search, as ``Translator.open`` takes them.
        source: the text.
        layout: its division.

    Raises:
        UserError: if an option is wrong, or another translation was begun. Starting workers takes much longer.
    """
    from deepspeed_nmt.cli import execute

    runs = [Run.open(path) for path in arguments.run]
    check_ensemble(runs, weights_of(arguments))
    changes = {key: value for key, value in search.items() if key != "suppress"}
    exits = {name: getattr(arguments, name) for name in ("exit", "encoder_layers", "decoder_layers")}
    chosen = chosen_search(runs, changes, search["suppress"], exits)
    check_resumable(_file(arguments, source, layout), chosen, "cpu")
    one = argparse.Namespace(**{**vars(arguments), "workers": 1, "device": "cpu"})
    with interruptible(SIGUSR1):
        return run_workers(execute, one, arguments.workers)
