"""Hashing files, and writing them so that a reader never sees half of one."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_BLOCK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file's content, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


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


def atomic_write_text(path: Path, text: str) -> None:
    """:func:`atomic_write_bytes` for text, as UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8"))
