"""Files: hashes, text, and atomic writes."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from deepspeed_nmt.errors import DataError

_BLOCK_BYTES = 1 << 20
_COMPRESSED = {
    b"\x1f\x8b": ("gzip", "gunzip -k"),
    b"BZh": ("bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"PK\x03\x04": ("zip", "unzip"),
}
"""Compression format and command to decompress, by the first bytes of a file."""


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def check_text(path: Path) -> None:
    """Check that a path can be a text file.

    Raises:
        DataError: if it is missing, a directory, not readable, or compressed.
    """
    if path.is_dir():
        raise DataError(f"{path} must be a text file, but is a directory")
    try:
        with path.open("rb") as file:
            start = file.read(8) if path.is_file() else b""  # a pipe can be read only once
    except FileNotFoundError as error:
        raise DataError(f"{path} must be a text file, but does not exist") from error
    except OSError as error:
        raise DataError(f"{path} must be readable, but is not ({error.strerror or error})") from error
    for magic, (kind, remedy) in _COMPRESSED.items():
        if start.startswith(magic):
            raise DataError(f"{path} must be plain text, but is compressed with {kind}; run `{remedy} {path}` first")


def text_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield the lines of UTF-8 text, without their line ends.

    Only a line feed ends a line: other line breaks of Unicode are part of the text. Bytes that are not UTF-8 become
    U+FFFD.
    """
    for line in stream:
        yield line.rstrip(b"\n").rstrip(b"\r").decode("utf-8", errors="replace")


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that created, renamed and removed names survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` atomically: after a crash it is the old one or the new one.

    Raises:
        OSError: if it cannot be written, for example on a full disk; ``path`` is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def atomic_text_writer(path: Path) -> Iterator[TextIO]:
    """Yield a file to write text to, which replaces ``path`` atomically at the end of the block.

    If the block raises, ``path`` is unchanged. A pipe or a device is written to directly.

    Raises:
        OSError: if it cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    path = path.resolve()  # a symbolic link is kept
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically by text in UTF-8; see :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"))
