"""Normalization of raw text, as rules inside a SentencePiece model.

Rules inside the model are applied wherever the model is used, in other programs too. SentencePiece has a table of
NFKC; those of the other forms are made here from Python's Unicode data. SentencePiece replaces the longest spelling
that is found at each position, once, from left to right.
"""

from __future__ import annotations

import sys
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Literal

Normalization = Literal["nfkc", "nfc", "none"]
"""Unicode's form of a vocabulary's text.

``nfkc`` unifies compatibility variants (½, km², full-width letters) and removes control characters, ``nfc`` unifies
only different spellings of the same character, ``none`` keeps the text. All of them turn white space into spaces.
"""


@contextmanager
def trainer_settings(normalization: Normalization) -> Iterator[dict[str, str]]:
    """Provide the settings by which SentencePiece's trainer puts a normalization into the model."""
    if normalization == "nfkc":
        yield {"normalization_rule_name": "nmt_nfkc"}
        return
    rules = {**(nfc_rules() if normalization == "nfc" else {}), **white_space_rules()}
    with tempfile.NamedTemporaryFile(suffix=".tsv") as file:
        file.write(_as_tsv(rules).encode())
        file.flush()
        yield {"normalization_rule_tsv": file.name}


def named(model: bytes, normalization: Normalization) -> bytes:
    """Return a trained model that records the name of its rules instead of the file that they were read from.

    Otherwise equal text would give different models.
    """
    if normalization == "nfkc":
        return model
    import sentencepiece.sentencepiece_model_pb2 as sentencepiece_model  # needs protobuf, which the rest does not

    content = sentencepiece_model.ModelProto.FromString(model)
    content.normalizer_spec.ClearField("normalization_rule_tsv")
    content.normalizer_spec.name = normalization
    serialised: bytes = content.SerializeToString(deterministic=True)
    return serialised


def white_space_rules() -> dict[str, str]:
    """Return rules that turn every white space into a space, as cleaning does with the training text."""
    return {each: " " for each in map(chr, range(sys.maxunicode + 1)) if each.isspace() and each != " "}


def nfc_rules() -> dict[str, str]:
    """Return rules that compose text: for each spelling of a character that is not in NFC, its NFC.

    They cover all characters that Unicode composes or replaces (Hangul included), and every letter with any two of
    the marks with which it is composed, in any order. Text in NFC stays as it is. A letter with a mark of which
    Unicode has no composition, and a composable mark after that, keeps its spelling.
    """
    every = map(chr, range(sys.maxunicode + 1))
    characters = [each for each in every if not unicodedata.is_normalized("NFD", each)]
    texts = {unicodedata.normalize("NFD", each) for each in characters}
    marks: defaultdict[str, set[str]] = defaultdict(set)
    for text in texts:
        marks[text[0]].update(mark for mark in text[1:] if unicodedata.combining(mark))
    for base, own in marks.items():
        texts.update(unicodedata.normalize("NFD", base + first + second) for first in own for second in own)
    rules = {each: unicodedata.normalize("NFC", each) for each in characters}
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


def _as_tsv(rules: dict[str, str]) -> str:
    """Return rules in SentencePiece's format: code points in hexadecimal, the replacement after a tab."""
    return "".join(f"{_code_points(source)}\t{_code_points(target)}\n" for source, target in sorted(rules.items()))


def _code_points(text: str) -> str:
    return " ".join(f"{ord(character):04X}" for character in text)
