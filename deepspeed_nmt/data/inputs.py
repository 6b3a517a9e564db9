"""The text that a data directory is made from: files, pipes and URLs, read once, hashed and counted meanwhile."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import re
import stat
import sys
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import PlainValidator
from typing_extensions import override

from deepspeed_nmt.console import progress
from deepspeed_nmt.data.tokenizer import Count
from deepspeed_nmt.data.word_alignments import check_links
from deepspeed_nmt.errors import ConfigError, DataError, counted, did_you_mean, import_optional, shown
from deepspeed_nmt.files import (
    MAX_LINE_BYTES,
    ZSTD,
    check_plain,
    check_utf8_name,
    is_replaceable,
    shown_name,
    skip_byte_order_mark,
)
from deepspeed_nmt.registry import Config

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", **dict.fromkeys(ZSTD, "zstd")}
"""First bytes of compressed files."""
_COMPRESSED_BYTES = 1 << 16  # that are decompressed at once
_ZSTD_WINDOW_BYTES = 1 << 31  # largest window of Zstandard, that of its option --long=31


class InputRecord(Config):
    """An input file of `prepare`; ``path`` is its URL if it was read by that."""

    path: str
    bytes: Count
    lines: Count
    sha256: str


def _library(kind: str, name: str) -> tuple[Callable[[], Any], type[Exception]]:
    """Return the function that makes a decompressor of a format, and the error of damaged data."""
    if kind == "gzip":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    zstandard = import_optional("zstandard", name, "pip install zstandard")
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj, zstandard.ZstdError


def _parse_input(value: Any) -> Path | str:
    """Return the path or the URL that text names, or raise a ValueError if a URL may hold a secret."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str):
        raise ValueError(f"is {shown(value)}; give a path or a URL")
    scheme, separator, rest = value.partition("://")
    if not separator:
        return Path(value)
    if scheme == "file":
        return Path(rest)
    host = rest.partition("/")[0]
    secret = ("@" in rest and ":" in host) or ("@" in host and scheme.startswith("http"))
    if secret or "?" in rest or "://" in rest:
        raise ValueError(
            "is a URL with a password, a query string or a second URL in it, which records would show; give "
            "credentials by the environment, or read the text through a pipe, such as <(curl -s URL)"
        )
    return value


Input = Annotated[Path | str, PlainValidator(_parse_input)]
"""A path, or the URL of text that is read once, by fsspec; ``file://`` is the path behind it."""
Inputs = tuple[Input, ...]
STANDARD_INPUT = Path("-")
_BLOCK_BYTES = 1 << 20
State = tuple[Any, ...]
"""Size of a file (bytes; None if unknown), and what else shows that it has changed."""


def _reporting(method: Callable[..., T]) -> Callable[..., T]:
    """Turn the errors of fsspec and its packages, which have no common class, into messages of one line."""

    @wraps(method)
    def call(file: _RemoteFile, *arguments: Any) -> T:
        try:
            return method(file, *arguments)
        except (ConfigError, DataError):
            raise
        except ImportError as error:
            problem: ConfigError | DataError = ConfigError(
                f"{file.url} needs a package that is not installed ({error}); run `pip install 'fsspec[s3,http]'` "
                "for S3 and HTTP"
            )
        except Exception as error:
            cause = error.__cause__ or error  # fsspec reports all faults of HTTP as missing files
            text = re.sub(r"\?[^\s'\"]*", "", " ".join(str(cause).split()))  # a redirect may lead to a signed URL
            problem = DataError(
                f"{file.url} cannot be read ({type(cause).__name__}: {text}); check the address, the network and the "
                "credentials in the environment"
            )
        raise problem  # without its cause: logs of tasks print variables of frames, and some are credentials

    return call


