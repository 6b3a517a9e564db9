"""SentencePiece vocabularies, one for both sides.

A vocabulary is either joint BPE of raw text, or the words of text that is already segmented in the ``@@ `` style of
subword-nmt, whose tokens are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import sentencepiece

from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.data.clean import segmented_words
from deepspeed_nmt.data.normalization import Normalization, named, trainer_settings
from deepspeed_nmt.data.sentencepiece_process import train_model
from deepspeed_nmt.data.tokenizer import BOS, EOS, INFO_FILE, PAD, UNK, UNKNOWN_TEXT, Tokenizer
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import parse_json

MODEL_FILE = "vocabulary.model"
"""The SentencePiece model."""

_SPACE = "\u2581"  # SentencePiece's mark for the space before a word
_CONTINUATION = re.compile(r"@@( |$)")
# SentencePiece silently drops longer lines (bytes) from the training text. Paragraphs can exceed its default of 4192.
_LONGEST_LINE = 1 << 16


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with one vocabulary for both sides and the special tokens PAD, BOS, EOS and UNK.

    Args:
        model: A serialised SentencePiece model.
        segmented: True if text is already segmented in the ``@@ `` style, so that tokens are its words.

    Raises:
        DataError: if the model cannot be read or has other special tokens.
    """

    def __init__(self, model: bytes, segmented: bool = False) -> None:
        self.model = model
        self.segmented = segmented
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"the vocabulary must be a SentencePiece model, but could not be read: {error}"
            ) from error
        self.vocabulary = Vocabulary(self._processor.get_piece_size(), pad=PAD, bos=BOS, eos=EOS, unk=UNK)
        processor = self._processor
        special = (processor.pad_id(), processor.bos_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD, BOS, EOS, UNK):
            raise DataError(
                f"the vocabulary's pad, begin, end and unknown tokens must be {PAD}, {BOS}, {EOS}, {UNK}, but are "
                f"{', '.join(map(str, special))}; let `prepare` make the vocabulary"
            )
        self._words: list[str] = []
        if segmented:
            self._words = [processor.id_to_piece(number).removeprefix(_SPACE) for number in range(self.size)]
            self._words[UNK] = UNKNOWN_TEXT
        self._numbers = {word: number for number, word in enumerate(self._words) if number > UNK}

    @classmethod
    def read(cls, path: Path) -> SentencePieceTokenizer:
        """Read the vocabulary of a directory.

        Raises:
            DataError: if it is missing or cannot be read.
        """
        missing = [name for name in (MODEL_FILE, INFO_FILE) if not (path / name).is_file()]
        if missing:
            raise DataError(
                f"{path} must hold a vocabulary ({MODEL_FILE} and {INFO_FILE}), but has no "
                f"{' and no '.join(missing)}; give a directory that `prepare` has made"
            )
        try:
            segmented = parse_json((path / INFO_FILE).read_text(encoding="utf-8"))["segmented"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path / INFO_FILE} must be JSON with the key 'segmented', but is not ({error})"
            ) from error
        return cls((path / MODEL_FILE).read_bytes(), segmented=bool(segmented))

    def files(self) -> dict[str, bytes]:
        """Serialise the model and its settings; see :meth:`Tokenizer.files`."""
        info = {"segmented": self.segmented, "size": self.size}
        return {MODEL_FILE: self.model, INFO_FILE: (json.dumps(info, indent=2) + "\n").encode()}

    @property
    def digest(self) -> str:
        """SHA-256 of the model."""
        return hashlib.sha256(self.model).hexdigest()

    def encode_batch(self, texts: Sequence[str], side: Side = "source", threads: int = 1) -> list[list[int]]:
        """Encode lines; see :meth:`Tokenizer.encode_batch`. Segmented text takes one thread."""
        if self.segmented:
            number_of = self._numbers.get
            return [[number_of(word, UNK) for word in segmented_words(text)] for text in texts]
        encoded: list[list[int]] = self._processor.encode(list(texts), num_threads=threads)
        return encoded

    def decode(self, tokens: Iterable[int], side: Side = "target") -> str:
        """Decode tokens; see :meth:`Tokenizer.decode`. Segmented text is joined to words."""
        numbers = [int(token) for token in tokens if token > EOS]
        if self.segmented:
            return self.reference(" ".join(self._words[number] for number in numbers))
        text: str = self._processor.decode(numbers)
        return text

    def all_pieces(self, side: Side = "target") -> list[str]:
        """Return the text of each token; see :meth:`Tokenizer.all_pieces`."""
        if self.segmented:
            special = [self._processor.id_to_piece(number) for number in range(UNK + 1)]
            return [*special, *self._words[UNK + 1 :]]
        return [self._processor.id_to_piece(number) for number in range(self.size)]

    def sentencepiece_models(self) -> tuple[bytes, bytes] | None:
        """Return the model twice; None for segmented text, which no model segments."""
        return None if self.segmented else (self.model, self.model)

    def pieces(self, tokens: Iterable[int], side: Side = "target") -> list[str]:
        """Return tokens as the vocabulary spells them; see :meth:`Tokenizer.pieces`."""
        if self.segmented:
            return [self._words[int(token)] for token in tokens]
        return [self._processor.id_to_piece(int(token)) for token in tokens]

    def number(self, piece: str, side: Side = "target") -> int | None:
        """Return the number of a token; see :meth:`Tokenizer.number`."""
        if self.segmented:
            return self._numbers.get(piece)
        number = int(self._processor.piece_to_id(piece))
        return None if number == UNK else number

    def reference(self, text: str) -> str:
        """Remove the ``@@ `` marks of segmented text; raw text stays as it is."""
        return _CONTINUATION.sub("", text) if self.segmented else text


