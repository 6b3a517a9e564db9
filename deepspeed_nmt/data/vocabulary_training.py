"""Training of SentencePiece vocabularies, and the use of models that the user has trained."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain, permutations
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer, parsed
from deepspeed_nmt.data.tokenizer import BOS, EOS, PAD, SPACE, UNK, UNKNOWN_TEXT
from deepspeed_nmt.errors import DataError, counted
from deepspeed_nmt.files import read_regular
from deepspeed_nmt.text import segmented_words

Normalization = Literal["nfkc", "nfc", "none"]
"""Unicode's form of a vocabulary's text; all of them turn white space into spaces.

``nfkc`` unifies compatibility variants (½, km², full-width letters) and removes control characters, ``nfc`` unifies
only different spellings of the same character, ``none`` keeps the text.
"""
DEFAULT_NORMALIZATION: Normalization = "nfc"
"""What ``nfkc`` rewrites, a model can never write."""


@contextmanager
def _trainer_settings(normalization: Normalization) -> Iterator[dict[str, str]]:
    """Provide the settings by which SentencePiece's trainer puts a normalization into the model."""
    if normalization == "nfkc":
        yield {"normalization_rule_name": "nmt_nfkc"}
        return
    with tempfile.NamedTemporaryFile(suffix=".tsv") as file:
        file.write(_rule_table(normalization))
        file.flush()
        yield {"normalization_rule_tsv": file.name}


@cache
def _rule_table(normalization: Normalization) -> bytes:
    """Return the rules of a normalization in SentencePiece's form."""
    rules = nfc_rules() if normalization == "nfc" else {}
    # Every white space becomes a space, as cleaning does with the training text.
    rules |= {space: " " for space in map(chr, range(sys.maxunicode + 1)) if space.isspace() and space != " "}

    def code_points(text: str) -> str:
        return " ".join(f"{ord(character):04X}" for character in text)

    lines = [f"{code_points(source)}\t{code_points(target)}\n" for source, target in sorted(rules.items())]
    return "".join(lines).encode()


def _named(model: bytes, normalization: Normalization) -> bytes:
    """Return a trained model that records the name of its rules, not their file: equal text gives equal models."""
    if normalization == "nfkc":
        return model
    content = parsed(model)
    content.normalizer_spec.ClearField("normalization_rule_tsv")
    content.normalizer_spec.name = normalization
    serialised: bytes = content.SerializeToString(deterministic=True)
    return serialised


def nfc_rules() -> dict[str, str]:
    """Return rules that compose text: for each spelling of a character that is not in NFC, its NFC.

    They cover all characters that Unicode composes or replaces (Hangul included), and every letter with any two of
    the marks with which it is composed, in any order. Text in NFC stays as it is. A letter with a mark of which
    Unicode has no composition, and a composable mark after that, keeps its spelling.
    """
    every = map(chr, range(sys.maxunicode + 1))
    characters = [character for character in every if not unicodedata.is_normalized("NFD", character)]
    texts = {unicodedata.normalize("NFD", character) for character in characters}
    marks: defaultdict[str, set[str]] = defaultdict(set)
    for text in texts:
        marks[text[0]].update(mark for mark in text[1:] if unicodedata.combining(mark))
    for base, own in marks.items():
        texts.update(unicodedata.normalize("NFD", base + first + second) for first in own for second in own)
    rules = {character: unicodedata.normalize("NFC", character) for character in characters}
    for text in texts:
        composed = unicodedata.normalize("NFC", text)
        rules.update((spelling, composed) for spelling in _spellings(text))
    return {spelling: composed for spelling, composed in rules.items() if spelling != composed}


def _spellings(decomposed: str) -> Iterator[str]:
    """Yield all canonically equivalent orders of a text's marks, each with every composable beginning composed."""
    ordered = all(map(unicodedata.combining, decomposed[1:]))
    for marks in permutations(decomposed[1:]) if ordered else [tuple(decomposed[1:])]:
        spelling = decomposed[0] + "".join(marks)
        if unicodedata.normalize("NFD", spelling) != decomposed:
            continue
        for length in range(1, len(spelling) + 1):
            beginning = unicodedata.normalize("NFC", spelling[:length])
            if len(beginning) == 1:
                yield beginning + spelling[length:]