class _RemoteFile:
    """The file behind a URL, read from its beginning.

    Its methods raise a ConfigError if the scheme is unknown or a package is missing, and a DataError if the file
    cannot be read.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._file: Any = None

    @_reporting
    def state(self) -> State:
        """Return the size, and the hash and the time of the last change where the server tells them."""
        system, path, _ = self._located()
        info = system.info(path)
        return tuple(info.get(name) for name in ("size", "ETag", "LastModified", "mtime"))

    @_reporting
    def read(self, count: int) -> bytes:
        """Read at most ``count`` bytes."""
        if self._file is None:
            system, path, options = self._located()
            self._file = system.open(path, "rb", **options)
        return bytes(self._file.read(count))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _located(self) -> tuple[Any, str, dict[str, Any]]:
        """Return the file system, the path in it, and options to open it."""
        import fsspec

        scheme = self.url.partition("://")[0]
        if scheme not in (known := fsspec.available_protocols()):
            raise ConfigError(f"{self.url} has a scheme that fsspec does not know{did_you_mean(scheme, known)}")
        system, path = fsspec.url_to_fs(self.url)
        if not scheme.startswith("http"):
            return system, path, {}
        from aiohttp import ClientTimeout

        # One request: not every server can send parts, nor all of the text in the 5 minutes of the default.
        system.client_kwargs.setdefault("timeout", ClientTimeout(sock_connect=30, sock_read=300))
        return system, path, {"block_size": 0}


def check_inputs(files: Mapping[str, Inputs]) -> None:
    """Check that all input files, by the option that names them, can be there to be read; they are not opened."""
    inputs = [(option, path) for option, paths in files.items() for path in paths if path != STANDARD_INPUT]
    paths = [(option, path) for option, path in inputs if isinstance(path, Path)]
    wrong = [
        f"{path} {'is a directory' if path.is_dir() else 'does not exist'}"
        for _, path in paths
        if path.is_dir() or not path.exists()
    ]
    if wrong:
        raise DataError(f"{'; '.join(wrong)}; check the paths of the text")
    for option, path in inputs:
        check_utf8_name(path, option)
        if isinstance(path, str):
            size_of(path)
    pipes = Counter(path.resolve() for _, path in paths if path.is_fifo())
    if again := [path for path, count in pipes.items() if count > 1]:
        raise DataError(
            f"a pipe can be read only once, but {again[0]} is given twice; write its text to a file first"
        )


def size_of(path: Path | str) -> int:
    """Return the bytes of a file, or of what a URL leads to; 0 for a pipe, and if a server does not tell."""
    if isinstance(path, str):
        return _RemoteFile(path).state()[0] or 0
    return path.stat().st_size if path.is_file() else 0


def inspect_inputs(files: Mapping[str, Inputs]) -> dict[str, tuple[InputRecord, ...]]:
    """Read input files only to hash and count them."""
    work = [(name, path) for name, paths in files.items() for path in paths]
    records: dict[str, list[InputRecord]] = {name: [] for name in files}
    for name, path in progress(work, "checking", "files", total=len(work)):
        with InputText(path) as text:
            text.skip_rest()
            records[name].append(text.record())
    return {name: tuple(files) for name, files in records.items()}


def copy_text(paths: Sequence[Path | str], destination: Path) -> tuple[InputRecord, ...]:
    """Concatenate the text of input files, but without byte order marks, and with a line end between."""
    records = []
    with destination.open("wb") as file:
        last = b""
        for path in paths:
            if last not in (b"", b"\n"):
                file.write(last := b"\n")
            with InputText(path) as text:
                while block := text.stream.read(_BLOCK_BYTES):
                    file.write(block)
                    last = block[-1:]
                records.append(text.record())
        file.flush()
        os.fsync(file.fileno())
    return tuple(records)


def check_aligned(groups: Iterable[Sequence[tuple[str, int]]], what: str = "source and target") -> None:
    """Raise a DataError unless the files of each group, by name and number of lines, have equally many lines."""
    problems = []
    for group in groups:
        if len({lines for _, lines in group}) > 1:
            first, *others, last = (f"{name} has {lines}" for name, lines in group)
            problems.append(f"{', '.join([f'{first} lines', *others])} and {last}")
    if problems:
        raise DataError(
            f"{what} have different numbers of lines: {'; '.join(problems)}; find where one lost or gained lines "
            "(only \\n ends a line here)"
        )


class InputText(io.RawIOBase):
    """The text of a file, a pipe or a URL, which is hashed, decompressed and counted while it is read.

    ``stream`` is the text, without a byte order mark, of ``start`` bytes; the path ``-`` is standard input. ``state``
    has the size and the time of the last change of a regular file. Text that cannot be read, or is of an unknown
    compression or encoding, is a DataError.
    """

    def __init__(self, path: Path | str) -> None:
        self.name = shown_name(path)
        self._path = path
        self._digest = hashlib.sha256()
        self._file_bytes = self._ends = self._open_bytes = 0  # read so far; line ends, and bytes after the last one
        self._file: Any = sys.stdin.buffer
        self.state: State | None = None
        try:
            if path != STANDARD_INPUT:
                self._file = _RemoteFile(path) if isinstance(path, str) else path.open("rb", buffering=0)
                self.state = state_of(self._file)
        except OSError as error:
            raise self._unreadable(error) from error
        self._waiting = b""  # bytes of the file that are not decompressed yet
        while len(self._waiting) < max(map(len, MAGIC)) and (more := self._read(_COMPRESSED_BYTES)):
            self._waiting += more
        self._kind = next((kind for magic, kind in MAGIC.items() if self._waiting.startswith(magic)), None)
        if self._kind is not None:
            self._new, self._failure = _library(self._kind, self.name)
        self._decompressor: Any = None  # of the member that is being read
        self._text = memoryview(b"")
        self.stream: io.BufferedReader[Any] = io.BufferedReader(self, _BLOCK_BYTES)
        check_plain(self.stream, path)
        self.start = len(BOM_UTF8) if skip_byte_order_mark(self.stream) else 0
        if not self._ends:
            self._open_bytes -= self.start

    def skip_rest(self) -> None:
        """Read the text to its end."""
        while self.stream.read(_BLOCK_BYTES):
            pass

    @property
    def is_direct(self) -> bool:
        """True if the bytes of the file are the text, and can be read again, by other processes, too."""
        is_named = isinstance(self._path, Path) and is_replaceable(self._path)
        return is_named and self.state is not None and self._kind is None

    @property
    def lines(self) -> int:
        """Lines of the text; a last one without an end counts. All text must have been read."""
        return self._ends + (self._open_bytes > 0)

    def record(self) -> InputRecord:
        """Return the record of the file, whose text must have been read to its end; it must not have changed."""
        if self.state is not None and (
            state_of(self._file) != self.state or self.state[0] not in (None, self._file_bytes)
        ):
            raise _changed(self._path)
        digest = self._digest.hexdigest()
        return InputRecord(path=str(self._path), bytes=self._file_bytes, lines=self.lines, sha256=digest)

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        """Read text; raise a DataError if the file is damaged or ends early, or a line is too long."""
        view = memoryview(buffer)
        while not self._text:
            data, self._waiting = self._waiting or self._read(_COMPRESSED_BYTES if self._kind else len(view)), b""
            if not data:
                if self._decompressor is not None:
                    raise DataError(f"the {self._kind} data of {self.name} ends early; copy it again")
                return 0
            self._text = memoryview(self._decompress(data) if self._kind else data)
        block, self._text = bytes(self._text[: len(view)]), self._text[len(view) :]
        if ends := block.count(b"\n"):
            self._ends += ends
            self._open_bytes = len(block) - block.rindex(b"\n") - 1
        else:
            self._open_bytes += len(block)
        if self._open_bytes > MAX_LINE_BYTES:  # before it fills the memory
            raise DataError(
                f"line {self._ends + 1:,} of {self.name} has more than {MAX_LINE_BYTES >> 20} MiB; check the "
                "path: text has one sentence a line"
            )
        view[: len(block)] = block
        return len(block)

    @override
    def close(self) -> None:
        if not self.closed and self._file is not sys.stdin.buffer:
            self._file.close()
        super().close()

    def _read(self, count: int) -> bytes:
        try:
            data: bytes = self._file.read1(count) if self._path == STANDARD_INPUT else self._file.read(count)
        except OSError as error:
            raise self._unreadable(error) from error
        self._digest.update(data)
        self._file_bytes += len(data)
        return data

    def _decompress(self, data: bytes) -> bytes:
        if self._decompressor is None:
            if not (data := data.lstrip(b"\0")):  # padding between members and after the last
                return b""
            self._decompressor = self._new()
        try:
            text: bytes = self._decompressor.decompress(data)
        except self._failure as error:
            raise DataError(f"the {self._kind} data of {self.name} is damaged ({error}); copy it again") from error
        if self._decompressor.eof:
            self._waiting = self._decompressor.unused_data.lstrip(b"\0")
            self._decompressor = None
        return text

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.name} cannot be read ({error.strerror or error})")


def _changed(path: Path | str) -> DataError:
    return DataError(f"{path} changed while `prepare` read it; wait until it is complete, and run `prepare` again")


def state_of(file: BinaryIO | Path | _RemoteFile) -> State | None:
    """Return size and time of the last change of a file; None for a pipe or a device."""
    if isinstance(file, _RemoteFile):
        return file.state()
    state = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else None


PIECE_BYTES = 1 << 19
"""Bytes of the first file of a piece: about half a second of encoding."""
_NUMBER = re.compile(rb"\s*(-inf|[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)\s*", re.ASCII)

_PER_PAIR = ("train.weights", "train.scores", "train.alignments")
"""Files with something of each pair of the training text, besides that."""
FileSet = Mapping[str, Path | str]
"""Aligned files by ``<split>.<column>``."""


class Piece(NamedTuple):
    """Successive lines of aligned files, by ``<split>.<column>``.

    ``columns`` is their text, ``files`` has names for messages. ``first`` is the number of the first line, from 1.
    """

    columns: dict[str, bytes]
    files: dict[str, str]
    first: int


class IndexedText(Config):
    """A file of the training text whose pieces are known.

    Its text begins at the byte ``start``. ``state`` has the size and the time of the last change (ns) of the file;
    None if the text is in a copy, because it can be read only once, is compressed, or has a URL.
    """

    record: InputRecord
    start: Count
    state: tuple[int, int] | None

    def is_changed(self) -> bool:
        """True if the file is not as it was."""
        try:
            return self.state is not None and state_of(Path(self.record.path)) != self.state
        except OSError:
            return True


_PIECES = "pieces.npy"


def index_text(files: FileSet, directory: Path) -> dict[str, IndexedText]:
    """Read aligned files once, to hash them and to find their pieces, which :func:`read_pieces` reads.

    ``directory`` receives the numbers of lines and bytes of each piece, and copies of text by name.
    """
    with ExitStack() as stack:
        texts = {name: stack.enter_context(InputText(path)) for name, path in files.items()}
        copied = {name: text for name, text in texts.items() if not text.is_direct}
        copies = {name: stack.enter_context((directory / name).open("wb")) for name in copied}
        rows: list[list[int]] = []
        first, *others = (text.stream for text in texts.values())
        while leading := first.readlines(PIECE_BYTES):
            columns = [leading, *(list(islice(stream, len(leading))) for stream in others)]
            if any(len(column) != len(leading) for column in columns):
                break
            rows.append([len(leading), *(sum(map(len, column)) for column in columns)])
            for name, column in zip(texts, columns, strict=True):
                if name in copies:
                    copies[name].writelines(column)
        for text in texts.values():
            text.skip_rest()
        others_named = [name.removeprefix("train.") for name in files if name in _PER_PAIR]
        what = " and ".join(["text", *others_named]) if others_named else "source and target"
        check_aligned([[(text.name, text.lines) for text in texts.values()]], what)
        np.save(directory / _PIECES, np.array(rows, np.int64).reshape(-1, 1 + len(texts)))
        return {
            name: IndexedText(record=text.record(), start=text.start, state=None if name in copied else text.state)
            for name, text in texts.items()
        }


def count_pieces(directory: Path) -> int:
    """Return the number of pieces that :func:`index_text` has found."""
    return len(np.load(directory / _PIECES))


def read_pieces(texts: Mapping[str, IndexedText], directory: Path, first: int, last: int) -> Iterator[Piece]:
    """Yield the pieces ``first`` to ``last`` - 1 of aligned files; raise a DataError if a file has changed."""
    rows = np.load(directory / _PIECES)
    line, *skipped = rows[:first].sum(axis=0).tolist()
    names = {name: shown_name(text.record.path) for name, text in texts.items()}
    with ExitStack() as stack:
        files = []
        for (name, text), bytes_before in zip(texts.items(), skipped, strict=True):
            path = directory / name if text.state is None else Path(text.record.path)
            try:
                files.append(stack.enter_context(path.open("rb")))
            except OSError as error:
                raise DataError(f"{path} cannot be read ({error.strerror or error})") from error
            files[-1].seek(bytes_before + (0 if text.state is None else text.start))
        for lines, *sizes in rows[first:last].tolist():
            columns = [file.read(size) for file, size in zip(files, sizes, strict=True)]
            for text, file in zip(texts.values(), files, strict=True):
                if text.state is not None and state_of(file) != text.state:
                    raise _changed(text.record.path)
            yield Piece(dict(zip(texts, columns, strict=True)), names, line + 1)
            line += lines


def read_pairs(
    piece: Piece, tsv_columns: tuple[int, ...] | None = None
) -> tuple[list[tuple[bytes, bytes]], npt.NDArray[np.float32] | None, list[float] | None, list[bytes] | None]:
    """Return pairs without line ends, and their weights, scores and links, if any. Shape of each: -> (N,).

    The columns of ``train.tsv`` are separated by tabs. ``tsv_columns`` are the numbers of those with source, target,
    and optionally weights, from 1; others are ignored. None: source and target, and no further column.
    """
    lines, files = {name: lines_of(text) for name, text in piece.columns.items()}, piece.files
    if "train.tsv" in lines:
        columns = _split(lines["train.tsv"], files["train.tsv"], piece.first, tsv_columns)
        lines |= zip(("train.source", "train.target", "train.weights"), columns, strict=False)
        files = {"train.weights": files["train.tsv"], **files}
    scores, weights = (
        _numbers(what, lines[name], files[name], piece.first) if (name := f"train.{what}s") in lines else None
        for what in ("score", "weight")
    )
    pairs, links = list(zip(lines["train.source"], lines["train.target"], strict=True)), lines.get("train.alignments")
    if links is not None:
        check_links(links, pairs, files["train.alignments"], piece.first)
    fp32 = None if weights is None else weights.astype("<f4")
    return pairs, fp32, None if scores is None else scores.tolist(), links


def _split(lines: Sequence[bytes], name: str, first: int, tsv_columns: tuple[int, ...] | None) -> list[list[bytes]]:
    """Return the columns of a TSV file. Shape: (N,) -> (2 or 3, N)."""
    rows = [line.split(b"\t") for line in lines]
    needed = 2 if tsv_columns is None else max(tsv_columns)
    for number, row in enumerate(rows, first):
        if len(row) < needed or (tsv_columns is None and len(row) > 2):
            required = "source and target" if tsv_columns is None else f"{needed} or more columns"
            raise DataError(
                f"line {number:,} of {name} has {counted(len(row), 'columns')} instead of {required}, separated by "
                "tabs; correct it, or choose columns by --tsv-columns, for example 1,2"
            )
    return [[row[column - 1] for row in rows] for column in tsv_columns or (1, 2)]


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines of a piece without their ends."""
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    return [line.rstrip(b"\r") for line in lines]


def _numbers(what: str, lines: Sequence[bytes], name: str, first: int) -> npt.NDArray[np.float64]:
    """Return the weights or scores on lines of text. Shape: (N,) -> (N,)."""
    numbers = np.array([float(line) if _NUMBER.fullmatch(line) else np.nan for line in lines], np.float64)
    if what == "weight":  # which fp32 must hold
        wrong, kind = ~((numbers > 1e-37) & (numbers < 1e38)), "number between 1e-37 and 1e38"
        advice = "correct it, and remove pairs that should not count"
    else:
        wrong, kind = np.isnan(numbers), "number"
        advice = "of the output of `score-pairs`, take the fourth column (cut -f 4)"
    if wrong.any():
        place = int(wrong.argmax())
        text = shown(lines[place].decode("utf-8", errors="replace"))
        raise DataError(f"line {first + place:,} of {name} has the {what} {text}, which is no {kind}; {advice}")
    return numbers
