"""From text to token numbers and back.

A :class:`Tokenizer` knows the vocabularies of both sides. Here they are one, and SentencePiece does the subword work:
joint BPE over raw text, or a list of words over text that somebody has already segmented in the ``@@ `` style of
subword-nmt, whose tokens are taken as they are. Those of two BERTs are in :mod:`deepspeed_nmt.data.bert_tokenizer`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import sentencepiece

from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.data.clean import segmented_words
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_write_bytes

MODEL_FILE = "vocabulary.model"
"""The SentencePiece model."""
INFO_FILE = "vocabulary.json"
"""What the other files do not tell: of SentencePiece ``segmented``, of BERTs their special tokens."""

PAD, BOS, EOS, UNK = 0, 1, 2, 3
UNKNOWN_TEXT = "⁇"
"""What an unknown token looks like in decoded text, so that it is seen and counts as an error."""

_SPACE = "\u2581"  # SentencePiece's mark for the space before a word
_CONTINUATION = re.compile(r"@@( |$)")
# SentencePiece drops longer lines (bytes) from the training text without a word; its default of 4192 is too near
# to what paragraphs have.
_LONGEST_LINE = 1 << 16


class Tokenizer(ABC):
    """The vocabularies of both sides, and how text becomes tokens of them.

    Attributes:
        vocabulary: sizes and special tokens.
        segmented: the text is already segmented in the ``@@ `` style, and tokens are its words.
    """

    vocabulary: Vocabulary
    segmented: bool = False

    @staticmethod
    def from_directory(path: Path) -> Tokenizer:
        """Read the vocabulary of a data or run directory.

        Raises:
            DataError: if it is missing or cannot be read.
            ConfigError: if it takes a package that is not installed.
        """
        try:
            info = json.loads((path / INFO_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            info = None
        if isinstance(info, dict) and info.get("kind") == "bert":
            from deepspeed_nmt.data.bert_tokenizer import BertTokenizer  # its library is optional

            return BertTokenizer.read(path, info)
        return SentencePieceTokenizer.read(path)

    def save(self, directory: Path) -> None:
        """Write the vocabulary's files, so that :meth:`from_directory` reads them."""
        for name, content in self.files().items():
            atomic_write_bytes(directory / name, content)

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """What is written, by name; each begins with ``vocabulary.``"""

    @property
    @abstractmethod
    def digest(self) -> str:
        """A SHA-256 that equal vocabularies share."""

    @property
    def size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.vocabulary.size

    @property
    def pad(self) -> int:
        """The padding token, of both sides."""
        return self.vocabulary.pad

    @property
    def unk(self) -> int:
        """What stands for text that the target's vocabulary lacks."""
        return self.vocabulary.unk

    @property
    def bos(self) -> int:
        """What a decoder reads first."""
        return self.vocabulary.bos

    @property
    def eos(self) -> int:
        """The end of a target sentence."""
        return self.vocabulary.eos

    def encode(self, text: str) -> list[int]:
        """The token numbers of one line of the source, without its end."""
        return self.encode_batch([text], "source")[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], side: Side, threads: int = 1) -> list[list[int]]:
        """The token numbers of many lines, without their end, on several threads; none of a line without tokens."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the target's token numbers: special ones vanish, unknown ones become :data:`UNKNOWN_TEXT`."""

    def matches_bert(self, tokenizer_json: str, special: Mapping[str, int], side: Side) -> bool:
        """Return True if a side's tokens are those of a BERT's tokenizer.

        Args:
            tokenizer_json: the BERT's tokenizer, serialised.
            special: numbers of its special tokens by name.
        """
        return False

    @abstractmethod
    def reference(self, text: str) -> str:
        """A line of reference text in the form that :meth:`decode` gives, so that the two can be compared."""


