"""Pieces of a translation on disk, from which it is resumed and put together.

A text is cut into pieces of equally many lines, and each is translated by itself. Where it is cut depends on the text
and on the batch size only, so that the translation is the same for any number of ranks.

    OUTPUT.pieces/job.json        what is translated, with what: another translation does not resume this one
                  index           where each piece begins in the source text, and the hash of its lines
                  index-prefix    the same of a text beside the source
                  piece-0000000   a line of JSON with hashes and counts, then the translations, then the alignments

Each file is written under a temporary name, synced to disk, and renamed. A piece records hashes of its own content,
of its source and of its job, so that a damaged one is translated again, and never one of another job is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError, shown
from deepspeed_nmt.files import MAX_LINE_BYTES, atomic_write_bytes, parse_json, remove_orphans
from deepspeed_nmt.run.divided_text import Index, Text, digest_of
from deepspeed_nmt.search.source_lines import SourceCounts

SUFFIX = ".pieces"
_JOB_FILE = "job.json"
_INDEX_FILE = "index"
_OWN = re.compile(rf"{re.escape(_JOB_FILE)}|{_INDEX_FILE}(-[a-z]+)?|piece-\d{{7,}}|\..*\.tmp|\.nfs.*")
"""Names of the files in a directory of pieces; NFS keeps removed files that are open as .nfs*."""
SOURCE = "source"
"""Name of the source among the texts of a translation."""
_NO_PIECE = (OSError, ValueError, KeyError, TypeError)
"""Errors of reading what is no piece."""


@dataclass(frozen=True)
class TranslationJob:
    """A translation: what is translated, with what, and how it is cut.

    Attributes:
        options: options and properties by name, on which the translation depends.
        lines: number of lines of the text.
        piece_lines: number of lines of a piece; the last has fewer.
        beside: names of the texts that have a line for each line of the source.
    """

    options: Mapping[str, Any]
    lines: int
    piece_lines: int
    beside: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of all texts, the source first."""
        return SOURCE, *self.beside

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.lines // self.piece_lines)

    @property
    def digest(self) -> str:
        """Hash that identifies the translation among others of the same text."""
        return digest_of(json.dumps([self.options, self.piece_lines], sort_keys=True, default=str).encode())

    def lines_of(self, piece: int) -> int:
        """Return the number of lines of a piece."""
        return min(self.piece_lines, self.lines - piece * self.piece_lines)


class Translated(NamedTuple):
    """The content of a piece.

    Attributes:
        text: translations.
        alignment: their alignments; empty if they are not asked for.
    """

    text: bytes
    alignment: bytes = b""


