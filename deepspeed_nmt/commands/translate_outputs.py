"""Outputs of `translate`: translations, n-best lists and alignments, and the files that they are written to."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TextIO

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.nbest import Candidate
from deepspeed_nmt.files import atomic_text_writer, is_replaceable, resolved

if TYPE_CHECKING:
    from deepspeed_nmt.search.base import Translation


def writes_lists(arguments: argparse.Namespace) -> bool:
    """Return True if n-best lists are written."""
    return bool(arguments.nbest > 1 or arguments.token_scores)


def written(number: int, best: Sequence[Translation], lists: bool) -> str:
    """Return the translations of a line as they are written.

    Args:
        number: of the line, from 0.
        best: its translations, best first.
        lists: True for n-best lists.
    """
    if not lists:
        return best[0].text + "\n"
    return "".join(f"{candidate}\n" for candidate in _candidates(number, best))


def aligned(number: int, best: Sequence[Translation]) -> str:
    """Return the alignments of the translations of a line as they are written.

    Args:
        number: of the line, from 0.
        best: its translations, best first.
    """
    from deepspeed_nmt.search.alignment import pharaoh

    return "".join(f"{pharaoh(each.alignment or ())}\n" for each in best)


def _candidates(line: int, translations: Sequence[Translation]) -> Iterator[Candidate]:
    """Yield the translations of a line as an n-best list."""
    for each in translations:
        features = {**each.features, "log_prob": each.log_prob, "tokens": len(each.tokens)}
        yield Candidate(line, each.text, features, each.score, each.token_scores or ())


def target_of(name: str, option: str) -> Path | None:
    """Return the path of an output file; None for standard output.

    Raises:
        ConfigError: if it cannot be written.
    """
    if name == "-":
        return None
    target = Path(name)
    problem = _problem_of(target)
    if problem is not None:
        raise ConfigError(f"{option} must be a writable file, but {target} {problem}; give another path")
    return target


def _problem_of(target: Path) -> str | None:
    """Return the predicate of a message if a file cannot be written, and None if it can.

    Raises:
        OSError: if the disk is full.
    """
    if target.is_dir():
        return "is a directory"
    if not target.parent.is_dir():
        return f"is in {target.parent}, which is no directory"
    try:
        if is_replaceable(target):  # permissions do not tell: of some file systems they permit what is refused
            with TemporaryFile(dir=resolved(target).parent):
                return None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return f"cannot be written ({error.strerror or error})"
    return None if os.access(target, os.W_OK) else f"cannot be written ({os.strerror(errno.EACCES)})"


def check_outputs(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Return the paths of the translations and of the alignment; None for standard output, or without alignment.

    Raises:
        ConfigError: if one cannot be written, or both are the same.
    """
    target = target_of(arguments.output, "--output")
    if arguments.alignment is None:
        return target, None
    aligned = target_of(arguments.alignment, "--alignment")
    if (aligned and resolved(aligned)) == (target and resolved(target)):
        raise ConfigError("--alignment must be another file than --output, but both are the same; give another")
    return target, aligned


@dataclass(frozen=True)
class Outputs:
    """Files that translations are written to; see :meth:`open`.

    Attributes:
        text: of the translations or n-best lists.
        alignment: of the alignments; None if they are not asked for.
        lists: True for n-best lists.
    """

    text: TextIO
    alignment: TextIO | None
    lists: bool

    @classmethod
    @contextmanager
    def open(cls, arguments: argparse.Namespace) -> Iterator[Outputs]:
        """Open the outputs. Files are complete or unchanged.

        Raises:
            ConfigError: if they cannot be written.
        """
        target, aligned = check_outputs(arguments)
        with ExitStack() as stack:
            text = stack.enter_context(nullcontext(sys.stdout) if target is None else atomic_text_writer(target))
            alignment = None
            if arguments.alignment is not None:
                writer = nullcontext(sys.stdout) if aligned is None else atomic_text_writer(aligned)
                alignment = stack.enter_context(writer)
            yield cls(text, alignment, writes_lists(arguments))
            text.flush()

    def flush(self) -> None:
        """Hand over what is written so far."""
        for stream in filter(None, (self.text, self.alignment)):
            stream.flush()

    def write(self, number: int, best: Sequence[Translation]) -> None:
        """Write the translations of a line.

        Args:
            number: of the line, from 0.
            best: its translations, best first.
        """
        self.text.write(written(number, best, self.lists))
        if self.alignment is not None:
            self.alignment.write(aligned(number, best))
