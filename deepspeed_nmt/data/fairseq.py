"""Vocabularies of fairseq's models: a dictionary for each side, whose numbers are kept."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.marian_tokenizer import MODEL_FILES
from deepspeed_nmt.data.sentencepiece import open_model
from deepspeed_nmt.data.tokenizer import INFO_FILE, SPACE, UNKNOWN_TEXT, Tokenizer
from deepspeed_nmt.errors import DataError, shown
from deepspeed_nmt.files import open_regular, read_regular
from deepspeed_nmt.text import join_segments

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""Symbols that precede those of the file, in this order."""
BOS, PAD, EOS, UNK = range(4)
"""Their numbers. A decoder of fairseq reads EOS first; BOS is not used."""
_OVERWRITE = "#fairseq:overwrite"


def read_dictionary(path: Path) -> list[str]:
    """Read the symbols of a dictionary by number, the special ones included."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(
            f"the dictionary {path} cannot be read ({error.strerror or error}); give the directory that "
            "fairseq-preprocess has made"
        ) from error
    return symbols_of(content, path)


def symbols_of(content: bytes, path: Path) -> list[str]:
    """Return the symbols of the content of a dictionary by number."""
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8, and thus no dictionary of fairseq; restore the file") from error
    symbols = dict.fromkeys(SPECIAL)
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        symbol, _, count = line.rstrip().rpartition(" ")
        where = f"line {number} of {path}"
        if count == _OVERWRITE:
            raise DataError(
                f"{where} repeats a symbol ({_OVERWRITE}), which is not supported; use a model whose dictionary "
                "has each symbol once"
            )
        if not symbol or not count.lstrip("-").isdecimal():
            raise DataError(f"{where} is {shown(line)}, not a symbol and its count; give fairseq's dict.LANG.txt")
        if symbol in symbols:
            raise DataError(f"{where} repeats the symbol {shown(symbol)}; restore the file")
        symbols[symbol] = None
    return list(symbols)


_MOST_FOREIGN = 0.1
"""Share of a dictionary's symbols that its SentencePiece model may lack."""
_FREQUENT = 100
"""Symbols at the beginning of a dictionary, the most frequent ones; none of words has SentencePiece's mark."""
DICTIONARY_FILES: Mapping[Side, str] = {"source": "vocabulary.source.txt", "target": "vocabulary.target.txt"}