class Pieces:
    """The directory of the pieces of a translation.

    Args:
        path: directory.
        job: the translation.
    """

    def __init__(self, path: Path, job: TranslationJob) -> None:
        self.path, self.job = path, job

    def prepare(self, texts: Mapping[str, Text]) -> int:
        """Make the directory or resume in it: write the indices, and remove damaged pieces.

        Args:
            texts: by name, each at its beginning, where it is left.

        Returns:
            Number of lines that were translated earlier.

        Raises:
            DataError: if the directory is of another translation.
            OSError: if a file cannot be written.
        """
        if self.path.exists():
            self._check_own()
        self.path.mkdir(exist_ok=True)
        remove_orphans(self.path)
        self._check_job()
        for name in reversed(self.job.texts):  # other ranks begin when they see that of the source
            self._index(name).write(texts[name])
        finished = lines = 0
        for piece in range(self.job.pieces):
            if not self.has(piece):
                continue
            if problem := self._problem(piece):
                logger.warning("%s %s; it is translated again", self.file(piece), problem)
                self.file(piece).unlink(missing_ok=True)
            else:
                finished, lines = finished + 1, lines + self.job.lines_of(piece)
        if finished:
            logger.info("resumes: %d of %d pieces are in %s", finished, self.job.pieces, self.path)
        return lines

    def is_visible(self) -> bool:
        """Return True if this host sees the directory as rank 0 has prepared it."""
        return (self.path / _INDEX_FILE).exists()

    def file(self, piece: int) -> Path:
        """Return the path of a piece."""
        return self.path / f"piece-{piece:07d}"

    def has(self, piece: int) -> bool:
        """Return True if a piece is finished."""
        return self.file(piece).exists()

    def lines(self, name: str, text: Text, piece: int) -> list[bytes]:
        """Read the lines of a piece, with their ends.

        Args:
            name: of the text among those of the translation.
            text: the text.
            piece: number of the piece.

        Raises:
            DataError: if the text has changed since the index was written.
        """
        return self._index(name).lines(text, piece)

    def write(self, piece: int, translated: Translated, counts: SourceCounts) -> None:
        """Write a piece.

        Args:
            piece: its number.
            translated: its content.
            counts: of its source lines.

        Raises:
            OSError: if the file cannot be written, for example because the disk is full.
        """
        header = {
            "job": self.job.digest,
            "source": self._source(piece),
            "bytes": [len(each) for each in translated],
            "sha256": digest_of(*translated),
            "counts": asdict(counts),
        }
        try:
            atomic_write_bytes(self.file(piece), json.dumps(header).encode() + b"\n" + b"".join(translated))
        except FileNotFoundError:
            # On a file system without locks, a rank that takes a silent one's piece removes its temporary file.
            if not self.has(piece):
                raise

    def counts(self, piece: int) -> SourceCounts | None:
        """Return the counts of the source lines of a finished piece; None if it is damaged."""
        with suppress(*_NO_PIECE), self.file(piece).open("rb") as file:
            return SourceCounts(**self._header(piece, file)["counts"])
        return None

    def read(self, piece: int) -> Translated | None:
        """Return the content of a piece; None if it is damaged."""
        with suppress(*_NO_PIECE), self.file(piece).open("rb") as file:
            header = self._header(piece, file)
            size, more = header["bytes"]
            content = file.read()
            if len(content) == size + more and digest_of(content) == header["sha256"]:
                return Translated(content[:size], content[size:])
        return None

    def _source(self, piece: int) -> str:
        """Return the hash of the lines of a piece in all texts."""
        digests = [self._index(name).entry(piece)[1] for name in self.job.texts]
        return digests[0] if len(digests) == 1 else digest_of(" ".join(digests).encode())

    def _index(self, name: str) -> Index:
        """Return the index of a text."""
        file = self.path / (_INDEX_FILE if name == SOURCE else f"{_INDEX_FILE}-{name}")
        return Index(file, self.job.piece_lines)

    def _header(self, piece: int, file: IO[bytes]) -> dict[str, Any]:
        """Read the first line of a piece.

        Raises:
            ValueError: if it is damaged, or of another job or text.
        """
        header = parse_json(file.readline(MAX_LINE_BYTES))
        if header["job"] != self.job.digest or header["source"] != self._source(piece):
            raise ValueError("of another translation")
        if not isinstance(header["counts"], dict):
            raise TypeError("without counts")
        SourceCounts(**header["counts"])
        return dict(header)

    def _problem(self, piece: int) -> str | None:
        """Return the predicate of a message if a piece cannot be used, and None if it can."""
        try:
            with self.file(piece).open("rb") as file:
                self._header(piece, file)
        except _NO_PIECE:
            return "is damaged, or of another translation"
        return "has other content than was written" if self.read(piece) is None else None

    def remove(self) -> None:
        """Remove the directory and its files, or warn that it cannot be removed."""
        try:
            for file in self.path.iterdir():
                file.unlink(missing_ok=True)
            self.path.rmdir()
        except OSError as error:  # such as files that NFS keeps because another rank has them open
            logger.warning(
                "%s is no longer needed, but could not be removed (%s); remove it", self.path, error.strerror or error
            )

    def _check_own(self) -> None:
        """Check that nothing but pieces is in the way.

        Raises:
            DataError: if something is.
        """
        foreign = [self.path]
        if self.path.is_dir():
            foreign = [file for file in self.path.iterdir() if not _OWN.fullmatch(file.name) or file.is_dir()]
        if foreign:
            raise DataError(
                f"{self.path} is where the pieces of the translation are kept, but {foreign[0]} is in the way, which "
                "`translate` did not write; move it away, or give another output"
            )

    def check(self) -> None:
        """Compare the job with the one that is recorded, if there is one, in the options that this one has.

        Raises:
            DataError: if they differ, or something else is in the way.
        """
        self._check_own()
        now = self._options()
        before = now
        with suppress(*_NO_PIECE):
            before = dict(parse_json((self.path / _JOB_FILE).read_bytes()))
        self._refuse([_difference(key, before, now) for key in sorted(now)])

    def _options(self) -> dict[str, Any]:
        """Return what the translation depends on, as JSON records it."""
        now = {**self.job.options, "lines of a piece": self.job.piece_lines}
        return dict(json.loads(json.dumps(now, default=str)))

    def _check_job(self) -> None:
        """Record the job, or compare it with the one that is recorded.

        Raises:
            DataError: if it is another one.
        """
        now = self._options()
        file = self.path / _JOB_FILE
        if file.exists():
            try:
                before = dict(parse_json(file.read_bytes()))
            except _NO_PIECE:
                logger.warning("%s is damaged; pieces of this translation are used, others translated again", file)
                before = now
            self._refuse([_difference(key, before, now) for key in sorted(before.keys() | now.keys())])
        atomic_write_bytes(file, json.dumps(now, indent=1).encode())

    def _refuse(self, differences: list[str]) -> None:
        """Refuse a directory of another translation, if there are differences that are not empty.

        Raises:
            DataError: naming them.
        """
        if named := [each for each in differences if each]:
            raise DataError(
                f"{self.path} must be of the same translation to be resumed, but {', '.join(named[:3])}; start "
                f"with what it was begun with, or remove {self.path} to begin anew"
            )


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the clause of a message on what differs in one entry of a job; empty if nothing does."""
    if before.get(key) == now.get(key):
        return ""
    if key in ("the source text", "the weights", "the vocabulary") or key.startswith("the text of "):
        return f"{key} was another one"
    return f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}"
