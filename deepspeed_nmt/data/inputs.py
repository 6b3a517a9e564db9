"""The text files that a data directory is made from: plain or compressed, read once, hashed and counted meanwhile."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from deepspeed_nmt.console import progress
from deepspeed_nmt.data.tokenizer import Count
from deepspeed_nmt.errors import ConfigError, DataError, counted, shown
from deepspeed_nmt.files import MAX_LINE_BYTES, check_plain, check_utf8_name, shown_name, skip_byte_order_mark
from deepspeed_nmt.registry import Config

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files, with the name of the format."""
_COMPRESSED_BYTES = 1 << 16
"""Bytes that are decompressed at once."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""Largest window of Zstandard, that of its option --long=31."""


class InputRecord(Config):
    """An input file of `prepare`."""

    path: str
    bytes: Count
    lines: Count
    sha256: str


class _Decompressor(Protocol):
    """The interface that the decompressors of all libraries have in common."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def compression_of(start: bytes) -> str | None:
    """Return the name of a format by the first bytes of a file; None for one that is not compressed."""
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


class Decompressed(io.RawIOBase):
    """Text of a compressed stream, of one or several members end to end.

    Args:
        stream: compressed bytes, at their beginning.
        kind: name of the format in :data:`MAGIC`.
        name: of the stream, for messages.

    Attributes:
        taken: number of compressed bytes read so far.

    Raises:
        ConfigError: if the format needs a package that is not installed.
    """

    def __init__(self, stream: io.BufferedReader[Any], kind: str, name: str) -> None:
        self._stream, self._kind, self._name = stream, kind, name
        self._new, self._failures = _library(kind, name)
        self._decompressor: _Decompressor | None = None
        self._rest = b""  # compressed bytes that belong to the next member
        self._text = memoryview(b"")
        self.taken = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        """Read text; see `io.RawIOBase`.

        Raises:
            DataError: if the stream is damaged, or ends before its last member does.
        """
        while not self._text:
            data, self._rest = self._rest or self._stream.read1(_COMPRESSED_BYTES), b""
            if not data:
                if self._decompressor is not None:
                    raise DataError(f"the {self._kind} data of {self._name} ends early; copy it again")
                return 0
            self.taken += len(data)
            self._text = memoryview(self._decompress(data))
        view = memoryview(buffer)
        count = min(len(view), len(self._text))
        view[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        if self._decompressor is None:
            if not data.strip(b"\0"):  # padding between members and after the last
                return b""
            self._decompressor = self._new()
        try:
            text = self._decompressor.decompress(data)
        except self._failures as error:
            raise DataError(f"the {self._kind} data of {self._name} is damaged ({error}); copy it again") from error
        if self._decompressor.eof:
            self._rest = self._decompressor.unused_data.lstrip(b"\0")
            self.taken -= len(self._rest)
            self._decompressor = None
        return text


def _library(kind: str, name: str) -> tuple[Callable[[], _Decompressor], tuple[type[Exception], ...]]:
    """Return the function that makes a decompressor of a format, and the errors of damaged data."""
    if kind == "gzip":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), (zlib.error,)
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,)
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"the package zstandard is not installed, which reads {name}; install it (`pip install zstandard`), or "
            "run `unzstd` on the file first"
        ) from error
    library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return library.decompressobj, (zstandard.ZstdError,)


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
        raise DataError(f"{'; '.join(wrong)}; check the paths of the text")
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
        f"{what} have different numbers of lines: {'; '.join(descriptions)}; find where one lost or gained lines "
        "(only \\n ends a line here)"
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
                f"{self._path} changed while `prepare` read it; wait until it is complete, and run `prepare` again"
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
        return DataError(f"{shown_name(self._path)} cannot be read ({error.strerror or error})")


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
                f"line {self._ends + 1:,} of {self._name} has more than {MAX_LINE_BYTES >> 20} MiB; check the "
                "path: text has one sentence a line"
            )
        view[: len(block)] = block
        self.size += len(block)
        return len(block)


PIECE_BYTES = 1 << 19
"""Bytes of the first file of a piece: about half a second of encoding."""
_NUMBER = re.compile(rb"\s*\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
_SCORE = re.compile(rb"\s*-inf\s*|\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)

FileSet = Mapping[str, Path]
"""Aligned files by ``<split>.<column>``."""


class Piece(NamedTuple):
    """Successive lines of aligned files.

    Attributes:
        columns: text of the lines in each file.
        names: names of the files for messages.
        first: number of the first line in its files, from 1.
        lines: number of lines.
    """

    columns: tuple[bytes, ...]
    names: tuple[str, ...]
    first: int
    lines: int


def read_pieces(sets: Sequence[FileSet], records: dict[str, list[InputRecord]]) -> Iterator[Piece]:
    """Yield the text of aligned files, set by set.

    Args:
        sets: files that are aligned with each other; each set has the same names.
        records: receives the records of the files, once they are read, by these names.

    Raises:
        DataError: if a file cannot be read, or is not as long as the others of its set.
    """
    for files in sets:
        with ExitStack() as stack:
            texts = [stack.enter_context(open_input(path)) for path in files.values()]
            names = tuple(text.name for text in texts)
            first = 1
            while True:
                leading = texts[0].stream.readlines(PIECE_BYTES)
                columns = [leading, *(list(islice(text.stream, len(leading))) for text in texts[1:])]
                if any(len(column) != len(leading) for column in columns):
                    raise _unaligned_error(files, texts)
                if not leading:
                    break
                yield Piece(tuple(map(b"".join, columns)), names, first, len(leading))
                first += len(leading)
            if any(text.stream.peek(1) for text in texts):
                raise _unaligned_error(files, texts)
            for name, text in zip(files, texts, strict=True):
                records.setdefault(name, []).append(text.record())


def _unaligned_error(files: FileSet, texts: Sequence[InputText]) -> DataError:
    for text in texts:
        text.skip_rest()
    others = [name.removeprefix("train.") for name in files if name in ("train.weights", "train.scores")]
    what = "source and target" if not others else " and ".join(["text", *others])
    return unaligned_error([unaligned([(text.name, text.lines) for text in texts]) or ""], what)


@dataclass(frozen=True)
class TextLayout:
    """Places of the pairs in the columns of a :class:`Piece`.

    Attributes:
        tsv: True if the first file has source and target, separated by tabs.
        tsv_columns: numbers of the columns with source, target, and optionally weights, from 1; others are ignored.
            None: source and target, and no further column.
        weighted: True if a file has weights, after those of the text.
        scored: True if the last file has scores.
    """

    tsv: bool = False
    tsv_columns: tuple[int, ...] | None = None
    weighted: bool = False
    scored: bool = False

    def pairs(
        self, piece: Piece
    ) -> tuple[list[tuple[bytes, bytes]], npt.NDArray[np.float32] | None, list[float] | None]:
        """Return pairs without line ends, their weights and their scores, if there are any. Shape of each: -> (N,).

        Raises:
            DataError: if columns are missing or unexpected, a weight is not a positive finite number, or a score is
                not a number.
        """
        columns = [lines_of(column) for column in piece.columns]
        scores = _scores(columns.pop(), piece.names[-1], piece.first) if self.scored else None
        weights: Sequence[bytes] | None = columns.pop() if self.weighted else None
        name = piece.names[-2 if self.scored else -1]
        if self.tsv:
            columns = self._split(columns[0], piece)
            if len(columns) == 3:
                weights = columns.pop()
        source, target = columns
        values = None if weights is None else _weights(weights, name, piece.first)
        return list(zip(source, target, strict=True)), values, scores

    def _split(self, lines: Sequence[bytes], piece: Piece) -> list[list[bytes]]:
        """Return the columns of a TSV file. Shape: (N,) -> (2 or 3, N)."""
        rows = [line.split(b"\t") for line in lines]
        needed = 2 if self.tsv_columns is None else max(self.tsv_columns)
        for number, row in enumerate(rows, piece.first):
            if len(row) < needed or (self.tsv_columns is None and len(row) > 2):
                required = "source and target" if self.tsv_columns is None else f"{needed} or more columns"
                advice = (
                    "choose columns by --tsv-columns, for example 1,2" if len(row) > needed else "correct the line"
                )
                raise DataError(
                    f"line {number:,} of {piece.names[0]} has {counted(len(row), 'columns')} instead of "
                    f"{required}, separated by tabs; {advice}"
                )
        return [[row[column - 1] for row in rows] for column in self.tsv_columns or (1, 2)]


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines of a piece without their ends."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.rstrip(b"\r") for line in lines]


def _weights(lines: Sequence[bytes], name: str, first: int) -> npt.NDArray[np.float32]:
    """Return the weights on lines of text. Shape: (N,) -> (N,)."""
    with np.errstate(over="ignore"):
        values = np.array([float(line) if _NUMBER.fullmatch(line) else np.nan for line in lines], np.float64)
        weights = values.astype("<f4")
    wrong = np.flatnonzero(
        ~(np.isfinite(weights) & (weights > 1e-37) & (weights < 1e38))
    )  # also of numbers that fp32 cannot hold
    if len(wrong):
        text = shown(lines[wrong[0]].decode("utf-8", errors="replace"))
        raise DataError(
            f"line {first + int(wrong[0]):,} of {name} has the weight {text}, which is no number between 1e-37 and "
            "1e38; correct it, and remove pairs that should not count"
        )
    return weights


def _scores(lines: Sequence[bytes], name: str, first: int) -> list[float]:
    """Return the scores on lines of text. Shape: (N,) -> (N,)."""
    for number, line in enumerate(lines, first):
        if not _SCORE.fullmatch(line):
            raise DataError(
                f"line {number:,} of {name} has the score {shown(line.decode('utf-8', errors='replace'))}, which "
                "is no number; of the output of `score-pairs`, take the fourth column (cut -f 4)"
            )
    return list(map(float, lines))
