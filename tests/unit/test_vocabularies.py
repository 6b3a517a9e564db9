"""Kinds of vocabularies: round trips, symbols, one a side, unigram models, bytes, and models of the user."""

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from deepspeed_nmt.core.vocabulary import SIDES, Vocabulary
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.marian_tokenizer import MarianTokenizer
from deepspeed_nmt.data.sentencepiece import MODEL_FILE, SentencePieceTokenizer, type_of
from deepspeed_nmt.data.tokenizer import INFO_FILE, Tokenizer
from deepspeed_nmt.data.vocabulary_training import adopt_models, train_subwords, train_words
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.text import Tags

ENGLISH = [
    f"the {a} house stands near the {b} river" for a in ("old", "new", "red") for b in ("wide", "cold", "long")
]
GERMAN = ["das alte Haus steht am Fluß", "zwei Häuser stehen am breiten Fluß", "Übung macht den Meister."]
SYMBOLS = ("<2de>", "<bt>")


def foreign(**settings: Any) -> bytes:
    """Return a model with SentencePiece's own numbers: no padding, and the unknown token first."""
    model = io.BytesIO()
    settings = {"vocab_size": 70, "model_type": "bpe", **settings}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH + GERMAN),
        model_writer=model,
        minloglevel=4,
        hard_vocab_limit=False,
        **settings,
    )
    return model.getvalue()


def with_symbols() -> dict[str, Tokenizer]:
    """Return a vocabulary of each kind with SYMBOLS."""
    lines = ENGLISH + GERMAN
    return {
        "bpe": train_subwords(lines, 80, symbols=SYMBOLS),
        "unigram": train_subwords(lines, 44, vocabulary_type="unigram", symbols=SYMBOLS),
        "words": train_words([*lines, "<bt> again"], symbols=SYMBOLS),
    }


def test_symbols_are_single_tokens_that_survive() -> None:
    for kind, tokenizer in with_symbols().items():
        tag, other = (tokenizer.symbol("source", each) for each in SYMBOLS)
        assert tokenizer.symbols == SYMBOLS and {tag, other} == {4, 5}, kind
        plain = tokenizer.encode("the old river")
        # At the beginning of a line a symbol is nothing but its token, as a mixture puts it there.
        assert tokenizer.encode("<2de> the old river") == [tag, *plain]
        assert tokenizer.encode(" <2de>  <bt> the old river") == [tag, other, *plain]
        assert tokenizer.encode("<2de>") == [tag]
        inside = tokenizer.encode("the old <bt> river")
        assert inside.count(other) == 1 and tokenizer.vocabulary.unk not in inside
        for text in ("<2de> <bt> the old river", "the old <bt> river"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        if kind != "words":
            assert tokenizer.encode("<2de>the").count(tag) == 1


def test_an_unknown_tag_names_the_known_ones() -> None:
    tokenizer = train_subwords(ENGLISH, 60, symbols=("<2de>", "<2fr>", "<bt>"))
    with pytest.raises(DataError, match=r"the tag '<xy>' is no symbol of the source.*<2fr>"):
        tokenizer.symbol("source", "<xy>")
    with pytest.raises(DataError, match=r"'▁the' is no symbol"):  # a token, but not the user's
        tokenizer.symbol("source", "▁the")
    with pytest.raises(DataError, match=r"'<bt>' is no symbol .*; it has no symbols, see prepare --symbols"):
        train_subwords(ENGLISH, 60).symbol("target", "<bt>")


def test_a_vocabulary_of_each_side(tmp_path: Path) -> None:
    source, target = train_subwords(ENGLISH, 60, symbols=SYMBOLS), train_subwords(GERMAN, 70, symbols=SYMBOLS)
    both = SentencePieceTokenizer(target.model, source_model=source.model, symbols=SYMBOLS)
    assert both.vocabulary == Vocabulary(70, own_source=Vocabulary(60))
    assert both.encode_batch(ENGLISH, "source") == source.encode_batch(ENGLISH)
    assert both.encode_batch(GERMAN, "target") == target.encode_batch(GERMAN)
    assert both.decode(both.encode(ENGLISH[0]), "source") == ENGLISH[0]
    assert both.all_pieces("source") == source.all_pieces() != both.all_pieces("target") == target.all_pieces()
    assert both.sentencepiece_models() == (source.model, target.model)
    assert len({both.digest, source.digest, target.digest}) == 3
    both.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        INFO_FILE, "vocabulary.source.model", "vocabulary.target.model",
    ]  # fmt: skip
    again = open_tokenizer(tmp_path)
    assert (again.vocabulary, again.symbols, again.digest) == (both.vocabulary, SYMBOLS, both.digest)
    assert SentencePieceTokenizer(target.model, source_model=target.model).vocabulary.own_source is None
    (tmp_path / "vocabulary.source.model").unlink()
    with pytest.raises(DataError, match=r"no vocabulary in .*vocabulary.source.model"):
        open_tokenizer(tmp_path)