def train_bpe(
    lines: Iterable[str],
    vocab_size: int,
    character_coverage: float = 1.0,
    normalization: Normalization = "nfkc",
) -> SentencePieceTokenizer:
    """Train a BPE vocabulary on raw text. The same lines give the same vocabulary.

    Args:
        lines: source and target text together. All of it is held in memory, so give a sample of large text.
        vocab_size: number of tokens, including the four special ones.
        character_coverage: share of the text's characters that must be in the vocabulary; rarer ones become unknown.
            1.0 for alphabets, 0.9995 for scripts of thousands of characters.
        normalization: form of the text, which the model brings about before it looks for tokens.

    Raises:
        DataError: if there is no text, or it has too many characters or too few different words for ``vocab_size``.
    """
    with trainer_settings(normalization) as rules:
        tokenizer = _train(
            lines,
            segmented=False,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            **rules,
        )
    _check_size(tokenizer, vocab_size)
    return SentencePieceTokenizer(named(tokenizer.model, normalization))


def train_words(lines: Iterable[str], vocab_size: int | None = None) -> SentencePieceTokenizer:
    """Collect the vocabulary of already segmented text, in memory proportional to the number of different tokens.

    Tokens spelt like special ones (``<s>``, ``<unk>``) are not in it and become unknown.

    Args:
        lines: source and target text together.
        vocab_size: number of tokens to keep, the four special ones and the most frequent; None keeps all.

    Raises:
        DataError: if there is no text, it has fewer tokens than ``vocab_size``, or it was segmented by SentencePiece.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(segmented_words(line))
    marked = [word for word in counts if _SPACE in word]
    marked_share = sum(counts[word] for word in marked) / max(1, counts.total())
    if marked_share > 0.1:
        raise DataError(
            f"segmented text must mark unfinished words with '@@ ', but {marked_share:.0%} of its tokens have "
            f"SentencePiece's '{_SPACE}'; give the raw text without --segmented"
        )
    for word in marked:  # SentencePiece would split such a word, so it becomes unknown
        del counts[word]
    # SentencePiece is given each word with its frequency instead of the text.
    table = (f"{word}\t{count}" for word, count in sorted(counts.items()))
    tokenizer = _train(
        table,
        segmented=True,
        model_type="word",
        input_format="tsv",
        vocab_size=len(counts) + UNK + 1 if vocab_size is None else vocab_size,
        normalization_rule_name="identity",
        character_coverage=1.0,
    )
    if vocab_size is not None:
        _check_size(tokenizer, vocab_size)
    return tokenizer


def _train(lines: Iterable[str], segmented: bool, vocab_size: int, **settings: Any) -> SentencePieceTokenizer:
    iterator: Iterator[str] = iter(lines)
    first = next(iterator, None)
    if first is None:
        raise DataError(
            "the text of a vocabulary must not be empty, but is; check that the training files are not empty"
        )
    if vocab_size <= UNK + 1:
        raise DataError(f"--vocab-size must be more than the {UNK + 1} special tokens, but is {vocab_size}; raise it")
    try:
        model = train_model(
            chain([first], iterator),
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # too small a vocabulary is reported by `_check_size`
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            unk_surface=UNKNOWN_TEXT,
            max_sentence_length=_LONGEST_LINE,
            minloglevel=4,  # its log and errors would go to stderr
            **settings,
        )
    except RuntimeError as error:
        sizes = re.search(r"required_chars\. (\d+) vs (\d+)", str(error))
        if sizes is None:
            raise DataError(f"SentencePiece could not make a vocabulary of {vocab_size} tokens: {error}") from error
        raise DataError(
            f"--vocab-size must be at least {sizes.group(2)}, the characters of the text and {UNK + 1} special "
            f"tokens, but is {sizes.group(1)}; raise it, or lower --character-coverage (0.9995 for large scripts)"
        ) from error
    return SentencePieceTokenizer(model, segmented)


def _check_size(tokenizer: SentencePieceTokenizer, vocab_size: int) -> None:
    if tokenizer.size < vocab_size:
        raise DataError(
            f"--vocab-size must be at most {tokenizer.size}, which the text supports, but is {vocab_size}; lower it, "
            "or give more text"
        )
