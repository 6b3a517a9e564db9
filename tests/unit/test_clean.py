"""Cleaning: each reason removes and counts the right pairs."""

from itertools import compress
from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt.data.clean import CleaningConfig, PairChecker, PairCleaner, fits, read_lines
from deepspeed_nmt.data.filters import Removals
from deepspeed_nmt.text import normalise_whitespace

CHUNK = 7


def _clean(
    *lines: tuple[bytes, bytes], segmented: bool = False, **config: object
) -> tuple[list[tuple[str, str]], PairCleaner]:
    cleaner = PairCleaner(PairChecker(CleaningConfig.model_validate(config), segmented))
    kept: list[tuple[str, str]] = []
    for start in range(0, len(lines), CHUNK):
        checked = cleaner.checker.check(lines[start : start + CHUNK])
        kept += compress(checked.texts, cleaner.accept(checked))
    return kept, cleaner


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (b"caf\xe9", b"ok", "undecodable"),
        (b"nul\x00", b"ok", "bad_character"),
        (b"ok", "was broken \ufffd before".encode(), "bad_character"),
        ("C1 \x93quotes\x94".encode(), b"ok", "bad_character"),
        (b"ok", "\u00a0\u3000\u2028".encode(), "empty"),
        (b"a b c d e f", b"ok", "too_long"),
    ],
)
def test_faulty_pair_is_removed_and_counted_under_its_reason(source: bytes, target: bytes, reason: str) -> None:
    kept, cleaner = _clean((b"good", b"gut"), (source, target), (b"fine", b"fein"), max_length=5)
    assert kept == [("good", "gut"), ("fine", "fein")]
    assert +cleaner.removals.counts == {reason: 1}
    assert (cleaner.read, cleaner.kept) == (3, 2)


def test_unusual_but_valid_characters_are_kept() -> None:
    texts = ["naïve “quotes” – 日本語", "emoji 👩‍👩‍👧 stays", "soft\u00adhyphen", "e\u0301"]
    kept, cleaner = _clean(*((text.encode(), b"x") for text in texts))
    assert [source for source, _ in kept] == texts
    assert cleaner.removals.counts.total() == 0


def test_only_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\u2028b\r\nc\x85d\u0085e\x0bf\n\nlast".encode())
    lines = list(read_lines([path, path]))
    assert [line.decode() for line in lines[:4]] == ["a\u2028b", "c\x85d\u0085e\x0bf", "", "last"]
    assert len(lines) == 8, "a last line without a line feed must not be joined with the next file"
    assert normalise_whitespace(lines[0].decode()) == "a b"


def test_white_space_is_normalised_but_segmented_tokens_are_not_split() -> None:
    text = "  10\u00a0000 \t a@@ b\u2028c "
    assert normalise_whitespace(text) == "10 000 a@@ b c"
    assert normalise_whitespace(text, segmented=True) == "10\u00a0000 a@@ b\u2028c"


def test_the_first_of_duplicates_is_kept_across_chunks() -> None:
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 60, 500).tolist()
    pairs = [(f"s {number}".encode(), f"t {number // 2}".encode()) for number in numbers]
    kept, cleaner = _clean(*pairs)
    assert kept == [(f"s {number}", f"t {number // 2}") for number in dict.fromkeys(numbers)]
    assert cleaner.removals.counts["duplicate"] == 500 - len(set(numbers))
    assert len(_clean(*pairs, keep_duplicates=True)[0]) == 500


def test_duplicates_are_recognised_after_normalisation_of_white_space() -> None:
    kept, _ = _clean((b"a  b", b"c"), (b"a b ", b"c"), (b"a b", b"d"), (b"a", b"b c"))
    assert kept == [("a b", "c"), ("a b", "d"), ("a", "b c")]


def test_identical_sides_are_removed_only_on_request() -> None:
    pairs = ((b"Berlin", b"Berlin "), (b"a", b"b"))
    assert len(_clean(*pairs)[0]) == 2
    kept, cleaner = _clean(*pairs, remove_identical=True)
    assert kept == [("a", "b")]
    assert +cleaner.removals.counts == {"identical": 1}


def test_lengths_in_tokens() -> None:
    removals = Removals()
    config = CleaningConfig(max_length=50, max_ratio=3.0, ratio_from=10)
    #            fits  limit too long  short   ratio   at ratio  short enough for any ratio
    lengths = [[20, 50, 51, 10, 0, 31, 30, 10], [21, 50, 50, 60, 9, 10, 10, 1]]
    assert fits(config, np.array(lengths), removals).tolist() == [True, True, *[False] * 4, True, True]
    assert removals.counts == {"too_long": 2, "too_short": 1, "ratio": 1}
    assert fits(config, np.zeros((2, 0), np.int64), removals).tolist() == []
    moses = CleaningConfig(max_ratio=1.5, ratio_from=1)  # that of Moses' clean-corpus-n
    lengths = [[1, 2, 3, 3, 4, 60], [1, 1, 2, 1, 3, 40]]
    assert fits(moses, np.array(lengths), removals).tolist() == [True, False, True, False, True, True]
