"""Training of SentencePiece vocabularies, and the use of models that the user has trained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from deepspeed_nmt.data.clean import segmented_words
from deepspeed_nmt.data.normalization import Normalization, named, trainer_settings
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.sentencepiece_process import train_model
from deepspeed_nmt.data.tokenizer import BOS, EOS, PAD, SPACE, UNK, UNKNOWN_TEXT
from deepspeed_nmt.errors import DataError

VocabularyType = Literal["bpe", "unigram"]
"""Types of a vocabulary of raw text: merges of byte pair encoding, or a unigram language model of pieces."""
_BYTES = 256
# SentencePiece silently drops longer lines (bytes) from the training text. Paragraphs can exceed its default of 4192.
_LONGEST_LINE = 1 << 16


def train_subwords(
    lines: Iterable[str],
    vocab_size: int,
    character_coverage: float = 1.0,
    normalization: Normalization = "nfkc",
    vocabulary_type: VocabularyType = "bpe",
    byte_fallback: bool = False,
    symbols: Sequence[str] = (),
) -> SentencePieceTokenizer:
    """Train a vocabulary on raw text. The same lines give the same vocabulary.

    Args:
        lines: text of both sides together, or of one. All of it is held in memory, so give a sample of large text.
        vocab_size: number of tokens, including special ones, symbols and bytes.
        character_coverage: share of the text's characters that must be in the vocabulary; rarer ones become unknown,
            or bytes. 1.0 for alphabets, 0.9995 for scripts of thousands of characters.
        normalization: form of the text, which the model brings about before it looks for tokens.
        vocabulary_type: bpe or unigram.
        byte_fallback: True to write a character that is not in the vocabulary as its bytes, 256 further tokens.
        symbols: texts that are single tokens; normalization leaves them as they are.

    Raises:
        DataError: if there is no text, or it has too many characters or too few different words for ``vocab_size``.
    """
    settings: dict[str, Any] = {"byte_fallback": True} if byte_fallback else {}
    with trainer_settings(normalization) as rules:
        tokenizer = _train(
            lines,
            segmented=False,
            symbols=symbols,
            model_type=vocabulary_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            **settings,
            **rules,
        )
    _check_size(tokenizer, vocab_size)
    return SentencePieceTokenizer(named(tokenizer.model, normalization), symbols=symbols)


def train_words(
    lines: Iterable[str], vocab_size: int | None = None, symbols: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Collect the vocabulary of already segmented text, in memory proportional to the number of different tokens.

    Tokens spelt like special ones (``<s>``, ``<unk>``) are not in it and become unknown.

    Args:
        lines: text of both sides together, or of one.
        vocab_size: number of tokens to keep, the four special ones, the symbols and the most frequent; None keeps
            all.
        symbols: tokens to keep in any case.

    Raises:
        DataError: if there is no text, it has fewer tokens than ``vocab_size``, or it was segmented by SentencePiece.
    """
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(segmented_words(line))
    marked = [word for word in counts if SPACE in word]
    marked_share = sum(counts[word] for word in marked) / max(1, counts.total())
    if marked_share > 0.1:
        raise DataError(
            f"segmented text must mark unfinished words with '@@ ', but {marked_share:.0%} of its tokens have "
            f"SentencePiece's '{SPACE}'; give the raw text without --segmented"
        )
    for word in marked:  # SentencePiece would split such a word, so it becomes unknown
        del counts[word]
    most = max(counts.values(), default=0)
    counts.update({symbol: most + 1 - counts[symbol] for symbol in symbols})  # to be kept in any case
    # SentencePiece is given each word with its frequency instead of the text.
    table = (f"{word}\t{count}" for word, count in sorted(counts.items()))
    tokenizer = _train(
        table,
        segmented=True,
        symbols=(),  # its own symbols would be there twice, with and without a space
        model_type="word",
        input_format="tsv",
        vocab_size=len(counts) + UNK + 1 if vocab_size is None else vocab_size,
        normalization_rule_name="identity",
        character_coverage=1.0,
    )
    if vocab_size is not None:
        _check_size(tokenizer, vocab_size)
    return SentencePieceTokenizer(tokenizer.model, segmented=True, symbols=symbols)


