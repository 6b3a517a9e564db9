"""Unicode's forms inside a SentencePiece model."""

import sys
import unicodedata

import pytest
import sentencepiece

from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.vocabulary_training import Normalization, train_subwords

LINES = [
    "Viện Toán học ở Hà Nội, được thành lập.",
    "한글은 소리글자다",
    "が行 ½ km² ，。！ Ａ ﬁ é ñ Å",
    "Ẹ́ ẹ̀ ṣe é",
]
FORMS: tuple[Normalization, ...] = ("nfkc", "nfc", "none")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, SentencePieceTokenizer]:
    return {form: train_subwords(LINES, 75, normalization=form) for form in FORMS}


def normalized(tokenizer: SentencePieceTokenizer, texts: list[str]) -> list[str]:
    """Texts as SentencePiece gives them to the search for tokens, without its mark of the first space."""
    normalizer = sentencepiece.SentencePieceNormalizer(model_proto=tokenizer.model)
    return [text.removeprefix("▁") for text in normalizer.normalize(texts)]


def test_nfc_is_that_of_unicode(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    assigned = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Co", "Cs")]
    texts = [c for c in assigned if not unicodedata.is_normalized("NFD", c) and not c.isspace()]
    assert len(texts) > 13_000
    for form in ("NFC", "NFD"):
        spelt = [unicodedata.normalize(form, text) for text in texts]
        assert normalized(tokenizers["nfc"], spelt) == [unicodedata.normalize("NFC", text) for text in texts]
    others = [c for c in assigned if "!" <= c < "\u3100" and not c.isspace() and c != "▁"]
    others = [c for c in others if unicodedata.is_normalized("NFC", c)]
    assert normalized(tokenizers["nfc"], others) == others


@pytest.mark.parametrize("text", ["a\u0302\u0323", "\xe2\u0323", "\u212b"])
def test_marks_in_any_order(tokenizers: dict[str, SentencePieceTokenizer], text: str) -> None:
    assert normalized(tokenizers["nfc"], [text]) == [unicodedata.normalize("NFC", text)]


def test_spellings_of_one_text_have_the_same_tokens(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    for line in LINES:
        composed, decomposed = (unicodedata.normalize(form, line) for form in ("NFC", "NFD"))
        assert composed != decomposed
        for form in ("nfkc", "nfc"):
            assert tokenizers[form].encode(composed) == tokenizers[form].encode(decomposed)
        assert tokenizers["none"].encode(composed) != tokenizers["none"].encode(decomposed)


def test_only_nfkc_rewrites_what_looks_alike(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    text = LINES[2]
    decoded = {form: tokenizer.decode(tokenizer.encode(text)) for form, tokenizer in tokenizers.items()}
    assert decoded == {"nfkc": "が行 1⁄2 km2 ,。! A fi é ñ Å", "nfc": text, "none": text}


def test_every_white_space_is_a_space_in_all_forms(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    spaces = {c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace()}
    for form, tokenizer in tokenizers.items():
        tried = spaces - set("\x0b\x1c\x1d\x1e\x1f\x85") if form == "nfkc" else spaces  # it removes controls
        assert {tuple(tokenizer.encode(f"{c}Hà{c}{c}Nội{c}")) for c in tried} == {tuple(tokenizer.encode("Hà Nội"))}
