"""The text files that a data directory is made from: plain or compressed, read once, hashed and counted meanwhile."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from typing_extensions import override

from deepspeed_nmt.console import progress
from deepspeed_nmt.data.compression import Decompressed, compression_of
from deepspeed_nmt.data.directory import InputRecord
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import MAX_LINE_BYTES, check_plain, check_utf8_name, shown_name, skip_byte_order_mark

if TYPE_CHECKING:
    from typing_extensions import Buffer

Paths = tuple[Path, ...]
STANDARD_INPUT = Path("-")

_BLOCK_BYTES = 1 << 20


def check_inputs(files: Mapping[str, Paths]) -> None:
    """Check that all input files can be there to be read; they are not opened.

    Args:
        files: paths by the option that names them. Pipes and standard input (``-``) will do.

    Raises:
        DataError: if files are missing or directories, all of them at once, a name is not UTF-8, or a pipe is given
            twice.
    """
    paths = [(option, path) for option, each in files.items() for path in each if path != STANDARD_INPUT]
    wrong = [
        f"{path} {'is a directory' if path.is_dir() else 'does not exist'}"
        for _, path in paths
        if path.is_dir() or not path.exists()
    ]
    if wrong:
        raise DataError(f"every input must be an existing text file, but {'; '.join(wrong)}; check the paths")
    for option, path in paths:
        check_utf8_name(path, option)
    pipes = [path.resolve() for _, path in paths if path.is_fifo()]
    if again := [path for place, path in enumerate(pipes) if path in pipes[:place]]:
        raise DataError(
            f"a pipe can be read only once, but {again[0]} is given twice; write its text to a file first"
        )


def inspect_inputs(files: Mapping[str, Paths]) -> dict[str, tuple[InputRecord, ...]]:
    """Read input files only to hash and count them.

    Args:
        files: paths by ``<split>.<side>``.

    Returns:
        Records of the files by the same names.

    Raises:
        DataError: if a file cannot be read.
    """
    work = [(name, path) for name, paths in files.items() for path in paths]
    records: dict[str, list[InputRecord]] = {name: [] for name in files}
    for name, path in progress(work, "checking", "files", total=len(work)):
        with open_input(path) as text:
            text.skip_rest()
            records[name].append(text.record())
    return {name: tuple(found) for name, found in records.items()}


def copy_text(paths: Sequence[Path], destination: Path) -> tuple[InputRecord, ...]:
    """Concatenate the text of input files byte for byte, but without byte order marks, and with a line end between.

    Returns:
        Records of the files.

    Raises:
        DataError: if a file cannot be read.
    """
    records = []
    with destination.open("wb") as file:
        last = b""
        for path in paths:
            if last not in (b"", b"\n"):
                file.write(last := b"\n")
            with open_input(path) as text:
                while block := text.stream.read(_BLOCK_BYTES):
                    file.write(block)
                    last = block[-1:]
                records.append(text.record())
        file.flush()
        os.fsync(file.fileno())
    return tuple(records)


def unaligned(counts: Sequence[tuple[str, int]]) -> str | None:
    """Describe aligned files with different numbers of lines.

    Args:
        counts: name and number of lines of each file.

    Returns:
        The description; None if the numbers are equal.
    """
    if len({lines for _, lines in counts}) < 2:
        return None
    words = [f"{name} has {lines} lines" if not place else f"{name} has {lines}" for place, (name, lines) in
             enumerate(counts)]  # fmt: skip
    return f"{', '.join(words[:-1])} and {words[-1]}"


def unaligned_error(descriptions: Sequence[str], what: str = "source and target") -> DataError:
    """Return the error of files that are not aligned.

    Args:
        descriptions: of the files, by :func:`unaligned`.
        what: content of the files.
    """
    return DataError(
        f"{what} must have the same number of lines, but {'; '.join(descriptions)}; find where one lost "
        "or gained lines (only \\n ends a line here)"
    )


class InputText:
    """The text of an opened input file.

    Attributes:
        name: name of the file for messages.
        stream: the text, without a byte order mark.
    """

    def __init__(self, path: Path, file: _HashedFile, quiet: bool = False) -> None:
        self.name = shown_name(path)
        self._path, self._file = path, file
        stream: io.BufferedReader[Any] = io.BufferedReader(file, _BLOCK_BYTES)
        self._decompressed: Decompressed | None = None
        if kind := compression_of(stream.peek(8)):
            self._decompressed = Decompressed(stream, kind, self.name)
            stream = io.BufferedReader(self._decompressed, _BLOCK_BYTES)
        check_plain(stream, path)
        skip_byte_order_mark(stream, None if quiet else path)
        self._counted = _CountedText(stream, self.name)
        self.stream: io.BufferedReader[Any] = io.BufferedReader(self._counted, _BLOCK_BYTES)

    def skip_rest(self) -> None:
        """Read the text to its end."""
        while self.stream.read(_BLOCK_BYTES):
            pass

    @property
    def lines(self) -> int:
        """Lines of the text; a last one without an end counts. All text must have been read."""
        return self._counted.lines

    @property
    def expected_bytes(self) -> float | None:
        """Estimate of the bytes of text, from what was read so far; None of a pipe."""
        size = self._file.size_on_disk
        if size is None or self._decompressed is None:
            return size
        return size * self._counted.size / max(1, self._decompressed.taken)

    def record(self) -> InputRecord:
        """Return the record of the file, whose text must have been read to its end.

        Raises:
            DataError: if the file has changed since it was opened.
        """
        self._file.check_unchanged()
        return InputRecord(path=str(self._path), bytes=self._file.size, lines=self.lines, sha256=self._file.sha256)


@contextmanager
def open_input(path: Path, quiet: bool = False) -> Iterator[InputText]:
    """Open the text of an input file, of a pipe, or of standard input (``-``); compressed text is decompressed.

    Args:
        path: of the file.
        quiet: True to log nothing about it.

    Raises:
        DataError: if it cannot be read, is of a compression that is not known, is UTF-16, or has a line of more than
            :data:`~deepspeed_nmt.files.MAX_LINE_BYTES`.
    """
    with _HashedFile(path) as file:
        yield InputText(path, file, quiet)


class _HashedFile(io.RawIOBase):
    """A file that is hashed while it is read.

    Args:
        path: of the file; ``-`` is standard input.

    Attributes:
        size: number of bytes read so far.

    Raises:
        DataError: if it cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self.size = 0
        self._file: Any = sys.stdin.buffer
        if path == STANDARD_INPUT:
            self._before = None
            return
        try:
            self._file = path.open("rb", buffering=0)
            self._before = _state(self._file)
        except OSError as error:
            raise self._unreadable(error) from error

    @property
    def size_on_disk(self) -> int | None:
        """Size of a regular file in bytes; None of a pipe or a device."""
        return None if self._before is None else self._before[0]

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far, in hexadecimal."""
        return self._digest.hexdigest()

    def check_unchanged(self) -> None:
        """Check that the file is as it was when it was opened.

        Raises:
            DataError: if it is not.
        """
        if self._before is not None and _state(self._file) != self._before:
            raise DataError(
                f"{self._path} must not change while `prepare` reads it, but it has; wait until it is complete, and "
                "run `prepare` again"
            )

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        try:
            count = int(self._file.readinto(view) or 0)
        except OSError as error:
            raise self._unreadable(error) from error
        self._digest.update(view[:count])
        self.size += count
        return count

    @override
    def close(self) -> None:
        if not self.closed and self._file is not sys.stdin.buffer:
            self._file.close()
        super().close()

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{shown_name(self._path)} must be readable, but is not ({error.strerror or error})")


def _state(file: BinaryIO) -> tuple[int, int] | None:
    """Return size and time of the last change of a regular file; None for a pipe or a device."""
    state = os.fstat(file.fileno())
    return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else None


class _CountedText(io.RawIOBase):
    """Text whose lines are counted while it is read.

    Args:
        stream: the text, at its first line.
        name: of the text, for messages.

    Attributes:
        size: number of bytes read so far.
    """

    def __init__(self, stream: io.BufferedReader[Any], name: str) -> None:
        self._stream, self._name = stream, name
        self._ends = self._open_bytes = 0  # line ends, and bytes after the last of them
        self.size = 0

    @property
    def lines(self) -> int:
        """Lines read so far."""
        return self._ends + (self._open_bytes > 0)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        block = self._stream.read1(len(view))
        if ends := block.count(b"\n"):
            self._ends += ends
            self._open_bytes = len(block) - block.rindex(b"\n") - 1
        else:
            self._open_bytes += len(block)
        if self._open_bytes > MAX_LINE_BYTES:  # before it fills the memory
            raise DataError(
                f"{self._name} must have one sentence a line, but line {self._ends + 1:,} has more than "
                f"{MAX_LINE_BYTES >> 20} MiB; check the path"
            )
        view[: len(block)] = block
        self.size += len(block)
        return len(block)
