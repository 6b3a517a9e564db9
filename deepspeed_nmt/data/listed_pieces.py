"""Base of tokenizers whose pieces keep the numbers of another program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from typing_extensions import override

from deepspeed_nmt.core.vocabulary import Side
from deepspeed_nmt.data.tokenizer import Tokenizer


class ListedPieces(Tokenizer):
    """A tokenizer with a list of pieces for each side.

    A subclass sets ``_pieces``, the pieces of each side by number, ``_numbers``, the number of each piece, and
    ``_models``, the SentencePiece models of source and target, or None.
    """

    _pieces: dict[Side, list[str]]
    _numbers: dict[Side, dict[str, int]]
    _models: tuple[bytes, bytes] | None

    @property
    @override
    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    @override
    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        return [self._pieces[side][int(token)] for token in tokens]

    @override
    def number(self, piece: str, side: Side = "target") -> int | None:
        return self._numbers[side].get(piece)

    @override
    def all_pieces(self, side: Side) -> list[str]:
        return list(self._pieces[side])

    @override
    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        return self._models
