"""Aligned text in pieces: whole lines of all its files, small enough to be handed to another process.

A piece is at least a line, and about :data:`PIECE_BYTES` of the first file. What is made of the text does not depend
on where pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.data.directory import InputRecord
from deepspeed_nmt.data.inputs import InputText, open_input, unaligned, unaligned_error
from deepspeed_nmt.errors import DataError, shown

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
        columns = [_lines(column) for column in piece.columns]
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
                    f"{piece.names[0]} must have {required} on each line, separated by tabs, but line {number:,} has "
                    f"{len(row)} column{'s' * (len(row) > 1)}; {advice}"
                )
        return [[row[column - 1] for row in rows] for column in self.tsv_columns or (1, 2)]


def _lines(text: bytes) -> list[bytes]:
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
            f"{name} must have one number between 1e-37 and 1e38 as the weight of each pair, but line "
            f"{first + int(wrong[0]):,} has {text}; correct it, and remove pairs that should not count"
        )
    return weights


def _scores(lines: Sequence[bytes], name: str, first: int) -> list[float]:
    """Return the scores on lines of text. Shape: (N,) -> (N,)."""
    for number, line in enumerate(lines, first):
        if not _SCORE.fullmatch(line):
            raise DataError(
                f"{name} must have one number as the score of each pair, but line {number:,} has "
                f"{shown(line.decode('utf-8', errors='replace'))}; of the output of `score-pairs`, take the fourth "
                "column (cut -f 4)"
            )
    return list(map(float, lines))
