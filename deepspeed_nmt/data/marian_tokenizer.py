"""Vocabularies of MarianMT models: a SentencePiece model for each side, and tokens with numbers of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.sentencepiece import open_model
from deepspeed_nmt.data.tokenizer import INFO_FILE, SPACE, UNKNOWN_TEXT, Count, Tokenizer, VocabularyInfo
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import read_regular

MODEL_FILES: Mapping[Side, str] = {"source": "vocabulary.source.spm", "target": "vocabulary.target.spm"}
NUMBERS_FILES: Mapping[Side, str] = {"source": "vocabulary.numbers.json", "target": "vocabulary.target_numbers.json"}
_NUMBERS = TypeAdapter(dict[str, Count])
_LANGUAGE = re.compile(r">>[^<\s]+<<")
"""Token at the beginning of a source line that names the language to translate to."""


class MarianTokenizer(Tokenizer):
    """The tokenizer of a MarianMT model.

    Models of SentencePiece and numbers of tokens are those of source and target; numbers are equal if they share a
    vocabulary. ``special`` has the numbers of the special tokens by the names pad, bos, eos and unk.
    """

    def __init__(
        self,
        models: tuple[bytes, bytes],
        numbers: tuple[Mapping[str, int], Mapping[str, int]],
        special: dict[str, int],
    ) -> None:
        self._models, self._special = models, special
        self._model_files = dict(zip(MODEL_FILES.values(), models, strict=True))
        self._numbers = dict(zip(SIDES, map(dict, numbers), strict=True))
        self._pieces = {}
        self._processors: dict[Side, Any] = {}
        for side, model in zip(SIDES, models, strict=True):
            pieces = {number: piece for piece, number in self._numbers[side].items()}
            if sorted(pieces) != list(range(len(self._numbers[side]))):
                raise DataError("the tokens of a vocabulary have not the numbers from 0 on, each once")
            self._pieces[side] = [pieces[number] for number in range(len(pieces))]
            self._processors[side] = open_model(model, "a SentencePiece model of the vocabulary")
            for name, number in special.items():
                if not 0 <= number < len(pieces):
                    raise DataError(
                        f"the number of the token {name} is {number}, but the {side} has {len(pieces):,} tokens"
                    )
        self._shared = self._numbers["source"] == self._numbers["target"]
        pad, bos, eos, unk = (special[name] for name in ("pad", "bos", "eos", "unk"))
        source, target = (Vocabulary(len(self._pieces[side]), pad=pad, bos=bos, eos=eos, unk=unk) for side in SIDES)
        self.vocabulary = target if self._shared else replace(target, own_source=source)
        self.symbols = tuple(piece for piece in self._pieces["source"] if _LANGUAGE.fullmatch(piece))

    @classmethod
    def read(cls, path: Path, info: VocabularyInfo) -> MarianTokenizer:
        """Read the vocabulary of a directory; raise a DataError, an OSError or a ValidationError if it is damaged."""
        if lacking := sorted({"pad", "bos", "eos", "unk"} - info.special.keys()):
            raise DataError(f"{path / INFO_FILE} lacks the special token {lacking[0]}; restore it from a copy")
        source, target = (read_regular(path / MODEL_FILES[side]) for side in SIDES)
        files = [path / NUMBERS_FILES[side] for side in SIDES]
        numbers = [_NUMBERS.validate_json(read_regular(file)) for file in files[: 1 + files[1].exists()]]
        return cls((source, target), (numbers[0], numbers[-1]), info.special)

    @override
    def files(self) -> dict[str, bytes]:
        files = dict(self._model_files)
        for side in SIDES[: 1 if self._shared else 2]:
            files[NUMBERS_FILES[side]] = json.dumps(self._numbers[side], ensure_ascii=False, indent=0).encode()
        info = {"kind": "marian", "special": self._special, "size": self.size}
        return {**files, INFO_FILE: (json.dumps(info, indent=2) + "\n").encode()}

    @override
    def encode_batch(self, texts: Sequence[str], side: Side) -> list[list[int]]:
        processor, number_of, unk = self._processors[side], self._numbers[side].get, self.vocabulary.unk
        languages = [_LANGUAGE.match(text) for text in texts]
        fronts = ["" if language is None else language[0] for language in languages]
        rests = [text.removeprefix(front) for text, front in zip(texts, fronts, strict=True)]
        pieces = [processor.encode(rest, out_type=str) for rest in rests]
        return [
            [number_of(piece, unk) for piece in ([front] if front else []) + rest]
            for front, rest in zip(fronts, pieces, strict=True)
        ]

    @override
    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        silent = {self.vocabulary.pad, self.vocabulary.bos, self.vocabulary.eos}
        numbers = [int(token) for token in tokens if int(token) not in silent]
        pieces = [UNKNOWN_TEXT if number == self.vocabulary.unk else self._pieces[side][number] for number in numbers]
        text: str = self._processors[side].decode_pieces(pieces)
        return text.replace(SPACE, " ").strip()  # of pieces that only the other side's model has