class SentencePieceTokenizer(Tokenizer):
    """One vocabulary for both sides, with fixed special tokens: padding 0, begin 1, end of sentence 2, unknown 3.

    Args:
        model: a SentencePiece model, serialised.
        segmented: the text is already segmented in the ``@@ `` style, and tokens are its words.

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
        self.vocabulary = Vocabulary(self._processor.get_piece_size(), PAD, BOS, EOS, UNK)
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
            segmented = json.loads((path / INFO_FILE).read_text(encoding="utf-8"))["segmented"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path / INFO_FILE} must be JSON with the key 'segmented', but is not ({error})"
            ) from error
        return cls((path / MODEL_FILE).read_bytes(), segmented=bool(segmented))

    def files(self) -> dict[str, bytes]:
        info = {"segmented": self.segmented, "size": self.size}
        return {MODEL_FILE: self.model, INFO_FILE: (json.dumps(info, indent=2) + "\n").encode()}

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    def encode_batch(self, texts: Sequence[str], side: Side = "source", threads: int = 1) -> list[list[int]]:
        """As in :class:`Tokenizer`; both sides are alike. Segmented text takes one thread."""
        if self.segmented:
            number_of = self._numbers.get
            return [[number_of(word, UNK) for word in segmented_words(text)] for text in texts]
        encoded: list[list[int]] = self._processor.encode(list(texts), num_threads=threads)
        return encoded

    def decode(self, tokens: Iterable[int]) -> str:
        numbers = [int(token) for token in tokens if token > EOS]
        if self.segmented:
            return self.reference(" ".join(self._words[number] for number in numbers))
        text: str = self._processor.decode(numbers)
        return text

    def reference(self, text: str) -> str:
        """Raw text stays as it is; segmented text loses its ``@@ `` marks."""
        return _CONTINUATION.sub("", text) if self.segmented else text


def train_bpe(
    lines: Iterable[str],
    vocab_size: int,
    character_coverage: float = 1.0,
    normalization: str = "nmt_nfkc",
) -> SentencePieceTokenizer:
    """Make a BPE vocabulary of raw text. The same lines give the same vocabulary.

    Args:
        lines: source and target text together; it is all held in memory, so give a sample of large text.
        vocab_size: tokens, the four special ones among them.
        character_coverage: share of the text's characters that must be in the vocabulary; the rare rest becomes
            unknown. 1.0 for alphabets, 0.9995 for scripts of thousands of characters.
        normalization: SentencePiece's rule; ``nmt_nfkc`` makes compatibility variants and odd spaces alike,
            ``identity`` leaves the text alone.

    Raises:
        DataError: if there is no text, or it has too many characters or too few different words for ``vocab_size``.
    """
    tokenizer = _train(
        lines,
        segmented=False,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=character_coverage,
        normalization_rule_name=normalization,
    )
    _check_size(tokenizer, vocab_size)
    return tokenizer


def train_words(lines: Iterable[str], vocab_size: int | None = None) -> SentencePieceTokenizer:
    """Make a vocabulary of the tokens of already segmented text; the memory it takes is that of the different tokens.

    Tokens spelt like a special one (``<s>``, ``<unk>``) are not in it: they are unknown.

    Args:
        lines: source and target text together.
        vocab_size: how many tokens to keep, the most frequent and the four special ones; None keeps all.

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
    for word in marked:  # a stray one would be cut in two by SentencePiece; it is unknown instead
        del counts[word]
    # A tab and the frequency after each "sentence": SentencePiece need not see the text itself.
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
            "a vocabulary is made of text, but there is none; check that the training files are not empty"
        )
    if vocab_size <= UNK + 1:
        raise DataError(
            f"the vocabulary must have more than its {UNK + 1} special tokens, but {vocab_size} were asked for"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=chain([first], iterator),
            model_writer=model,
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # too small a result is reported by us, in our words
            pad_id=PAD,
            bos_id=BOS,
            eos_id=EOS,
            unk_id=UNK,
            unk_surface=UNKNOWN_TEXT,
            max_sentence_length=_LONGEST_LINE,
            minloglevel=4,  # its log and its errors otherwise go to stderr
            **settings,
        )
    except RuntimeError as error:
        sizes = re.search(r"required_chars\. (\d+) vs (\d+)", str(error))
        if sizes is None:
            raise DataError(f"SentencePiece could not make a vocabulary of {vocab_size} tokens: {error}") from error
        raise DataError(
            f"the vocabulary must hold every character of the text and {UNK + 1} special tokens, {sizes.group(2)} "
            f"together, but {sizes.group(1)} were asked for; raise --vocab-size, or lower --character-coverage "
            "(0.9995 for large scripts)"
        ) from error
    return SentencePieceTokenizer(model.getvalue(), segmented)


def _check_size(tokenizer: SentencePieceTokenizer, vocab_size: int) -> None:
    if tokenizer.size < vocab_size:
        raise DataError(
            f"a vocabulary of {vocab_size} tokens was asked for, but the text supports at most {tokenizer.size}; "
            f"give --vocab-size {tokenizer.size} or less, or more text"
        )
