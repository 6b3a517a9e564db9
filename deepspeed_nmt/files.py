"""Hashing files, and writing them so that a reader never sees half of one."""

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
"""First bytes of compressed files: what made them, and what undoes it."""


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's content, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def check_text(path: Path) -> None:
    """Refuse what cannot be a text file.

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
    """Lines of UTF-8 text as they come, without their ends. Only line feeds end a line: other characters that
    Unicode calls line breaks are part of the text. Bytes that are not UTF-8 become U+FFFD, so no line is lost.
    """
    for line in stream:
        yield line.rstrip(b"\n").rstrip(b"\r").decode("utf-8", errors="replace")


def sync_directory(path: Path) -> None:
    """Make the names created, renamed or removed in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step: after a crash it holds the old content or the new, never a part.

    Raises:
        OSError: if it cannot be written (a full disk, say); ``path`` is then what it was before.
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
    """A file to write text to, which takes the place of ``path`` in one step when the block ends well; otherwise
    ``path`` stays what it was. What is not an ordinary file (a pipe, a device) is written to directly.

    Raises:
        OSError: if it cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    path = path.resolve()  # A link stays one.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """:func:`atomic_write_bytes` for text, as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))
