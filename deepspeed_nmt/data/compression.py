"""Compressed text: gzip, xz and Zstandard, recognised by their first bytes and read as a stream."""

from __future__ import annotations

import io
import lzma
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from deepspeed_nmt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed files, with the name of the format."""
_COMPRESSED_BYTES = 1 << 16
"""Bytes that are decompressed at once."""
_ZSTD_WINDOW_BYTES = 1 << 31
"""Largest window of Zstandard, that of its option --long=31."""


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
                    raise DataError(
                        f"{self._name} must be complete, but its {self._kind} data ends early; copy it again"
                    )
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
            raise DataError(
                f"{self._name} must be text or whole {self._kind} data, but is damaged ({error}); copy it again"
            ) from error
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
            f"the package zstandard must be installed to read {name}, but is not; install it "
            "(`pip install zstandard`), or run `unzstd` on the file first"
        ) from error
    library = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return library.decompressobj, (zstandard.ZstdError,)
