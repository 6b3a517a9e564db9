"""Pieces of a translation on disk, from which it is resumed and put together.

A text is cut into pieces of equally many lines, and each is translated by itself. Where it is cut depends on the text
and on the batch size only, so that the translation is the same for any number of ranks.

    OUTPUT.pieces/job.json        what is translated, with what: another translation does not resume this one
                  index           where each piece begins in the source text, and the hash of its lines
                  piece-0000000   a line of JSON with hashes and counts, then the translations

Each file is written under a temporary name, synced to disk, and renamed. A piece records hashes of its own content,
of its source and of its job, so that a damaged one is translated again, and never one of another job is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO, Any

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError, shown
from deepspeed_nmt.files import (
    MAX_LINE_BYTES,
    atomic_write_bytes,
    atomic_writer,
    parse_json,
    raw_lines,
    remove_orphans,
    skip_byte_order_mark,
)
from deepspeed_nmt.search.source_lines import SourceCounts

SUFFIX = ".pieces"
MAX_LINES = 4096
"""Bound of the lines of a piece, which are in memory at once."""
MAX_LINES_OF_LARGE_BATCHES = 16384
"""The same bound if a batch has so many tokens that it needs more lines."""
_TOKENS_PER_LINE = 8
"""Tokens of a batch for each line that a piece has at least. Thus it fills several batches, most of them wholly."""
_PIECES = 64
"""Number of pieces of a text of middling length."""
_JOB_FILE = "job.json"
_INDEX_FILE = "index"
_ENTRY_BYTES = 16 + 1 + 64 + 1
"""Size of an entry of the index: offset and hash in hexadecimal."""
_OWN = re.compile(rf"{re.escape(_JOB_FILE)}|{_INDEX_FILE}|piece-\d{{7,}}|\..*\.tmp")
"""Names of the files in a directory of pieces."""
_BLOCK_BYTES = 1 << 20
_NO_PIECE = (OSError, ValueError, KeyError, TypeError)
"""Errors of reading what is no piece."""


def lines_of_a_piece(lines: int, max_tokens: int) -> int:
    """Return the number of lines of a piece.

    Args:
        lines: number of lines of the text.
        max_tokens: bound of a batch: sentences x longest source.
    """
    least = min(MAX_LINES_OF_LARGE_BATCHES, max_tokens // _TOKENS_PER_LINE)
    return max(1, least, min(MAX_LINES, -(-lines // _PIECES)))


def count_lines(stream: BufferedReader) -> int:
    """Count the lines from where a stream stands, and return there."""
    start, lines, last = stream.tell(), 0, b"\n"
    while block := stream.read(_BLOCK_BYTES):
        lines += block.count(b"\n")
        last = block[-1:]
    stream.seek(start)
    return lines + (last != b"\n")


@dataclass(frozen=True)
class Job:
    """A translation: what is translated, with what, and how it is cut.

    Attributes:
        options: options and properties by name, on which the translation depends.
        lines: number of lines of the text.
        piece_lines: number of lines of a piece; the last has fewer.
    """

    options: Mapping[str, Any]
    lines: int
    piece_lines: int

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.lines // self.piece_lines)

    @property
    def digest(self) -> str:
        """Hash that identifies the translation among others of the same text."""
        return _digest(json.dumps([self.options, self.piece_lines], sort_keys=True, default=str).encode())

    def lines_of(self, piece: int) -> int:
        """Return the number of lines of a piece."""
        return min(self.piece_lines, self.lines - piece * self.piece_lines)


class Pieces:
    """The directory of the pieces of a translation.

    Args:
        path: directory.
        job: the translation.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.job = path, job

    def prepare(self, source: BufferedReader, name: str) -> int:
        """Make the directory or resume in it: write the index, and remove damaged pieces.

        Args:
            source: the text, at its beginning, where it is left.
            name: of the text, for messages.

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
        self._write_index(source, name)
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

    def source(self, stream: BufferedReader, name: str, piece: int) -> list[bytes]:
        """Read the source lines of a piece, with their ends.

        Args:
            stream: the text.
            name: of the text, for messages.
            piece: number of the piece.

        Raises:
            DataError: if the text has changed since the index was written.
        """
        offset, digest = self._entry(piece)
        stream.seek(offset)
        lines = list(islice(raw_lines(stream, name, piece * self.job.piece_lines), self.job.piece_lines))
        if _digest(*lines) != digest:
            raise DataError(
                f"{name} must not change while it is translated, but has; restore it and start again, or remove "
                f"{self.path} to translate the new text"
            )
        return lines

    def write(self, piece: int, text: bytes, counts: SourceCounts) -> None:
        """Write the translations of a piece.

        Args:
            piece: its number.
            text: translations of its lines.
            counts: of its source lines.

        Raises:
            OSError: if the file cannot be written, for example because the disk is full.
        """
        header = {
            "job": self.job.digest,
            "source": self._entry(piece)[1],
            "bytes": len(text),
            "sha256": _digest(text),
            "counts": asdict(counts),
        }
        try:
            atomic_write_bytes(self.file(piece), json.dumps(header).encode() + b"\n" + text)
        except FileNotFoundError:
            # On a file system without locks, a rank that takes a silent one's piece removes its temporary file.
            if not self.has(piece):
                raise

    def counts(self, piece: int) -> SourceCounts:
        """Return the counts of the source lines of a finished piece."""
        with self.file(piece).open("rb") as file:
            return SourceCounts(**self._header(piece, file)["counts"])

    def text(self, piece: int) -> bytes | None:
        """Return the translations of a piece; None if it is damaged."""
        with suppress(*_NO_PIECE), self.file(piece).open("rb") as file:
            header = self._header(piece, file)
            text = file.read()
            if len(text) == header["bytes"] and _digest(text) == header["sha256"]:
                return text
        return None

    def _header(self, piece: int, file: IO[bytes]) -> dict[str, Any]:
        """Read the first line of a piece.

        Raises:
            ValueError: if it is damaged, or of another job or text.
        """
        header = parse_json(file.readline(MAX_LINE_BYTES))
        if header["job"] != self.job.digest or header["source"] != self._entry(piece)[1]:
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
        return "has other content than was written" if self.text(piece) is None else None

    def remove(self) -> None:
        """Remove the directory and its files."""
        for file in self.path.iterdir():
            file.unlink(missing_ok=True)
        self.path.rmdir()

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

    def _write_index(self, source: BufferedReader, name: str) -> None:
        """Write where each piece begins, and the hash of its lines."""
        start = source.tell()
        with atomic_writer(self.path / _INDEX_FILE) as index:
            for offset, digest in _entries(source, name, self.job.piece_lines):
                index.write(b"%016x %s\n" % (offset, digest.encode()))
        source.seek(start)

    def _entry(self, piece: int) -> tuple[int, str]:
        """Return the offset of a piece in the text, and the hash of its lines.

        Raises:
            DataError: if the index is shorter, because the text was cut off while it was read.
        """
        with (self.path / _INDEX_FILE).open("rb") as file:
            file.seek(piece * _ENTRY_BYTES)
            entry = file.read(_ENTRY_BYTES)
        if len(entry) < _ENTRY_BYTES:
            raise DataError(
                f"the source text must not change while it is translated, but has; start again ({file.name})"
            )
        return int(entry[:16], 16), entry[17:81].decode()


def source_digest(stream: BufferedReader) -> str:
    """Return the hash of a text from where a stream stands, and return there."""
    start, digest = stream.tell(), hashlib.sha256()
    while block := stream.read(_BLOCK_BYTES):
        digest.update(block)
    stream.seek(start)
    return digest.hexdigest()


def _entries(source: BufferedReader, name: str, piece_lines: int) -> Iterator[tuple[int, str]]:
    """Yield the offset of each piece, and the hash of its lines."""
    skip_byte_order_mark(source)
    offset, before = source.tell(), 0
    lines = raw_lines(source, name, before)
    while True:
        digest, size, count = hashlib.sha256(), 0, 0
        for line in islice(lines, piece_lines):
            digest.update(line)
            size, count = size + len(line), count + 1
        if not count:
            return
        yield offset, digest.hexdigest()
        offset += size


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _difference(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the clause of a message on what differs in one entry of a job; empty if nothing does."""
    if before.get(key) == now.get(key):
        return ""
    if key in ("the source text", "the weights", "the vocabulary"):
        return f"{key} was another one"
    return f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}"