class FairseqTokenizer(Tokenizer):
    """The tokenizer of a model of fairseq.

    Text consists of the dictionary's symbols, separated by spaces: words with ``@@ `` marks, or pieces of
    SentencePiece. With the SentencePiece models, it is raw text. Symbols are those of the dictionaries of source and
    target by number, special ones included.
    """

    def __init__(
        self, symbols: tuple[Sequence[str], Sequence[str]], models: tuple[bytes, bytes] | None = None
    ) -> None:
        self._pieces = dict(zip(SIDES, map(list, symbols), strict=True))
        self._numbers = {
            side: {symbol: number for number, symbol in enumerate(pieces)} for side, pieces in self._pieces.items()
        }
        self._words = {side: dict(list(numbers.items())[len(SPECIAL) :]) for side, numbers in self._numbers.items()}
        self._shared = self._pieces["source"] == self._pieces["target"]
        words = self._pieces["target"][len(SPECIAL) :]
        marked = sum(SPACE in word for word in words)
        # Few pieces of Chinese, and one of a vocabulary of characters, begin a word; but these are frequent.
        is_frequent = any(word.startswith(SPACE) for word in words[:_FREQUENT])
        self._is_sentencepiece = models is not None or is_frequent or marked > 0.1 * len(words)
        self._models, self._processors = models, dict[Side, Any]()
        self.segmented = models is None
        for side, model in zip(SIDES, models or (), strict=False):
            self._processors[side] = self._processor(model, side)
        source, target = (Vocabulary(len(self._pieces[side]), pad=PAD, bos=EOS, eos=EOS, unk=UNK) for side in SIDES)
        self.vocabulary = target if self._shared else replace(target, own_source=source)

    def _processor(self, model: bytes, side: Side) -> Any:
        """Return the SentencePiece model of a side, after comparing it with the dictionary."""
        processor = open_model(model, f"the {side}'s SentencePiece model")
        pieces = {processor.id_to_piece(number) for number in range(processor.get_piece_size())}
        words = [word for word in self._words[side] if not word.startswith("madeupword")]
        # A character that the model lacks is a piece of its own, which the dictionary may have.
        if len(foreign := [word for word in words if word not in pieces]) > _MOST_FOREIGN * len(words):
            raise DataError(
                f"the SentencePiece model lacks {len(foreign):,} of {len(words):,} symbols of the {side}'s "
                f"dictionary, among them {foreign[0]}; give the model that segmented the text"
            )
        return processor

    @classmethod
    def read(cls, path: Path) -> FairseqTokenizer:
        """Read the vocabulary of a directory."""
        files = [path / DICTIONARY_FILES[side] for side in SIDES]
        dictionaries = [symbols_of(read_regular(file), file) for file in files[: 1 + files[1].exists()]]
        models = [read_regular(path / MODEL_FILES[side]) for side in SIDES if (path / MODEL_FILES[side]).exists()]
        return cls((dictionaries[0], dictionaries[-1]), (models[0], models[-1]) if models else None)

    @override
    def files(self) -> dict[str, bytes]:
        sides = SIDES[: 1 if self._shared else 2]
        # fairseq reads these dictionaries, too.
        files = {
            DICTIONARY_FILES[side]: "".join(f"{symbol} 1\n" for symbol in self._pieces[side][len(SPECIAL) :]).encode()
            for side in sides
        }
        if self._models is not None:
            models = dict(zip(SIDES, self._models, strict=True))
            files |= {MODEL_FILES[side]: models[side] for side in SIDES[: 1 if len(set(self._models)) == 1 else 2]}
        info = {"kind": "fairseq", "segmented": self.segmented, "size": self.size}
        return {**files, INFO_FILE: (json.dumps(info, indent=2) + "\n").encode()}

    @override
    def encode_batch(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        if self._processors:
            pieces = [self._processors[side].encode(text, out_type=str) for text in texts]
        else:
            pieces = [text.split() for text in texts]  # at any white space, as fairseq does
        number_of = self._words[side].get
        return [[number_of(piece, UNK) for piece in line] for line in pieces]

    @override
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        symbols = self._pieces[side]
        pieces = [UNKNOWN_TEXT if token == UNK else symbols[token] for token in map(int, tokens) if token >= UNK]
        processor = self._processors.get(side)
        if processor is None or any(processor.is_unknown(processor.piece_to_id(piece)) for piece in pieces):
            return self._join(pieces)  # SentencePiece would not write a piece that it lacks
        text: str = processor.decode_pieces(pieces)
        return text

    def spelt(self, tokens: Sequence[int], side: Side) -> str:
        """Return a line of text that :meth:`encode_batch` makes these tokens of."""
        if self._processors:
            return self.decode(tokens, side)
        return " ".join([self._pieces[side][token] for token in tokens])

    def _join(self, pieces: Sequence[str]) -> str:
        """Join the pieces of segmented text to words."""
        if self._is_sentencepiece:
            return "".join(pieces).replace(SPACE, " ").strip()
        return join_segments(" ".join(pieces))

    @override
    def reference(self, text: str) -> str:
        if self._is_sentencepiece and SPACE not in text:  # text whose pieces are joined already
            return text
        return self._join(text.split()) if self.segmented else text


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
    """One side of a split, whose files are `path` with ``.bin`` and ``.idx``, by a dictionary of `size` symbols."""

    path: Path
    size: int
    lines: int
    _sizes: npt.NDArray[np.int32]
    _places: npt.NDArray[np.int64]
    _tokens: npt.NDArray[Any]

    @classmethod
    def open(cls, path: Path, size: int) -> BinarisedText:
        """Open the files of a side of a split. They are mapped to memory, not read."""
        index, data = (path.with_name(path.name + ending) for ending in (".idx", ".bin"))
        try:
            with open_regular(index) as stream:
                head = stream.read(_HEADER.size)
            kind, lines = _read_header(head, index)
            if index.stat().st_size != _HEADER.size + 12 * lines:
                raise _damaged(index, "its length is not that of its lines")
            sizes = _mapped(index, np.int32, _HEADER.size, lines)
            places = _mapped(index, np.int64, _HEADER.size + 4 * lines, lines)
            count, rest = divmod(data.stat().st_size, np.dtype(kind).itemsize)
            tokens = _mapped(data, kind, 0, count)
        except OSError as error:
            raise DataError(
                f"the binarised text {error.filename or path} cannot be read ({error.strerror or error}); give the "
                "directory that fairseq-preprocess has made"
            ) from error
        if rest:
            raise _damaged(data, "its length is no multiple of its tokens'")
        return cls(path, size, lines, sizes, places, tokens)

    def rows(self) -> Iterator[list[int]]:
        """Yield the tokens of each line, without EOS, in memory that does not grow with the text."""
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
                        f"{self.path}.bin has the number {max(row)}, but its dictionary has {self.size:,} symbols; "
                        "give the dictionary that it was binarised with"
                    )
                yield row


def _mapped(path: Path, dtype: Any, offset: int, count: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)  # nothing cannot be mapped


def _read_header(head: bytes, path: Path) -> tuple[Any, int]:
    """Return the type of the tokens and the number of lines."""
    if head.startswith(_OLD_MAGIC):
        raise DataError(
            f"{path} is of an older format than mmap; binarise the text again with `fairseq-preprocess "
            "--dataset-impl mmap`, or give the text to `prepare --segmented`"
        )
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(
            f"{path} is no index of binarised text of fairseq (--dataset-impl mmap); give the directory that "
            "fairseq-preprocess has made"
        )
    _, version, code, lines = _HEADER.unpack(head)
    if version != 1 or code not in _TYPES:
        raise _damaged(path, f"it has version {version} and type {code}")
    return _TYPES[code], lines


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"{path} was damaged since fairseq-preprocess wrote it: {why}; restore it, or binarise the text again"
    )
