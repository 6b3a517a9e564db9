"""The text files that a data directory is made from: inspected first, then read as long as they do not change."""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from deepspeed_nmt.console import progress
from deepspeed_nmt.data.clean import plain_lines
from deepspeed_nmt.data.directory import InputRecord
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import check_plain, check_utf8_name, skip_byte_order_mark

if TYPE_CHECKING:
    from typing_extensions import Buffer

Paths = tuple[Path, ...]

_BLOCK_BYTES = 1 << 20


def inspect_inputs(files: Mapping[str, tuple[Paths, Paths]]) -> dict[str, tuple[InputRecord, ...]]:
    """Hash and count all input files.

    Args:
        files: source and target files of each split.

    Returns:
        Records of the files by ``<split>.<side>``.

    Raises:
        DataError: if files are missing or not aligned, all of them at once.
    """
    sides = {
        f"{split}.{side}": paths
        for split, both in files.items()
        for side, paths in zip(("source", "target"), both, strict=True)
    }
    wrong = [path for paths in sides.values() for path in paths if not path.is_file()]
    if wrong:
        raise DataError(
            "every input must be an existing text file, because it is read more than once, but "
            + "; ".join(f"{path} {_kind(path)}" for path in wrong)
            + "; check the paths"
        )
    work = [(name, path) for name, paths in sides.items() for path in paths]
    records: dict[str, list[InputRecord]] = {name: [] for name in sides}
    for name, path in progress(work, "checking", "files", total=len(work)):
        check_utf8_name(path, f"--{name.replace('.', '-')}")
        records[name].append(_inspect(path))
    unaligned = [
        f"{source.path} has {source.lines} lines and {target.path} has {target.lines}"
        for split in files
        for source, target in zip(records[f"{split}.source"], records[f"{split}.target"], strict=True)
        if source.lines != target.lines
    ]
    if unaligned:
        raise DataError(
            f"source and target must have the same number of lines, but {'; '.join(unaligned)}; find where one lost "
            "or gained lines (only \\n ends a line here)"
        )
    return {name: tuple(found) for name, found in records.items()}


def _kind(path: Path) -> str:
    """Describe a path that is no file."""
    if not path.exists():
        return "does not exist"
    return "is a directory" if path.is_dir() else "is a pipe or a device (write its text to a file first)"


def _inspect(path: Path) -> InputRecord:
    lines, last = 0, b"\n"
    with _HashedFile(path) as file, io.BufferedReader(file, _BLOCK_BYTES) as stream:
        check_plain(stream, path)
        skip_byte_order_mark(stream, path)
        while block := stream.read(_BLOCK_BYTES):
            lines += block.count(b"\n")
            last = block[-1:]
        return InputRecord(path=str(path), bytes=file.size, lines=lines + (last != b"\n"), sha256=file.sha256)


@contextmanager
def open_unchanged(record: InputRecord) -> Iterator[io.BufferedReader[_HashedFile]]:
    """Open an input file that was inspected.

    Args:
        record: of the file.

    Yields:
        The file, to be read to its end.

    Raises:
        DataError: at the end, if its content is not the one that was inspected.
    """
    with _HashedFile(Path(record.path)) as file, io.BufferedReader(file, _BLOCK_BYTES) as stream:
        yield stream
        if file.sha256 != record.sha256:
            raise DataError(
                f"{record.path} must not change while `prepare` reads it, but it has; wait until it is complete, and "
                "run `prepare` again"
            )


def read_pairs(sources: Sequence[InputRecord], targets: Sequence[InputRecord]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the aligned lines of two sides, without line ends and byte order marks.

    Raises:
        DataError: if a file has changed since it was inspected.
    """
    sides = _read_side(sources), _read_side(targets)
    yield from zip(*sides, strict=False)
    for side in sides:  # one that has become longer than the other is read to its end, where its hash is compared
        deque(side, maxlen=0)


def _read_side(records: Sequence[InputRecord]) -> Iterator[bytes]:
    for record in records:
        with open_unchanged(record) as stream:
            yield from plain_lines(stream)


def copy_text(records: Sequence[InputRecord], destination: Path) -> None:
    """Concatenate input files byte for byte, but without byte order marks, and with a line end between any two.

    Raises:
        DataError: if a file has changed since it was inspected.
    """
    with destination.open("wb") as file:
        last = b""
        for record in records:
            if last not in (b"", b"\n"):
                file.write(last := b"\n")
            with open_unchanged(record) as part:
                skip_byte_order_mark(part)
                while block := part.read(_BLOCK_BYTES):
                    file.write(block)
                    last = block[-1:]
        file.flush()
        os.fsync(file.fileno())


class _HashedFile(io.RawIOBase):
    """A file that is hashed while it is read.

    Args:
        path: of the file.

    Attributes:
        size: number of bytes read so far.

    Raises:
        DataError: if it cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self.size = 0
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far, in hexadecimal."""
        return self._digest.hexdigest()

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        try:
            count = self._file.readinto(view) or 0
        except OSError as error:
            raise self._unreadable(error) from error
        self._digest.update(view[:count])
        self.size += count
        return count

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self._path} must be readable, but is not ({error.strerror or error})")
