"""Dictionaries of fairseq: ``dict.LANG.txt``, a symbol and its count on each line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepspeed_nmt.data.tokenizer import SPACE
from deepspeed_nmt.errors import DataError, shown

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""Symbols that precede those of the file, in this order."""
BOS, PAD, EOS, UNK = range(4)
"""Their numbers. A decoder of fairseq reads EOS first; BOS is not used."""
_OVERWRITE = "#fairseq:overwrite"


def read_dictionary(path: Path) -> list[str]:
    """Read a dictionary.

    Returns:
        Its symbols by number, the special ones included. All differ.

    Raises:
        DataError: if it is missing, or is no dictionary.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} must be a dictionary of fairseq, but cannot be read ({error.strerror or error}); give the "
            "directory that fairseq-preprocess has made"
        ) from error
    return symbols_of(content, path)


def symbols_of(content: bytes, path: Path) -> list[str]:
    """Return the symbols of a dictionary by number.

    Args:
        content: of the file.
        path: of the file, for messages.

    Raises:
        DataError: if the file is no dictionary.
    """
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be a dictionary of fairseq in UTF-8, but is not; restore the file") from error
    symbols = list(SPECIAL)
    numbers = set(symbols)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:
            break
        symbol, _, count = line.rstrip().rpartition(" ")
        where = f"line {number} of {path}"
        if count == _OVERWRITE:
            raise DataError(
                f"{where} must have a new symbol, but repeats one ({_OVERWRITE}), which is not "
                "supported; use a model whose dictionary has each symbol once"
            )
        if not symbol or not count.lstrip("-").isdecimal():
            raise DataError(
                f"{where} must be a symbol and its count, but is {shown(line)}; give fairseq's dict.LANG.txt"
            )
        if symbol in numbers:
            raise DataError(f"{where} must have a new symbol, but repeats {shown(symbol)}; restore the file")
        numbers.add(symbol)
        symbols.append(symbol)
    return symbols


def content_of(symbols: Sequence[str]) -> bytes:
    """Return the content of a dictionary's file, with all counts 1. fairseq reads it, too."""
    return "".join(f"{symbol} 1\n" for symbol in symbols[len(SPECIAL) :]).encode()


def has_pieces(symbols: Sequence[str]) -> bool:
    """Return True if a dictionary is of pieces of SentencePiece, where a mark begins words."""
    return sum(SPACE in symbol for symbol in symbols) > 0.1 * len(symbols)
