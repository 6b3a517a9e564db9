"""The sample corpus: reproducible, without repeated pairs, with one translation for a sentence."""

import hashlib
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_nmt import cli
from deepspeed_nmt.sample import SPLITS, Author, sentence_pairs, write_sample


def test_first_thousand_pairs_are_the_same_everywhere() -> None:
    text = "".join(f"{english}\t{german}\n" for english, german in islice(sentence_pairs(1), 1000))
    # The hash changes only with the grammar or the words.
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert digest == "e0cec916cf54aab3663e7f288750ab2888263518ff5c42d4b89bdd7b307faa2b"
    assert len({next(sentence_pairs(seed)) for seed in (-1, 0, 1, 2)}) == 4


def test_a_sentence_has_one_translation() -> None:
    author = Author(seed=7)
    translations: dict[str, str] = {}
    repeated = 0
    for _ in range(20_000):
        english, german = author.sentence()
        repeated += english in translations
        assert translations.setdefault(english, german) == german
    assert repeated > 10, "too few repetitions to test anything"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers())
def test_sentences_are_clean(seed: int) -> None:
    for pair in islice(sentence_pairs(seed), 50):
        for text in pair:
            assert re.fullmatch(r"[A-ZÄÖÜ0-9][A-Za-zÄÖÜäöüß0-9:, ]+[.?]", text)
            assert not re.search(r"  | ,|,[^ ]|,[.?]", text)
        assert pair[0].endswith("?") == pair[1].endswith("?")
        assert not re.search(r"\ba [aeiou]", pair[0])


def test_splits_share_no_sentence_and_write_the_same_bytes(tmp_path: Path) -> None:
    write_sample(tmp_path / "one", 1000, 200, 300, seed=5)
    write_sample(tmp_path / "two", 1500, 200, 300, seed=5)
    for language in ("en", "de"):
        lines = [(tmp_path / "one" / f"{name}.{language}").read_text("utf-8").splitlines() for name in SPLITS]
        assert [len(part) for part in lines] == [1000, 200, 300]
        assert len(set().union(*lines)) == 1500
        for name in ("valid", "test"):
            held_out = f"{name}.{language}"
            assert (tmp_path / "one" / held_out).read_bytes() == (tmp_path / "two" / held_out).read_bytes()
        small, large = ((tmp_path / name / f"train.{language}").read_bytes() for name in ("one", "two"))
        assert large.startswith(small)
    expected = sorted(f"{name}.{language}" for name in SPLITS for language in ("en", "de"))
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == expected, "no temporary file is left"


def test_text_of_the_user_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample-data", "--out", str(tmp_path), "--train", "3", "--valid", "2", "--test", "0"]
    assert cli.main(command) == 0
    assert f"{tmp_path / 'train'}.en and .de: 3 pairs" in capsys.readouterr().out
    assert (tmp_path / "test.de").read_bytes() == b"" and (tmp_path / "train.de").read_bytes().count(b"\n") == 3
    (sample := tmp_path / "train.en").chmod(0o400)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert cli.main(command) == 0, "the same content"
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before

    (mine := tmp_path / "valid.de").write_text("Meins.\n")
    sample.unlink()
    capsys.readouterr()
    assert cli.main(command) == 2
    assert f"--out {tmp_path} has other text in valid.de" in capsys.readouterr().err
    assert mine.read_text() == "Meins.\n" and not sample.exists(), "nothing is written"
    assert cli.main([*command, "--overwrite"]) == 0
    assert mine.read_text() != "Meins.\n" and sample.exists()
    mine.unlink()
    mine.mkdir()
    capsys.readouterr()
    assert cli.main([*command, "--overwrite"]) == 2
    assert f"{mine} is a directory or a device; move it away" in capsys.readouterr().err
