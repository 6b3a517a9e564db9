"""Cleaning: each reason removes and counts the right pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt.data.clean import CleaningConfig, PairCleaner, Reason, normalise_whitespace, read_lines


def _clean(
    *lines: tuple[bytes, bytes], segmented: bool = False, **config: object
) -> tuple[list[tuple[str, str]], PairCleaner]:
    cleaner = PairCleaner(CleaningConfig.model_validate(config), segmented)
    return list(cleaner.texts(lines)), cleaner


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (b"caf\xe9", b"ok", Reason.UNDECODABLE),
        (b"ok", b"\xed\xa0\x80", Reason.UNDECODABLE),  # a lone surrogate
        (b"nul\x00", b"ok", Reason.BAD_CHARACTER),
        (b"ok", "was broken \ufffd before".encode(), Reason.BAD_CHARACTER),
        (b"bell \x07", b"ok", Reason.BAD_CHARACTER),
        ("C1 \x93quotes\x94".encode(), b"ok", Reason.BAD_CHARACTER),
        (b"", b"ok", Reason.EMPTY),
        (b"ok", b" \t\r", Reason.EMPTY),
        (b"ok", "\u00a0\u3000\u2028".encode(), Reason.EMPTY),
        (b"a b c d e f", b"ok", Reason.TOO_LONG),
    ],
)
def test_faulty_pair_is_removed_and_counted_under_its_reason(source: bytes, target: bytes, reason: Reason) -> None:
    kept, cleaner = _clean((b"good", b"gut"), (source, target), (b"fine", b"fein"), max_length=5)
    assert kept == [("good", "gut"), ("fine", "fein")]
    assert +cleaner.removed == {reason: 1}
    assert (cleaner.read, cleaner.kept) == (3, 2)


def test_unusual_but_valid_characters_are_kept() -> None:
    texts = ["naïve “quotes” – 日本語", "emoji 👩‍👩‍👧 stays", "soft\u00adhyphen", "e\u0301"]
    kept, cleaner = _clean(*((text.encode(), b"x") for text in texts))
    assert [source for source, _ in kept] == texts
    assert cleaner.removed.total() == 0


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


def test_the_first_of_duplicates_is_kept_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_nmt.data.clean._CHUNK_PAIRS", 7)
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 60, 500).tolist()
    pairs = [(f"s {number}".encode(), f"t {number // 2}".encode()) for number in numbers]
    kept, cleaner = _clean(*pairs)
    assert kept == [(f"s {number}", f"t {number // 2}") for number in dict.fromkeys(numbers)]
    assert cleaner.removed[Reason.DUPLICATE] == 500 - len(set(numbers))
    assert len(_clean(*pairs, keep_duplicates=True)[0]) == 500


def test_duplicates_are_recognised_after_normalisation_of_white_space() -> None:
    kept, _ = _clean((b"a  b", b"c"), (b"a b ", b"c"), (b"a b", b"d"), (b"a", b"b c"))
    assert kept == [("a b", "c"), ("a b", "d"), ("a", "b c")]


def test_identical_sides_are_removed_only_on_request() -> None:
    pairs = ((b"Berlin", b"Berlin "), (b"a", b"b"))
    assert len(_clean(*pairs)[0]) == 2
    kept, cleaner = _clean(*pairs, remove_identical=True)
    assert kept == [("a", "b")]
    assert +cleaner.removed == {Reason.IDENTICAL: 1}


def test_lengths_in_tokens() -> None:
    cleaner = PairCleaner(CleaningConfig(max_length=50, max_ratio=3.0, ratio_from=10))
    #          fits  limit too long  short   ratio   at ratio  short enough for any ratio
    source = [20, 50, 51, 10, 0, 31, 30, 10]
    target = [21, 50, 50, 60, 9, 10, 10, 1]
    assert cleaner.fits(source, target).tolist() == [True, True, False, False, False, False, True, True]
    assert +cleaner.removed == {Reason.TOO_LONG: 2, Reason.TOO_SHORT: 1, Reason.RATIO: 1}
    assert cleaner.fits([], []).tolist() == []
    cleaner = PairCleaner(CleaningConfig(max_ratio=1.5, ratio_from=1))  # that of Moses' clean-corpus-n
    assert cleaner.fits([1, 2, 3, 3, 4, 60], [1, 1, 2, 1, 3, 40]).tolist() == [True, False, True, False, True, True]
