"""Division of texts into pieces of equally many lines, which can be read one by one."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_writer, raw_lines, skip_byte_order_mark

MAX_LINES = 4096
"""Bound of the lines of a piece, which are in memory at once."""
MAX_LINES_OF_LARGE_BATCHES = 16384
"""The same bound if a batch has so many tokens that it needs more lines."""
_TOKENS_PER_LINE = 8
"""Tokens of a batch for each line that a piece has at least. Thus it fills several batches, most of them wholly."""
_PIECES = 64
"""Number of pieces of a text of middling length."""
_ENTRY_BYTES = 16 + 1 + 64 + 1
"""Size of an entry of the index: offset and hash in hexadecimal."""
_BLOCK_BYTES = 1 << 20


class Text(NamedTuple):
    """A text that is cut into pieces.

    Attributes:
        stream: the text.
        name: of its file, for messages.
    """

    stream: BufferedReader
    name: str


def lines_of_a_piece(lines: int, max_tokens: int) -> int:
    """Return the number of lines of a piece.

    Args:
        lines: number of lines of the text.
        max_tokens: bound of a batch: sentences x longest source.
    """
    least = min(MAX_LINES_OF_LARGE_BATCHES, max_tokens // _TOKENS_PER_LINE)
    return max(1, least, min(MAX_LINES, -(-lines // _PIECES)))


def count_lines(stream: BufferedReader) -> int:
    """Count the lines from the beginning of a stream, where it stands, and return there."""
    start, first = stream.tell(), stream.read(len(BOM_UTF8))
    lines, last = first.count(b"\n"), b"\n" if first in (b"", BOM_UTF8) else first[-1:]
    while block := stream.read(_BLOCK_BYTES):
        lines += block.count(b"\n")
        last = block[-1:]
    stream.seek(start)
    return lines + (last != b"\n")


class Index:
    """A file with the place of each piece in a text, and the hash of its lines.

    Args:
        file: path of the index.
        piece_lines: number of lines of a piece.
    """

    def __init__(self, file: Path, piece_lines: int) -> None:
        self._file, self._piece_lines = file, piece_lines

    def write(self, text: Text) -> None:
        """Write the index of a text, which is left where it stands.

        Raises:
            OSError: if the file cannot be written.
        """
        start = text.stream.tell()
        with atomic_writer(self._file) as index:
            for offset, digest in _entries(text, self._piece_lines):
                index.write(b"%016x %s\n" % (offset, digest.encode()))
        text.stream.seek(start)

    def entry(self, piece: int) -> tuple[int, str]:
        """Return the offset of a piece in the text, and the hash of its lines.

        Raises:
            DataError: if the index is shorter, because the text was cut off while it was read.
        """
        with self._file.open("rb") as file:
            file.seek(piece * _ENTRY_BYTES)
            entry = file.read(_ENTRY_BYTES)
        if len(entry) < _ENTRY_BYTES:
            raise DataError(f"the text must not change while it is translated, but has; start again ({self._file})")
        return int(entry[:16], 16), entry[17:81].decode()

    def lines(self, text: Text, piece: int) -> list[bytes]:
        """Read the lines of a piece, with their ends.

        Raises:
            DataError: if the text has changed since the index was written.
        """
        offset, digest = self.entry(piece)
        text.stream.seek(offset)
        before = piece * self._piece_lines
        lines = list(islice(raw_lines(text.stream, text.name, before), self._piece_lines))
        if digest_of(*lines) != digest:
            raise DataError(
                f"{text.name} must not change while it is translated, but has; restore it and start again, or remove "
                f"{self._file.parent} to translate the new text"
            )
        return lines


def source_digest(stream: BufferedReader) -> str:
    """Return the hash of a text from where a stream stands, and return there."""
    start, digest = stream.tell(), hashlib.sha256()
    while block := stream.read(_BLOCK_BYTES):
        digest.update(block)
    stream.seek(start)
    return digest.hexdigest()


def _entries(text: Text, piece_lines: int) -> Iterator[tuple[int, str]]:
    """Yield the offset of each piece, and the hash of its lines."""
    skip_byte_order_mark(text.stream)
    offset = text.stream.tell()
    lines = raw_lines(text.stream, text.name, 0)
    while True:
        digest, size, count = hashlib.sha256(), 0, 0
        for line in islice(lines, piece_lines):
            digest.update(line)
            size, count = size + len(line), count + 1
        if not count:
            return
        yield offset, digest.hexdigest()
        offset += size


def digest_of(*parts: bytes) -> str:
    """Return the hash of bytes in hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
