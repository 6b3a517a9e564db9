"""Vocabularies of fairseq's models: a dictionary for each side, whose numbers are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sentencepiece
from typing_extensions import override

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.fairseq_dictionary import EOS, PAD, SPECIAL, UNK, content_of, has_pieces, symbols_of
from deepspeed_nmt.data.listed_pieces import ListedPieces
from deepspeed_nmt.data.marian_tokenizer import MODEL_FILES
from deepspeed_nmt.data.sentencepiece_model import joined
from deepspeed_nmt.data.tokenizer import INFO_FILE, SPACE, UNKNOWN_TEXT
from deepspeed_nmt.errors import DataError

KIND = "fairseq"
"""Value of ``kind`` in INFO_FILE."""
_MOST_FOREIGN = 0.1
"""Share of a dictionary's symbols that its SentencePiece model may lack."""
DICTIONARY_FILES: Mapping[Side, str] = {"source": "vocabulary.source.txt", "target": "vocabulary.target.txt"}


class FairseqTokenizer(ListedPieces):
    """The tokenizer of a model of fairseq.

    Text consists of the dictionary's symbols, separated by spaces: words with ``@@ `` marks, or pieces of
    SentencePiece. With the SentencePiece models, it is raw text.

    Args:
        symbols: symbols of the dictionaries of source and target by number, special ones included.
        models: SentencePiece models of source and target; None for text that is segmented already.

    Raises:
        DataError: if a model cannot be read, or has other pieces than the dictionary.
    """

    def __init__(
        self, symbols: tuple[Sequence[str], Sequence[str]], models: tuple[bytes, bytes] | None = None
    ) -> None:
        self._pieces: dict[Side, list[str]] = dict(zip(SIDES, map(list, symbols), strict=True))
        self._numbers: dict[Side, dict[str, int]] = {
            side: {symbol: number for number, symbol in enumerate(each)} for side, each in self._pieces.items()
        }
        self._words = {side: dict(list(numbers.items())[len(SPECIAL) :]) for side, numbers in self._numbers.items()}
        self._shared = self._pieces["source"] == self._pieces["target"]
        self._is_sentencepiece = has_pieces(self._pieces["target"])
        self._models, self._processors = models, dict[Side, Any]()
        self.segmented = models is None
        for side, model in zip(SIDES, models or (), strict=False):
            self._processors[side] = self._processor(model, side)
        source, target = (Vocabulary(len(self._pieces[side]), pad=PAD, bos=EOS, eos=EOS, unk=UNK) for side in SIDES)
        self.vocabulary = target if self._shared else replace(target, own_source=source)

    def _processor(self, model: bytes, side: Side) -> Any:
        """Return the SentencePiece model of a side, after comparing it with the dictionary.

        Raises:
            DataError: if it cannot be read, or is another's.
        """
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(f"the {side}'s SentencePiece model could not be read: {error}") from error
        pieces = {processor.id_to_piece(number) for number in range(processor.get_piece_size())}
        words = [word for word in self._words[side] if not word.startswith("madeupword")]
        # A character that the model lacks is a piece of its own, which the dictionary may have.
        if len(foreign := [word for word in words if word not in pieces]) > _MOST_FOREIGN * len(words):
            raise DataError(
                f"the SentencePiece model must have the symbols of the {side}'s dictionary, but lacks "
                f"{len(foreign):,} of {len(words):,}, among them {foreign[0]}; give the model that segmented the text"
            )
        return processor

    @classmethod
    def read(cls, path: Path) -> FairseqTokenizer:
        """Read the vocabulary of a directory.

        Raises:
            DataError: if it is missing or cannot be read.
        """
        files = [path / DICTIONARY_FILES[side] for side in SIDES]
        try:
            found = [symbols_of(file.read_bytes(), file) for file in files if file.exists()]
            models = [
                (path / MODEL_FILES[side]).read_bytes() for side in SIDES if (path / MODEL_FILES[side]).exists()
            ]
            return cls((found[0], found[-1]), (models[0], models[-1]) if models else None)
        except (OSError, IndexError) as error:
            raise DataError(
                f"{path} must hold the dictionaries of a model of fairseq ({', '.join(DICTIONARY_FILES.values())}), "
                f"but does not ({error}); import the model again"
            ) from error

    @override
    def files(self) -> dict[str, bytes]:
        sides = SIDES[: 1 if self._shared else 2]
        found = {DICTIONARY_FILES[side]: content_of(self._pieces[side]) for side in sides}
        if self._models is not None:
            models = dict(zip(SIDES, self._models, strict=True))
            found |= {MODEL_FILES[side]: models[side] for side in SIDES[: 1 if len(set(self._models)) == 1 else 2]}
        info = {"kind": KIND, "segmented": self.segmented, "size": self.size}
        return {**found, INFO_FILE: (json.dumps(info, indent=2) + "\n").encode()}

    @override
    def encode_batch(self, texts: Sequence[str], side: Side, threads: int = 1) -> list[list[int]]:
        if self._processors:
            pieces = self._processors[side].encode(list(texts), out_type=str, num_threads=threads)
        else:
            pieces = [text.split() for text in texts]  # at any white space, as fairseq does
        number_of = self._words[side].get
        return [[number_of(piece, UNK) for piece in each] for each in pieces]

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
        """Return a line of text that :meth:`encode_batch` makes these tokens of.

        With SentencePiece models that is the text which they decode to.
        """
        if self._processors:
            return self.decode(tokens, side)
        return " ".join([self._pieces[side][token] for token in tokens])

    def _join(self, pieces: Sequence[str]) -> str:
        """Join the pieces of segmented text to words."""
        if self._is_sentencepiece:
            return "".join(pieces).replace(SPACE, " ").strip()
        return joined(" ".join(pieces))

    @override
    def reference(self, text: str) -> str:
        return self._join(text.split()) if self.segmented else text