def _train(
    lines: Iterable[str], segmented: bool, symbols: Sequence[str], vocab_size: int, **settings: Any
) -> SentencePieceTokenizer:
    iterator: Iterator[str] = iter(lines)
    first = next(iterator, None)
    if first is None:
        raise DataError(
            "the text of a vocabulary must not be empty, but is; check that the training files are not empty"
        )
    fixed = {"special tokens": UNK + 1, "symbols": len(symbols), "bytes": _BYTES * ("byte_fallback" in settings)}
    others = " and ".join(f"{count} {name}" for name, count in fixed.items() if count)
    if vocab_size <= sum(fixed.values()):
        raise DataError(f"--vocab-size must be more than the {others}, but is {vocab_size}; raise it")
    if symbols:
        settings["user_defined_symbols"] = list(symbols)
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
            f"--vocab-size must be at least {sizes.group(2)}, the characters of the text and {others}, but is "
            f"{sizes.group(1)}; raise it, or lower --character-coverage (0.9995 for large scripts)"
        ) from error
    return SentencePieceTokenizer(model, segmented, symbols=symbols)


def _check_size(tokenizer: SentencePieceTokenizer, vocab_size: int) -> None:
    if tokenizer.size < vocab_size:
        raise DataError(
            f"--vocab-size must be at most {tokenizer.size}, which the text supports, but is {vocab_size}; lower it, "
            "or give more text"
        )


def adopt_models(paths: Sequence[Path], symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
    """Read SentencePiece models that the user has trained.

    Tokens keep their texts and scores, so that segmentations are those of the files. Their numbers change: special
    tokens get those of this program, and those that a model lacks (padding, often) are added.

    Args:
        paths: one model for both sides, or those of source and target.
        symbols: texts that are single tokens. Those that a model lacks are added.

    Raises:
        DataError: if a file is no model, or its model is of words.
    """
    models = [_adopted(path, symbols) for path in paths]
    return SentencePieceTokenizer(models[-1], source_model=models[0], symbols=symbols)


def type_of(model: bytes) -> str:
    """Return the type of a SentencePiece model: unigram, bpe, word or char."""
    import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model  # needs protobuf, which the rest does not

    spec = sentencepiece_model.ModelProto.FromString(model).trainer_spec
    name: str = spec.ModelType.Name(spec.model_type).lower()
    return name


def _adopted(path: Path, symbols: Sequence[str]) -> bytes:
    import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model  # needs protobuf, which the rest does not

    wrong = f"--sentencepiece must be a model that SentencePiece has trained, but {path}"
    try:
        content = sentencepiece_model.ModelProto.FromString(path.read_bytes())
    except OSError as error:
        raise DataError(f"{wrong} cannot be read ({error.strerror or error}); check the path") from error
    except Exception as error:  # of protobuf, which has no public class for it in all versions
        raise DataError(f"{wrong} is none; give the file that ends in .model, or .spm") from error
    spec, piece = content.trainer_spec, sentencepiece_model.ModelProto.SentencePiece
    if not content.pieces:
        raise DataError(f"{wrong} is none; give the file that ends in .model, or .spm")
    if spec.model_type == spec.WORD:
        raise DataError(f"{wrong} has a vocabulary of words; train one of type bpe or unigram")
    by_text = {each.piece: each for each in content.pieces}
    special = {PAD: spec.pad_piece, BOS: spec.bos_piece, EOS: spec.eos_piece, UNK: spec.unk_piece}
    first = []
    for number, text in sorted(special.items()):
        found = by_text.pop(text, None) or piece(piece=text, score=0.0)
        found.type = piece.UNKNOWN if number == UNK else piece.CONTROL
        first.append(found)
    for symbol in symbols:
        found = by_text.setdefault(symbol, piece(piece=symbol, score=0.0))
        found.type = piece.USER_DEFINED
    pieces = [*first, *by_text.values()]
    adopted = sentencepiece_model.ModelProto()
    adopted.CopyFrom(content)
    del adopted.pieces[:]
    adopted.pieces.extend(pieces)
    spec = adopted.trainer_spec
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = PAD, BOS, EOS, UNK
    spec.unk_surface, spec.vocab_size = UNKNOWN_TEXT, len(pieces)
    serialised: bytes = adopted.SerializeToString(deterministic=True)
    return serialised
