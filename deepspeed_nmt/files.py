"""Hashing, reading and atomic writing of files."""

from __future__ import annotations

import hashlib
import os
import uuid
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError

_BLOCK_BYTES = 1 << 20
_NO_PLAIN_TEXT = {
    b"\x1f\x8b": ("compressed with gzip", "gunzip -k"),
    b"BZh": ("compressed with bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unxz -k"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unzstd"),
    b"PK\x03\x04": ("compressed with zip", "unzip"),
    BOM_UTF16_LE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    BOM_UTF16_BE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
}
"""First bytes of files that are not UTF-8 text, with what they are and the command that makes text of them."""


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def check_text(path: Path) -> None:
    """Check that a file can contain plain text.

    Raises:
        DataError: if the file is missing, a directory, unreadable, or compressed.
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
    check_beginning(start, str(path))


def check_beginning(start: bytes, name: str) -> None:
    """Check by its first bytes that a file can contain UTF-8 text.

    Args:
        start: its first bytes, 8 or more.
        name: its path, for messages; ``-`` is standard input.

    Raises:
        DataError: if it is compressed or UTF-16.
    """
    for magic, (kind, remedy) in _NO_PLAIN_TEXT.items():
        if start.startswith(magic):
            what, where = ("standard input", "the file") if name == "-" else (name, name)
            raise DataError(f"{what} must be plain text, but is {kind}; run `{remedy} {where}` first")


def without_byte_order_mark(start: bytes, name: str) -> bytes:
    """Return the beginning of a text file without its byte order mark, which is no text, and log if it has one.

    Args:
        start: first line or more of the file.
        name: its name, for the log.
    """
    if start.startswith(BOM_UTF8):
        logger.info("%s: the byte order mark at its beginning is not read as text", name)
    return start.removeprefix(BOM_UTF8)


def text_lines(stream: BinaryIO) -> Iterator[str]:
    """Yield lines of UTF-8 text, without their ends, and without a byte order mark at the beginning.

    Only line feeds end a line; other line breaks of Unicode are part of the text. Bytes that are not UTF-8 become
    U+FFFD, so no line is lost.
    """
    for number, line in enumerate(stream):
        if number == 0:
            line = without_byte_order_mark(line, str(getattr(stream, "name", "the input")))
        yield line.rstrip(b"\n").rstrip(b"\r").decode("utf-8", errors="replace")


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that files created, renamed or removed in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically: after a crash it has either the old or the new content.

    Args:
        path: of the file, which need not exist.
        data: new content.

    Raises:
        OSError: if the file cannot be written, for example because the disk is full; it is then unchanged.
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
    """Open a text file that replaces ``path`` atomically when the block ends without an error.

    If the block fails, ``path`` is unchanged. A pipe or a device is written to directly.

    Args:
        path: of the file, which need not exist.

    Yields:
        The file to write to, as UTF-8.

    Raises:
        OSError: if the file cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        return
    path = path.resolve()  # replaces the target of a symbolic link, not the link
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of a file by UTF-8 text atomically; see :func:`atomic_write_bytes`."""
    atomic_write_bytes(path, text.encode("utf-8"))
