"""SentencePiece vocabularies: one for both sides, or one a side.

A vocabulary is of raw text (BPE, or a unigram model), or of the words of text that is already segmented in the
``@@ `` style of subword-nmt, whose tokens are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_nmt.core.vocabulary import SIDES, Side, Vocabulary
from deepspeed_nmt.data.segmentation import SampledSegmentations
from deepspeed_nmt.data.sentencepiece_model import SentencePieceModel, joined
from deepspeed_nmt.data.tokenizer import BOS, EOS, INFO_FILE, PAD, UNK, Tokenizer, TokenLists
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import parse_json

MODEL_FILE = "vocabulary.model"
"""The SentencePiece model of both sides."""
SIDE_MODEL_FILES: Mapping[Side, str] = {"source": "vocabulary.source.model", "target": "vocabulary.target.model"}
"""The SentencePiece models of vocabularies of one side each."""


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of one vocabulary for both sides, or of one a side, with the special tokens PAD, BOS, EOS and UNK.

    Args:
        model: A serialised SentencePiece model, of the target or of both sides.
        segmented: True if text is already segmented in the ``@@ `` style, so that tokens are its words.
        source_model: model of the source; None if both sides share one.
        symbols: texts that are single tokens of the vocabularies.

    Raises:
        DataError: if a model cannot be read, has other special tokens, or lacks a symbol.
    """

    def __init__(
        self, model: bytes, segmented: bool = False, source_model: bytes | None = None, symbols: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.segmented = segmented
        self.symbols = tuple(symbols)
        target = SentencePieceModel(model, segmented, self.symbols)
        self._shared = source_model in (None, model)
        source = (
            SentencePieceModel(source_model, segmented, self.symbols) if source_model and not self._shared else target
        )
        self._sides: dict[Side, SentencePieceModel] = {"source": source, "target": target}
        self.vocabulary = Vocabulary(target.size, pad=PAD, bos=BOS, eos=EOS, unk=UNK)
        if not self._shared:
            own = Vocabulary(source.size, pad=PAD, bos=BOS, eos=EOS, unk=UNK)
            self.vocabulary = replace(self.vocabulary, own_source=own)

    @classmethod
    def read(cls, path: Path) -> SentencePieceTokenizer:
        """Read the vocabulary of a directory.

        Raises:
            DataError: if it is missing or cannot be read.
        """
        separate = [path / name for name in SIDE_MODEL_FILES.values()]
        models = separate if any(file.is_file() for file in separate) else [path / MODEL_FILE]
        missing = [file.name for file in (*models, path / INFO_FILE) if not file.is_file()]
        if missing:
            raise DataError(
                f"{path} must hold a vocabulary ({' and '.join(file.name for file in models)} and {INFO_FILE}), but "
                f"has no {' and no '.join(missing)}; give a directory that `prepare` has made"
            )
        try:
            info = parse_json((path / INFO_FILE).read_text(encoding="utf-8"))
            segmented, symbols = bool(info["segmented"]), tuple(map(str, info.get("symbols", ())))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path / INFO_FILE} must be JSON with the key 'segmented', but is not ({error})"
            ) from error
        source, target = models[0].read_bytes(), models[-1].read_bytes()
        return cls(target, segmented, source, symbols)

    def files(self) -> dict[str, bytes]:
        """Serialise the models and their settings; see :meth:`Tokenizer.files`."""
        info: dict[str, Any] = {"segmented": self.segmented, "size": self.size}
        if self.symbols:  # not written by versions without symbols, as is what follows
            info["symbols"] = self.symbols
        if self._shared:
            files = {MODEL_FILE: self.model}
        else:
            info["source_size"] = self.vocabulary.source.size
            files = {SIDE_MODEL_FILES[side]: self._sides[side].model for side in SIDES}
        return {**files, INFO_FILE: (json.dumps(info, indent=2, ensure_ascii=False) + "\n").encode()}

    @property
    def digest(self) -> str:
        """SHA-256 of the model, or of the hashes of both."""
        hashes = [hashlib.sha256(self._sides[side].model).hexdigest() for side in SIDES]
        return hashes[0] if self._shared else hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str], side: Side = "source", threads: int = 1) -> list[list[int]]:
        """Encode lines; see :meth:`Tokenizer.encode_batch`. Segmented text takes one thread."""
        return self._sides[side].encode(texts, threads)

    def sample_batch(
        self, texts: Sequence[str], side: Side, sampling: SampledSegmentations, number: int, first: int
    ) -> TokenLists:
        """Draw segmentations; see :meth:`Tokenizer.sample_batch`."""
        seeds = sampling.seeds(number, side, first, len(texts))
        return self._sides[side].sample(texts, seeds, sampling.alpha)

    def _decoded(self, tokens: Iterable[int], side: Side) -> str:
        """Decode tokens; see :meth:`Tokenizer.decode`. Segmented text is joined to words."""
        return self._sides[side].decode(tokens)

    def all_pieces(self, side: Side = "target") -> list[str]:
        """Return the text of each token; see :meth:`Tokenizer.all_pieces`."""
        return self._sides[side].all_pieces()

    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        """Return the models of both sides; None for segmented text, which no model segments."""
        return None if self.segmented else (self._sides["source"].model, self.model)

    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        """Return tokens as the vocabulary spells them; see :meth:`Tokenizer.pieces`."""
        return self._sides[side].pieces(tokens)

    def number(self, piece: str, side: Side = "target") -> int | None:
        """Return the number of a token; see :meth:`Tokenizer.number`."""
        return self._sides[side].number(piece)

    def reference(self, text: str) -> str:
        """Remove the ``@@ `` marks of segmented text; raw text stays as it is."""
        return joined(text) if self.segmented else text