def test_a_joint_vocabulary_is_written_as_ever(tmp_path: Path) -> None:
    train_subwords(ENGLISH, 60).save(tmp_path)
    assert (tmp_path / INFO_FILE).read_text() == '{\n  "segmented": false,\n  "size": 60\n}\n'


def test_unigram_and_bytes() -> None:
    lines = ENGLISH + GERMAN
    unigram = train_subwords(lines, 42, vocabulary_type="unigram")
    assert unigram.model == train_subwords(lines, 42, vocabulary_type="unigram").model
    assert (type_of(unigram.model), type_of(train_subwords(lines, 80).model)) == ("unigram", "bpe")
    assert [unigram.decode(each) for each in unigram.encode_batch(lines)] == lines
    assert unigram.decode(unigram.encode("the 猫 river")) == "the ⁇ river"
    for kind in ("bpe", "unigram"):
        fallback = train_subwords(lines, 298, vocabulary_type=kind, byte_fallback=True)  # type: ignore[arg-type]
        assert 3 not in fallback.encode("the 猫 river")
        assert fallback.decode(fallback.encode("the 猫 river")) == "the 猫 river"


@pytest.mark.parametrize("character", ["\n", "\x1c", "\u2028"])
def test_bytes_that_break_lines_become_spaces(character: str) -> None:
    tokenizer = train_subwords(ENGLISH, 290, byte_fallback=True)
    numbers = [tokenizer.number(f"<0x{byte:02X}>") for byte in character.encode()]
    word = tokenizer.encode("river")
    assert None not in numbers
    assert tokenizer.decode([*word, *map(int, numbers), *word]) == "river  river"  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_a_model_of_the_users_keeps_its_segmentations(kind: str, tmp_path: Path) -> None:
    model = foreign(model_type=kind, vocab_size=70 if kind != "char" else 40, control_symbols=["<2de>"])
    path = tmp_path / "own.model"
    path.write_bytes(model)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = adopt_models([path], SYMBOLS)
    lines = [*ENGLISH, *GERMAN, "ein Haus 猫"]
    pieces = [ours.pieces(each) for each in ours.encode_batch(lines)]
    assert [[p for p in each if p != "<unk>"] for each in pieces] == [
        [p for p in each if p != "猫"] for each in theirs.encode(lines, out_type=str)
    ]
    assert ours.all_pieces()[:4] == ["<pad>", "<s>", "</s>", "<unk>"]
    # <2de> was a token already, <bt> and the padding are new.
    assert ours.size == theirs.get_piece_size() + 2
    assert ours.encode("<bt> the house")[1:] == ours.encode("the house")
    assert ours.decode(ours.encode("<2de> the house")) == "<2de> the house"
    assert pickle.loads(pickle.dumps(ours)).encode("the <bt> house") == ours.encode("the <bt> house")


@pytest.mark.parametrize(
    "settings", [{"normalization_rule_name": "identity"}, {"remove_extra_whitespaces": False}], ids=str
)
def test_a_line_has_the_tokens_that_its_words_have_in_training_text(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "own.model"
    path.write_bytes(foreign(**settings))
    tokenizer = adopt_models([path], SYMBOLS)
    for line in ("the\u00a0old house", "the\u2028old house", " the old  house ", "the\told house"):
        assert tokenizer.encode(line) == tokenizer.encode("the old house"), line


def test_languages_of_an_imported_model_are_symbols() -> None:
    special = {"eos": 0, "unk": 1, "pad": 3, "bos": 3}
    numbers = {"</s>": 0, "<unk>": 1, ">>fra<<": 2, "<pad>": 3}
    tokenizer = MarianTokenizer((foreign(), foreign()), (numbers, numbers), special)
    assert tokenizer.symbols == (">>fra<<",)
    for side in SIDES:  # as Hugging Face, which takes it for a symbol on either side
        assert tokenizer.symbol(side, ">>fra<<") == 2
        assert tokenizer.encode_batch([">>fra<<"], side) == [[2]]
        assert tokenizer.encode_batch([">>fra<< the"], side)[0][0] == 2
    assert Tags(target=">>fra<<").untagged(tokenizer.decode([2, *tokenizer.encode_batch(["the"], "target")[0]]))


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
    assert tokenizer.encode_batch(RAW, "source") == [tokenizer.encode(line) for line in RAW]


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


def test_a_size_that_has_no_room_for_words_is_refused() -> None:
    for symbols, others in (((), "4 special tokens"), (("A", "B"), "4 special tokens and 2 symbols")):
        size = 4 + len(symbols)
        with pytest.raises(DataError, match=f"--vocab-size is {size}, no more than the {others}; raise it"):
            train_words(SEGMENTED, size, symbols)
        assert train_words(SEGMENTED, size + 1, symbols).size == size + 1


def test_special_tokens_in_the_text_are_never_special() -> None:
    for tokenizer in (
        train_subwords([*RAW, "a </s> <s> b <pad>"], 80),
        train_words([*SEGMENTED, "a </s> <s> b <pad>"]),
    ):
        assert not {0, 1, 2} & set(tokenizer.encode("a </s> <s> b <pad> <unk>"))


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
