"""Vocabularies: round trips, and messages about invalid requests."""

import json
from pathlib import Path

import pytest
import sentencepiece

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.sentencepiece import MODEL_FILE, SentencePieceTokenizer
from deepspeed_nmt.data.tokenizer import INFO_FILE
from deepspeed_nmt.data.vocabulary_training import train_subwords, train_words
from deepspeed_nmt.errors import DataError

RAW = [f"the {a} house stands near the {b} river" for a in ("old", "new", "red") for b in ("wide", "cold", "long")]
RAW += ["das alte Haus steht am Fluß", "zwei Häuser stehen am breiten Fluß", "Übung macht den Meister."]
SEGMENTED = [
    "a man with pul@@ ley system .",
    "ein an@@ trie@@ b@@ s@@ rad@@ system .",
    "10\u00a0000 @-@ &lt; #@@ 猫 .",
]


def test_bpe_round_trip_with_fixed_special_tokens() -> None:
    tokenizer = train_subwords(RAW, vocab_size=80)
    assert tokenizer.vocabulary == Vocabulary(80, pad=0, bos=1, eos=2, unk=3)
    for line in RAW:
        tokens = tokenizer.encode(line)
        assert min(tokens) > 3
        assert tokenizer.decode([1, *tokens, 2, 0, 0]) == line
        assert tokenizer.reference(line) == line
    assert tokenizer.encode("") == []
    assert tokenizer.encode_batch(RAW, threads=2) == [tokenizer.encode(line) for line in RAW]


def test_unknown_characters_are_marked_in_the_text() -> None:
    tokenizer = train_subwords(RAW, vocab_size=80)
    assert tokenizer.decode(tokenizer.encode("the 猫 river")) == "the ⁇ river"
    words = train_words(SEGMENTED)
    assert words.encode("a dog .") == [words.encode("a")[0], 3, words.encode(".")[0]]
    assert words.decode(words.encode("a dog .")) == "a ⁇ ."


def test_same_text_same_vocabulary() -> None:
    assert train_subwords(RAW, 80).model == train_subwords(iter(RAW), 80).model
    assert train_words(SEGMENTED).model == train_words(reversed(SEGMENTED)).model


def test_segmented_text_is_not_segmented_again() -> None:
    tokenizer = train_words(iter(SEGMENTED))
    assert tokenizer.segmented
    assert tokenizer.size == 4 + len({word for line in SEGMENTED for word in line.split(" ")})
    for line in SEGMENTED:
        tokens = tokenizer.encode(line)
        assert len(tokens) == len(line.split(" "))
        assert 3 not in tokens
        assert tokenizer.decode([*tokens, 2]) == tokenizer.reference(line)
    assert tokenizer.reference(SEGMENTED[1]) == "ein antriebsradsystem ."
    assert tokenizer.reference("unfinished wo@@") == "unfinished wo"


def test_special_tokens_in_the_text_are_never_special() -> None:
    for tokenizer in (
        train_subwords([*RAW, "a </s> <s> b <pad>"], 80),
        train_words([*SEGMENTED, "a </s> <s> b <pad>"]),
    ):
        assert not {0, 1, 2} & set(tokenizer.encode("a </s> <s> b <pad> <unk>"))


def test_a_saved_tokenizer_is_restored(tmp_path: Path) -> None:
    for tokenizer, text in ((train_subwords(RAW, 80), RAW[0]), (train_words(SEGMENTED), SEGMENTED[0])):
        tokenizer.save(tmp_path)
        again = open_tokenizer(tmp_path)
        assert (again.size, again.segmented, again.encode(text)) == (
            tokenizer.size, tokenizer.segmented, tokenizer.encode(text),
        )  # fmt: skip


def test_vocabulary_too_large_names_the_largest() -> None:
    with pytest.raises(DataError, match=r"--vocab-size is 5000, but the text supports \d+") as error:
        train_subwords(RAW, vocab_size=5000)
    largest = int(str(error.value).split("supports ")[1].split(";")[0])
    assert train_subwords(RAW, vocab_size=largest).size == largest
    with pytest.raises(DataError, match=r"is 50, but the text supports 7"):
        train_words(["a b c"], vocab_size=50)


def test_directory_without_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no vocabulary in .*vocabulary.json"):
        open_tokenizer(tmp_path)
    train_subwords(RAW, 80).save(tmp_path)
    (tmp_path / INFO_FILE).write_text("{}")
    with pytest.raises(DataError, match="'segmented'"):
        open_tokenizer(tmp_path)
    (tmp_path / INFO_FILE).write_text(json.dumps({"segmented": False}))
    (tmp_path / MODEL_FILE).write_bytes(b"not a model")
    with pytest.raises(DataError, match="the SentencePiece model of the vocabulary"):
        open_tokenizer(tmp_path)


def test_foreign_model_with_other_special_tokens_is_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "foreign"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(RAW), model_prefix=str(prefix), vocab_size=60, model_type="bpe", minloglevel=4
    )
    with pytest.raises(DataError, match="tokens are -1, 1, 2, 0 instead of 0, 1, 2, 3"):
        SentencePieceTokenizer(prefix.with_suffix(".model").read_bytes())