VocabularyType = Literal["bpe", "unigram"]
"""Types of a vocabulary of raw text: merges of byte pair encoding, or a unigram language model of pieces."""
_BYTES = 256
# SentencePiece silently drops longer lines (bytes) from the training text. Paragraphs can exceed its default of 4192.
_LONGEST_LINE = 1 << 16


def train_subwords(
    lines: Iterable[str],
    vocab_size: int,
    character_coverage: float = 1.0,
    normalization: Normalization = DEFAULT_NORMALIZATION,
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
        byte_fallback: True to write a character that is not in the vocabulary as its bytes, 256 further tokens.
        symbols: texts that are single tokens; normalization leaves them as they are.

    Raises:
        DataError: if there is no text, or it has too many characters or too few different words for ``vocab_size``.
    """
    with _trainer_settings(normalization) as rules:
        model = _train(
            lines,
            symbols=symbols,
            model_type=vocabulary_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            **({"byte_fallback": True} if byte_fallback else {}),
            **rules,
        )
    tokenizer = SentencePieceTokenizer(_named(model, normalization), symbols=symbols)
    _check_size(tokenizer, vocab_size)
    return tokenizer


def train_words(
    lines: Iterable[str], vocab_size: int | None = None, symbols: Sequence[str] = ()
) -> SentencePieceTokenizer:
    """Collect the vocabulary of already segmented text, in memory proportional to the number of different tokens.

    Of the most frequent tokens it has ``vocab_size``, special ones and ``symbols`` included; None keeps all. Tokens
    spelt like special ones (``<s>``, ``<unk>``) are not in it and become unknown.
    """
    if vocab_size is not None and vocab_size <= UNK + 1 + len(symbols):
        others = f"{UNK + 1} special tokens" + (f" and {counted(len(symbols), 'symbols')}" if symbols else "")
        raise DataError(f"--vocab-size is {vocab_size}, no more than the {others}; raise it")
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(segmented_words(line))
    marked = [word for word in counts if SPACE in word]
    marked_share = sum(counts[word] for word in marked) / max(1, counts.total())
    if marked_share > 0.1:
        raise DataError(
            f"{marked_share:.0%} of the segmented text's tokens have SentencePiece's '{SPACE}' instead of '@@ ' "
            "marks; give the raw text without --segmented"
        )
    for word in marked:  # SentencePiece would split such a word, so it becomes unknown
        del counts[word]
    most = max(counts.values(), default=0)
    counts.update({symbol: most + 1 - counts[symbol] for symbol in symbols})  # to be kept in any case
    # SentencePiece is given each word with its frequency instead of the text.
    table = (f"{word}\t{count}" for word, count in sorted(counts.items()))
    model = _train(
        table,
        symbols=(),  # its own symbols would be there twice, with and without a space
        model_type="word",
        input_format="tsv",
        vocab_size=len(counts) + UNK + 1 if vocab_size is None else vocab_size,
        normalization_rule_name="identity",
        character_coverage=1.0,
    )
    tokenizer = SentencePieceTokenizer(model, segmented=True, symbols=symbols)
    if vocab_size is not None:
        _check_size(tokenizer, vocab_size)
    return tokenizer


def _train(lines: Iterable[str], symbols: Sequence[str], vocab_size: int, **settings: Any) -> bytes:
    iterator: Iterator[str] = iter(lines)
    first = next(iterator, None)
    if first is None:
        raise DataError("no text for a vocabulary; check that the training files are not empty")
    fixed = {"special tokens": UNK + 1, "symbols": len(symbols), "bytes": _BYTES * ("byte_fallback" in settings)}
    others = " and ".join(f"{count} {name}" for name, count in fixed.items() if count)
    if vocab_size <= sum(fixed.values()):
        raise DataError(f"--vocab-size is {vocab_size}, no more than the {others}; raise it")
    if symbols:
        settings["user_defined_symbols"] = list(symbols)
    try:
        return _train_model(
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
            f"--vocab-size is {sizes.group(1)}, but the characters of the text and {others} are {sizes.group(2)}; "
            "raise it, or lower --character-coverage (0.9995 for large scripts)"
        ) from error


def _check_size(tokenizer: SentencePieceTokenizer, vocab_size: int) -> None:
    if tokenizer.size < vocab_size:
        raise DataError(
            f"--vocab-size is {vocab_size}, but the text supports {tokenizer.size}; lower it, or give more text"
        )


def adopt_models(paths: Sequence[Path], symbols: Sequence[str] = ()) -> SentencePieceTokenizer:
    """Read SentencePiece models that the user has trained: one for both sides, or those of source and target.

    Tokens keep their texts and scores, so that segmentations are those of the files. Their numbers change: special
    tokens get those of this program, and those that a model lacks (padding, often, and symbols) are added.
    """
    models = [_adopted(path, symbols) for path in paths]
    return SentencePieceTokenizer(models[-1], source_model=models[0], symbols=symbols)


def _adopted(path: Path, symbols: Sequence[str]) -> bytes:
    try:
        content = parsed(read_regular(path))
        if not content.pieces:
            raise ValueError("it has no tokens")
    except OSError as error:
        raise DataError(
            f"--sentencepiece {path} cannot be read ({error.strerror or error}); check the path"
        ) from error
    except ImportError:
        raise
    except Exception as error:  # of protobuf, which has no public class for it in all versions
        raise DataError(
            f"--sentencepiece {path} is no model of SentencePiece; give the file that ends in .model, or .spm"
        ) from error
    spec, piece = content.trainer_spec, content.SentencePiece
    if spec.model_type == spec.WORD:
        raise DataError(f"--sentencepiece {path} has a vocabulary of words; train one of type bpe or unigram")
    by_text = {piece.piece: piece for piece in content.pieces}
    special = {PAD: spec.pad_piece, BOS: spec.bos_piece, EOS: spec.eos_piece, UNK: spec.unk_piece}
    first = []
    for number, text in sorted(special.items()):
        token = by_text.pop(text, None) or piece(piece=text, score=0.0)
        token.type = piece.UNKNOWN if number == UNK else piece.CONTROL
        first.append(token)
    for symbol in symbols:
        by_text.setdefault(symbol, piece(piece=symbol, score=0.0)).type = piece.USER_DEFINED
    pieces = [*first, *by_text.values()]
    del content.pieces[:]
    content.pieces.extend(pieces)
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = PAD, BOS, EOS, UNK
    spec.unk_surface, spec.vocab_size = UNKNOWN_TEXT, len(pieces)
    serialised: bytes = content.SerializeToString(deterministic=True)
    return serialised


def _train_model(lines: Iterable[str], **settings: Any) -> bytes:
    """Train a model in a process of its own, which can be ended, with settings of SentencePiece, and serialise it.

    If SentencePiece fails, its message is a RuntimeError, as without the process.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it has failed, and says why
                process.stdin.write(json.dumps(settings).encode() + b"\n")
                process.stdin.writelines(line.encode() + b"\n" for line in lines)
            model, message = process.communicate()
        except BaseException:
            process.kill()
            with suppress(BrokenPipeError):  # of what is still to be flushed
                process.stdin.close()
            raise
    if process.returncode != 0:
        signal = f"killed by signal {-process.returncode}"
        raise RuntimeError(signal if process.returncode < 0 else message.decode(errors="replace").strip())
    return model


def _main() -> None:
    """Train as the new process: settings and lines on standard input, the model on standard output."""
    stdin, model = sys.stdin.buffer, io.BytesIO()
    settings = json.loads(stdin.readline())
    lines = (line.removesuffix(b"\n").decode() for line in stdin)
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **settings)
    except RuntimeError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(model.getvalue())


if __name__ == "__main__":
    _main()
