"""The tokenizer with the vocabularies of two BERTs."""

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_nmt import huggingface
from deepspeed_nmt.data.bert_tokenizer import BertTokenizer
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import INFO_FILE
from deepspeed_nmt.errors import ConfigError, DataError
from tests.berts import SPECIAL, make_bert

ENGLISH = ["the old house stands by the river .", "a dog runs , it ' s well - known !"] * 5
GERMAN = ["das alte haus steht am fluss .", "ein hund läuft zum haus !"] * 5


@pytest.fixture(scope="module")
def berts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("berts")
    return make_bert(path / "de", GERMAN, 1, vocab_size=80), make_bert(path / "en", ENGLISH, 2, vocab_size=70)


@pytest.fixture(scope="module")
def both(berts: tuple[Path, Path]) -> BertTokenizer:
    return BertTokenizer.from_berts(f"{berts[0]},{berts[1]}")


def test_each_side_has_its_own_vocabulary(both: BertTokenizer) -> None:
    assert both.encode("") == [] == both.encode_batch([""], "target")[0]
    source, target = both.encode("das alte haus"), both.encode_batch(["the old house"], "target")[0]
    assert source[0] == both.vocabulary.source.bos and 2 not in source[1:] and 2 not in target
    assert both.decode(target) == "the old house"
    assert both.encode_batch(["das haus", "ein hund"], "source") == [
        both.encode("das haus"),
        both.encode("ein hund"),
    ]


def test_special_tokens_in_a_text_are_text(both: BertTokenizer) -> None:
    found = both.encode_batch(["the [SEP] house [MASK] [PAD]"], "target")[0]
    assert not {0, 2, 3, 4} & set(found)


def test_references_have_the_form_of_translations(both: BertTokenizer) -> None:
    for line in ["The old House, it's well-known!", "a dog runs ."]:
        assert both.reference(line) == both.decode(both.encode_batch([line], "target")[0])
    assert both.reference("The old house, it's!") == "the old house, it's!"
    assert both.reference("a Zebra") == "a zebra", "also with words that the vocabulary lacks"
    unknown = both.encode_batch(["the 猫"], "target")[0]
    assert both.decode([2, *unknown, 3, 0, 4]) == "the ⁇"


def test_a_saved_tokenizer_is_restored(both: BertTokenizer, tmp_path: Path) -> None:
    both.save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert isinstance(again, BertTokenizer)
    assert again.digest == both.digest and again.vocabulary == both.vocabulary
    assert again.encode("ein hund läuft") == both.encode("ein hund läuft")
    (tmp_path / "vocabulary.source.json").write_text("{}")
    with pytest.raises(DataError, match="as a tokenizer's JSON"):
        open_tokenizer(tmp_path)
    (tmp_path / "vocabulary.source.json").unlink()
    with pytest.raises(DataError, match=r"no vocabulary in .*vocabulary.source.json"):
        open_tokenizer(tmp_path)
    (tmp_path / INFO_FILE).write_text("[]")
    with pytest.raises(DataError, match=r"JSON file of the vocabulary in"):
        open_tokenizer(tmp_path)


def test_a_tokenizer_with_few_of_the_tokens_is_refused(berts: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(berts[0], tmp_path / "bert")
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in (*SPECIAL, "a", "b")))
    with pytest.raises(ConfigError, match=r"has 7 tokens, but its config.json has vocab_size=\d+; restore its tok"):
        huggingface.load_vocabulary(str(folder), "--tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"could not be loaded from .*: a file lacks 'added_tokens'"):
        huggingface.load_vocabulary(str(folder), "--tokenizer")


def test_a_vocabulary_with_gaps_is_refused(both: BertTokenizer) -> None:
    content = json.loads(both.files()["vocabulary.target.json"])
    (piece,) = both.pieces([10])
    assert content["model"]["vocab"].pop(piece) == 10
    with pytest.raises(DataError, match="tokens without text among its numbers"):
        BertTokenizer({"source": json.dumps(content), "target": json.dumps(content)}, both._special)
