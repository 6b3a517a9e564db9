"""`prepare` with filters and Unicode rules: what it removes, records and reports."""

from pathlib import Path

import pytest

from deepspeed_nmt import cli
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import EXIT_USER_ERROR

NOUNS = ("house", "river", "teacher", "apple", "window", "garden", "letter", "street")
PAIRS = [(f"the {a} is near the {b}", f"der {a}n ist bei dem {b}n") for a in NOUNS for b in NOUNS]
NOISE = [
    ("Click <b>here</b> now", "Hier klicken"),
    ("<br>", "<br>"),
    ("The <i>house</i>", "das Haus"),
    ("read <p> this", "lies \u202ethis\x07"),
    ("in the year 1989", "im Jahr 2010"),
    ("THE HOUSE is near the river!", "der housen ist bei dem rivern"),
    ("the house " * 12, "der housen"),
    ("cafe\u0301 and \x07bell", "das Caf\u00e9 und die Glocke"),
]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Arguments of a command line, with files of clean and noisy text."""
    for side in (0, 1):
        for name, pairs in (("train", PAIRS + NOISE), ("valid", PAIRS[:3])):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / f"{name}.{side}").write_text(text, encoding="utf-8")
    words = ["prepare", "--out", str(tmp_path / "data"), "--vocab-size", "60"]
    for name in ("train", "valid"):
        words += [f"--{name}-source", str(tmp_path / f"{name}.0"), f"--{name}-target", str(tmp_path / f"{name}.1")]
    return words


def test_filters_are_applied_recorded_and_reported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--filters", "web,letters=0.4", "--unicode", "nfc,drop_control"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    meta = DataDirectory.open(tmp_path / "data").meta
    assert {reason: count for reason, count in meta.removed.items() if count} == {
        "html": 4, "digits": 1, "repetition": 1, "near_duplicates": 1,
    }  # fmt: skip
    assert (meta.pairs_read, meta.splits["train"].pairs) == (len(PAIRS + NOISE), len(PAIRS) + 1)
    assert meta.removed_examples["html"] == tuple(NOISE[:3]), "the first three"
    assert meta.removed_examples["digits"] == (NOISE[4],)
    assert meta.removed_examples["copy"] == ()
    assert meta.repaired == {"drop_control": {"source": 1, "target": 1}, "nfc": {"source": 1, "target": 0}}
    assert meta.options["filters"]["letters"] == {"min_share": 0.4}
    assert f"  html            {NOISE[0][0]:<50}  |  {NOISE[0][1]}\n" in shown
    corpus, tokenizer = (
        DataDirectory.open(tmp_path / "data").corpus("train"),
        DataDirectory.open(tmp_path / "data").tokenizer(),
    )
    assert tokenizer.decode(corpus.source(len(PAIRS)), "source") == "café and bell"

    # The same filters in other words are the same options; others are not.
    words[words.index("web,letters=0.4")] = "letters=0.4," + ",".join(
        name for name in meta.options["filters"] if name != "letters"
    )
    assert cli.main(words) == 0
    assert cli.main([*words, "--filters", "web"]) == EXIT_USER_ERROR
    assert cli.main([*words, "--unicode", "nfc"]) == EXIT_USER_ERROR
