"""Binarised text of fairseq (``--dataset-impl mmap``, the default of fairseq-preprocess).

``SPLIT.SOURCE-TARGET.LANG.bin`` has the numbers of all lines, each with EOS at its end. The index beside it has a
header, the number of tokens of each line, and its place in the data in bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.fairseq_dictionary import EOS
from deepspeed_nmt.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_OLD_MAGIC = b"TNTIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQ")
"""Magic, version, code of the tokens' type, number of lines."""
_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16, 9: np.uint32, 10: np.uint64}
"""Types of tokens by their codes."""
_LINES = 1 << 14
"""Lines that are read at once."""


@dataclass(frozen=True)
class BinarisedText:
    """One side of a split.

    Attributes:
        path: its files without ``.bin`` and ``.idx``.
        size: number of the dictionary's symbols; a token's number must be smaller.
        lines: number of lines.
    """

    path: Path
    size: int
    lines: int
    _sizes: npt.NDArray[np.int32]
    _places: npt.NDArray[np.int64]
    _tokens: npt.NDArray[Any]

    @classmethod
    def open(cls, path: Path, size: int) -> BinarisedText:
        """Open the files of a side of a split. They are mapped to memory, not read.

        Args:
            path: the files without ``.bin`` and ``.idx``.
            size: number of the dictionary's symbols.

        Raises:
            DataError: if a file is missing, damaged, or of another format.
        """
        index, data = (path.with_name(path.name + ending) for ending in (".idx", ".bin"))
        try:
            with index.open("rb") as stream:
                head = stream.read(_HEADER.size)
            kind, lines = _read_header(head, index)
            if index.stat().st_size != _HEADER.size + 12 * lines:
                raise _damaged(index, "its length is not that of its lines")
            sizes: npt.NDArray[np.int32] = np.zeros(0, np.int32)
            places: npt.NDArray[np.int64] = np.zeros(0, np.int64)
            if lines:
                sizes = np.memmap(index, np.int32, "r", _HEADER.size, (lines,))
                places = np.memmap(index, np.int64, "r", _HEADER.size + 4 * lines, (lines,))
            count, rest = divmod(data.stat().st_size, np.dtype(kind).itemsize)
            tokens: npt.NDArray[Any] = np.memmap(data, kind, "r", shape=(count,)) if count else np.zeros(0, kind)
        except OSError as error:
            raise DataError(
                f"{path}.idx and {path}.bin must be binarised text of fairseq, but cannot be read "
                f"({error.strerror or error}); give the directory that fairseq-preprocess has made"
            ) from error
        if rest:
            raise _damaged(data, "its length is no multiple of its tokens'")
        return cls(path, size, lines, sizes, places, tokens)

    def rows(self) -> Iterator[list[int]]:
        """Yield the tokens of each line, without EOS, in memory that does not grow with the text.

        Raises:
            DataError: if a line is not in the file, or a token not in the dictionary.
        """
        width = self._tokens.itemsize
        for start in range(0, self.lines, _LINES):
            sizes = np.asarray(self._sizes[start : start + _LINES], dtype=np.int64)
            begins, rests = np.divmod(np.asarray(self._places[start : start + _LINES]), width)
            ends = begins + sizes
            wrong = np.flatnonzero((sizes < 0) | (begins < 0) | (rests != 0) | (ends > len(self._tokens)))
            if len(wrong):
                data = self.path.with_name(f"{self.path.name}.bin")
                raise _damaged(data, f"line {start + int(wrong[0]) + 1:,} is outside of the file")
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                row: list[int] = self._tokens[begin:end].tolist()
                if row and row[-1] == EOS:
                    row.pop()
                if row and (min(row) < 0 or max(row) >= self.size):
                    raise DataError(
                        f"{self.path}.bin must have numbers below {self.size:,}, the symbols of its dictionary, but "
                        f"has {max(row)}; give the dictionary that it was binarised with"
                    )
                yield row


def _read_header(head: bytes, path: Path) -> tuple[Any, int]:
    """Return the type of the tokens and the number of lines.

    Raises:
        DataError: if the index is of another format, or damaged.
    """
    if head.startswith(_OLD_MAGIC):
        raise DataError(
            f"{path} must be of the format mmap, but is of an older one; binarise the text again with "
            "`fairseq-preprocess --dataset-impl mmap`, or give the text to `prepare --segmented`"
        )
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(
            f"{path} must be an index of binarised text of fairseq (--dataset-impl mmap), but is none; give the "
            "directory that fairseq-preprocess has made"
        )
    _, version, code, lines = _HEADER.unpack(head)
    if version != 1 or code not in _TYPES:
        raise _damaged(path, f"it has version {version} and type {code}")
    return _TYPES[code], lines


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} must be as fairseq-preprocess wrote it, but {why}; restore it, or binarise the text again"
    )
