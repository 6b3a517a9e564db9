"""Cleaning and filters of pairs: each removes what it should, and keeps its neighbour at the threshold."""

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from deepspeed_nmt.data import filters
from deepspeed_nmt.data.clean import (
    UNICODE_RULES,
    CleaningConfig,
    PairChecker,
    fits,
    read_unicode_rules,
    repair,
)
from deepspeed_nmt.data.filters import FILTERS, PRESETS, PairFilters, Removals, read_filters
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.text import TextForm, normalise_whitespace
from tests.filtered import PairStream
from tests.support import ROOT

EN_DE = TextForm(form="raw", source_lang="en", target_lang="de")
CASES: dict[str, list[tuple[str, str, str, str]]] = {
    # value, source, target that is removed, target that is kept
    "html": [
        ("", "Click here", "Hier <b>klicken", "Hier < b klicken, <name> > a"),
        ("", "a line", "eine<BR />Zeile", "eine <brz> Zeile"),
        ("", "Fish & chips", "Fisch &amp; Chips", "Fisch & Chips; AT&T; &foo;"),
        ("", "a", "<!-- b", "<! -- b"),
        ("0.25", "a", "<p>aaaaaaaa", "<p>aaaaaaaaa"),
    ],
    "url": [
        ("", "see", "www.example.org hier ist es a", "www.example.org hier ist es an"),  # 15 of 29, of 30
        ("0.75", "see", "http://example.org b c", "http://example.org bb cc"),
    ],
    "long_words": [
        ("", "x", "a" * 40, "a" * 39),
        ("5", "x", "この文は長いですabcde", "この文は長いです。空白がありませんabcd"),
    ],
    "letters": [
        ("", "x", "ab 1 2 3", "ab 1 2"),
        ("0.8", "x", "abcd 1 2", "abcd 1"),
        ("1", "x", "हिन्दी।", "हिन्दी"),  # vowel signs belong to letters
    ],
    "copy": [
        ("", "Tom lives in Boston", "Tom lives in Rom", "Tom wohnt in Rom"),  # 3 of 5 words, 2 of 6
        ("1", "Berlin", "BERLIN!", "Berlin Mitte"),
        ("", "5 km !", "5 KM", "5 ml !"),
    ],
    "digits": [
        ("", "from 1 to 2", "von 3 bis 2 in 47", "von 3 bis 2"),  # similarity 2/6, then 2/4
        ("1", "5 May 2010", "2011年5月", "2010年5月"),
        ("", "in 1989", "damals", "1 Jahr nach 1988"),
        ("", "the 100 men", "die 2", "die 1"),
        ("", "1000000", "2 Millionen", "1 Million"),  # zeros do not count
        ("", "the 100 men", "hundert Leute", "100 Leute"),
        ("", "eight of 13 and 200", "acht von dreizehn", "acht von ١٣ und ٢٠٠"),
    ],
    "punctuation": [
        ("", "One.", "a. b. c. d. e.", "a. b. c. d."),
        ("0", "Is it 3.5?", "Ist es 3,5", "„Ist es 3,5?“"),
        ("0", "Yes. No!", "はい。いいえ", "はい。いいえ！"),
    ],
    "repetition": [
        ("", "x", "das ist ein Test Ein Test, ein test", "das ist ein Test Ein Test, ein"),
        ("2", "x", "sehr, sehr gut", "sehr gut, sehr"),
        ("", "x", "ein ein ein", "ja ja ja"),  # two characters may be repeated
        ("", "x", "你好吗你好吗你好吗", "你好吗你好吗你好"),
    ],
    "script": [
        ("", "word", "слово слово Wort Wor", "слово слово Wort Wort Wo"),  # 10 foreign letters of 17, of 20
        ("1", "word", "Wort и", "Wort 5 µ«»"),
        ("Latin/Cyrillic", "word", "word", "слово"),
        ("0.9/Latin/Han+Hiragana+Katakana", "word", "これはペンabc", "これはペンです。123"),
    ],
    "score": [],  # judges no text; below
    "opusfilter": [],  # needs a file; below
    "near_duplicates": [],  # compares pairs
    "language": [],  # below
}


def _removes(filters: str, pair: tuple[str, str], text: TextForm = EN_DE) -> bool:
    stream = PairStream(filters, text)
    (kept,) = stream.keep([pair])
    assert stream.removals.counts.total() == 1 - kept
    return not kept


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in CASES.items() for case in cases],
    ids=lambda each: str(each)[:40],
)
def test_a_filter_removes_a_pair_and_keeps_its_neighbour(name: str, case: tuple[str, str, str, str]) -> None:
    value, source, removed, kept = case
    word = f"{name}={value}" if value else name
    assert _removes(word, (source, removed))
    assert not _removes(word, (source, kept))
    if name != "script":  # no other one distinguishes the sides
        assert _removes(word, (removed, source))
        assert not _removes(word, (kept, source))


def test_every_filter_has_cases() -> None:
    assert set(CASES) == set(FILTERS)


def test_escapes_of_moses_are_no_html() -> None:
    pair = ("it &apos;s", "er &quot; sagt &lt; b &gt;")
    assert _removes("html", pair)
    assert not _removes("html", pair, TextForm("moses", target_lang="de"))
    assert _removes("html", ("a <b> c", "d"), TextForm("moses", target_lang="de"))


def test_scores_across_batches() -> None:
    stream = PairStream("score=-1.5,long_words,near_duplicates", TextForm())
    pairs = [("a", "b"), ("a b", "c"), ("x" * 40, "d"), ("e", "f"), ("E", "F!")]
    keep = [*stream.keep(pairs[:2], [-1.5, -1.6]), *stream.keep(pairs[2:], [-9.0, -math.inf, 0.0])]
    assert keep == [True, False, False, False, True], "a pair that is removed has no repetition"
    assert stream.removals.counts == {"score": 2, "long_words": 1}
    assert stream.removals.examples["score"] == [("a b", "c"), ("e", "f")]
    with pytest.raises(ConfigError, match=r"no scores .* for the filter score"):
        stream.keep(pairs)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        stream.keep(pairs, [1.0])


OPUS = """
- LengthFilter: {unit: word, min_length: 1, max_length: 9}
- SimilarityFilter: {threshold: 0.6}
- NonZeroNumeralsFilter: {threshold: 0.9}
- HtmlTagFilter: {}
"""
_PAIRS = [
    ("a b", "c d"),
    ("a dog", "a dok"),
    ("in 1989", "1988"),
    ("a <b>", "c"),
    ("a " * 10, "b"),
    ("one 7", "7 xyz"),
]


class _Pipeline:
    """The part of OpusFilter's `FilterPipeline` that is called."""

    def __init__(self, config: list[dict[str, Any]]) -> None:
        self.filters = [self, SimpleNamespace(score=self.score, accept=lambda score: True)]
        self.most = config[0]["LengthFilter"]["max_length"]

    from_config = classmethod(lambda cls, config: cls(config))

    def score(self, pairs: list[tuple[str, str]]) -> Iterator[list[int]]:
        (pair,) = pairs
        yield [len(side.split()) for side in pair]

    def accept(self, score: list[int]) -> bool:
        return max(score) <= self.most


def test_opusfilter_judges_each_pair_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (path := tmp_path / "opus.yaml").write_text(f"filters: {json.dumps(yaml.safe_load(OPUS))}")
    monkeypatch.setitem(sys.modules, "opusfilter", None)
    monkeypatch.setitem(sys.modules, "opusfilter.pipeline", None)
    with pytest.raises(ConfigError, match=r"needs the package opusfilter, .*pip install opusfilter"):
        PairStream(f"opusfilter={path}", EN_DE)
    monkeypatch.setitem(sys.modules, "opusfilter", ModuleType("opusfilter"))
    monkeypatch.setitem(sys.modules, "opusfilter.pipeline", SimpleNamespace(FilterPipeline=_Pipeline))
    (entry,) = read_filters(f"opusfilter={path}").values()
    assert read_filters({"opusfilter": entry.model_dump(mode="json")}) == {"opusfilter": entry}, "as recorded"
    assert entry.describe().startswith("OpusFilter's LengthFilter, SimilarityFilter, ")
    stream = PairStream(f"opusfilter={path}", EN_DE)
    assert stream.keep(_PAIRS).tolist() == [True, True, True, True, False, True]
    filters._opus_filters.cache_clear()


def test_opusfilter_decides_as_the_package(tmp_path: Path) -> None:
    package = pytest.importorskip("opusfilter.pipeline")
    (path := tmp_path / "opus.yaml").write_text(OPUS)
    expected = list(package.FilterPipeline.from_config(yaml.safe_load(OPUS)).filter(iter(_PAIRS)))
    keep = PairStream(f"opusfilter={path}", EN_DE).keep(_PAIRS)
    assert list(compress(_PAIRS, keep)) == expected == [_PAIRS[0], _PAIRS[5]]
    path.write_text("- NoFilter: {}")
    with pytest.raises(ConfigError, match=r"OpusFilter refuses .*NoFilter"):
        PairStream(f"opusfilter={path}", EN_DE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "- WordAlignFilter: {model: 3}",
            "the filter opusfilter: WordAlignFilter judges pairs together, .*; leave it",
        ),
        ("- HtmlTagFilter: {}\n- SentenceEmbeddingFilter: {}", "SentenceEmbeddingFilter judges pairs together"),
        ("- LengthFilter: {max_length: .inf}", "value that JSON has not"),
        ("- LengthFilter", "no list of OpusFilter's filters"),
        ("steps: []", "no list of OpusFilter's filters"),
        ("a: b: c", "cannot be read"),
    ],
)
def test_files_of_opusfilter_that_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "opus.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_filters(f"opusfilter={path}")
    assert len(error.value.problems) == 1 and "\n" not in str(error.value)


def test_models_of_opusfilter_are_recorded(tmp_path: Path) -> None:
    (model := tmp_path / "en.arpa").write_bytes(b"model")
    text = (
        f"- CrossEntropyFilter: {{lm_params: [{{filename: {model}}}]}}\n- RegExpFilter: {{regexps: [{'a' * 9000}]}}"
    )
    (path := tmp_path / "opus.yaml").write_text(text)
    before = read_filters(f"opusfilter={path}")
    model.write_bytes(b"other")
    assert read_filters(f"opusfilter={path}") != before
    with pytest.raises(ConfigError, match="no list of OpusFilter's filters"):
        read_filters("opusfilter")


def test_near_duplicates_across_batches() -> None:
    pairs = [
        ("Page 1 of 7!", "Seite 1"),
        ("page 2 OF 8", "Seite 9."),
        ("Page 1 of 7", "Blatt"),
        ("1", "2"),
        ("2", "2"),
    ]
    for value, expected in (("", [1, 0, 1, 1, 1]), ("=source", [1, 0, 0, 1, 1]), ("=target", [1, 0, 1, 1, 0])):
        stream = PairStream(f"near_duplicates{value}", TextForm())
        assert stream.keep(pairs[:1]).tolist() + stream.keep(pairs[1:]).tolist() == list(map(bool, expected))
        assert stream.removals.counts["near_duplicates"] == expected.count(0)
    stream = PairStream("near_duplicates,letters", TextForm())
    assert stream.keep([("1", "2"), ("ab", "cd"), ("AB", "cd!")]).tolist() == [False, True, False]


def test_language_of_each_side() -> None:
    pytest.importorskip("py3langid")
    english, german = (
        "The house is very old and has a small garden.",
        "Das Haus ist sehr alt und hat einen kleinen Garten.",
    )
    assert not _removes("language", (english, german))
    for pair in ((german, german), (english, english), (german, english)):
        assert _removes("language", pair)
    assert _removes("language=0.99", ("Berlin", german)), "a name is of no certain language"
    for form, message in (
        (TextForm(target_lang="de"), "--source-lang"),
        (TextForm(source_lang="en", target_lang="dee"), "--target-lang is 'dee'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            PairStream("language", form)


def test_presets_values_and_order() -> None:
    assert list(read_filters("web")) == [name for name in FILTERS if name in PRESETS["web"]]
    assert [*read_filters("near_duplicates, digits=0.8 ,html")] == ["html", "digits", "near_duplicates"]
    changed = read_filters("web,digits=0.8,-html")
    assert changed["digits"] == FILTERS["digits"].model_validate({"min_similarity": 0.8})
    assert set(changed) == {*PRESETS["web"]} - {"html"}
    assert read_filters("") == {}
    recorded = {name: each.model_dump(mode="json") for name, each in changed.items()}
    assert read_filters(json.loads(json.dumps(recorded))) == changed
    PairStream("web", TextForm())  # needs no languages


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("htlm", "'htlm' of --filters is no filter; did you mean 'html'"),
        ("web,-script", "'-script'"),
        ("digits=x", "the filter digits .*'x'.*number"),
        ("html=1", "the filter html .*less than 1"),
        ("score=nan", "the filter score .*'nan'.*finite"),
        ("script=Latin", "'Latin' is none of SHARE, SOURCE/TARGET"),
        ("script=Latin/L}]", "'L}]' of the filter script"),
        ("script", "no language of the source for the filter script; give --source-lang"),
    ],
)
def test_wrong_filters_are_refused(filters: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PairStream(filters, TextForm())


def test_segmented_text_is_judged_by_its_words() -> None:
    text = TextForm(form="tokenised")
    source, target = "Bo@@ sto@@ n is gre@@ at", "Bo@@ ston ist gr@@ oß"
    for segmented, fault in ((True, ""), (False, "long_words")):
        configs = read_filters("long_words=7" if segmented else "long_words=5")
        assert PairFilters(configs, text, segmented).fault(source, target) == fault
    filters = PairFilters(read_filters("long_words=6,script"), TextForm("tokenised", "en", "de"), True)
    assert filters.fault(source, target) == "long_words"
    assert filters.fault("a@@ b", "слово") == "script"
    for pieces, fault in (("▁so ▁sch ön", ""), ("▁so ▁sch nell er", "long_words")):  # of an imported corpus
        assert filters.fault("▁a ▁cat", pieces) == fault
    assert filters.fault("a cat ▁ of a@@ ll", "ein Tier ▁ von a@@ llen") == "", "its spaces divide words"


LINES = [
    (b"A good sentence.", b"Ein guter Satz."),
    (b"Click <b>here</b>", b"Hier <i>klicken"),
    (b"A GOOD sentence", b"ein guter Satz"),
    (b"broken \xff", b"x"),
    (b"A good sentence.", b"Ein guter Satz."),
    (b"ring\x07ing cafe\xcc\x81", "klin\u200bgeln".encode()),
    (b"<br>", b"\x01"),
] * 5  # fmt: skip


class Cleaner(PairChecker):
    """All checks of pairs, batch by batch, which also remove repetitions."""

    def kept(self, lines: Sequence[tuple[bytes, bytes]], batch: int) -> list[tuple[str, str]]:
        all_seen, kept = defaultdict[str, set[int]](set), []
        for start in range(0, len(lines), batch):
            _, texts = self.check(lines[start : start + batch])
            keep = np.ones(len(texts), np.bool_)
            for reason in self.config.repetitions(self.filters.filters):
                hashes, seen = self.hashes(reason, texts).tolist(), all_seen[reason]
                for number in np.flatnonzero(keep).tolist():
                    if hashes[number] in seen:
                        keep[number] = False
                        self.removals.add(reason, *texts[number])
                    seen.add(hashes[number])
            kept += compress(texts, keep)
        return kept


def _clean(batch: int) -> tuple[list[tuple[str, str]], Cleaner]:
    rules = read_unicode_rules("nfc,drop_zero_width,drop_control")
    cleaner = Cleaner(CleaningConfig(), False, PairFilters(read_filters("web"), EN_DE), rules)
    return cleaner.kept(LINES, batch), cleaner


def test_the_result_does_not_depend_on_batches() -> None:
    places, texts = _clean(1)[1].check(LINES)
    assert [LINES[place][0][:4] for place in places] == [source[:4].encode() for source, _ in texts]
    kept, cleaner = _clean(len(LINES))
    assert kept == [("A good sentence.", "Ein guter Satz."), ("ringing café", "klingeln")]
    assert +cleaner.removals.counts == {
        "html": 5, "undecodable": 5, "duplicate": 17, "near_duplicates": 1, "empty": 5,
    }  # fmt: skip
    assert cleaner.repaired == {
        "drop_control.source": 5, "nfc.source": 5, "drop_zero_width.target": 5, "drop_control.target": 5,
    }  # fmt: skip
    assert cleaner.removals.examples["html"] == [("Click <b>here</b>", "Hier <i>klicken")] * 3
    assert cleaner.removals.examples["undecodable"][0] == ("broken \\xff", "x")
    assert cleaner.removals.examples["empty"][0] == ("<br>", "\\x01")
    for batch in (1, 3, 8):
        again, other = _clean(batch)
        assert again == kept
        assert (other.read, other.repaired) == (cleaner.read, cleaner.repaired)
        assert other.removals.counts == cleaner.removals.counts
        assert other.removals.examples == cleaner.removals.examples


@pytest.mark.parametrize(
    ("rule", "line", "expected"),
    [
        ("nfc", "cafe\u0301 \u212b \u00bd", "café \u00c5 \u00bd"),
        ("drop_zero_width", "\ufeffso\u00adft\u200b \u2060x", "soft x"),
        ("drop_zero_width", "a\u200d\u200cb\u200c c\u200d", "ab c"),
        ("drop_zero_width", "می\u200cخواهم 👩\u200d👧 क्\u200dष", "می\u200cخواهم 👩\u200d👧 क्\u200dष"),
        ("drop_bidi", "\u200fabc\u202c \u2068d\u2069", "abc d"),
        ("drop_control", "a\x00b\x07\x7f\x9fc\td\u0085e\ufffd", "abc\td\u0085e\ufffd"),
    ],
)
def test_unicode_rules(rule: str, line: str, expected: str) -> None:
    assert repair(line, (rule,)) == (expected, [rule] if line != expected else [])
    assert repair("plain text\x0c", tuple(UNICODE_RULES)) == ("plain text\x0c", [])


def test_hostile_marks_are_left_alone() -> None:
    """Python's NFC takes quadratic time in a character's marks: minutes for this line."""
    for line in ("a" + "\u0301\u0323" * 100_000, "x" * 2000 + "\u0301\u0323" * 100_000):
        assert repair(line, ("nfc",)) == (line, [])
    assert repair("e\u0301" * 600, ("nfc",)) == ("é" * 600, ["nfc"])


def test_the_page_names_all_filters() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \| (?:yes)? *\|$", page, flags=re.M))
    assert [name for name in rows if name in FILTERS] == list(FILTERS)
    for name in FILTERS:
        setting = next(iter(FILTERS[name].model_fields.values()))
        default = "required" if setting.is_required() else setting.default
        assert rows[name] == (default if isinstance(default, str) else f"{default:g}"), name
        in_preset = re.search(rf"^\| `{name}` \|.*\| yes \|$", page, flags=re.M) is not None
        assert in_preset == (name in PRESETS["web"]), name
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page, flags=re.M)) >= set(UNICODE_RULES)


CHUNK = 7


def _clean_pairs(
    *lines: tuple[bytes, bytes], segmented: bool = False, **config: object
) -> tuple[list[tuple[str, str]], Cleaner]:
    cleaner = Cleaner(CleaningConfig.model_validate(config), segmented)
    return cleaner.kept(lines, CHUNK), cleaner


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
    kept, cleaner = _clean_pairs((b"good", b"gut"), (source, target), (b"fine", b"fein"), max_length=5)
    assert kept == [("good", "gut"), ("fine", "fein")]
    assert +cleaner.removals.counts == {reason: 1}
    assert cleaner.read == 3


def test_unusual_but_valid_characters_are_kept() -> None:
    texts = ["naïve “quotes” – 日本語", "emoji 👩‍👩‍👧 stays", "soft\u00adhyphen", "e\u0301"]
    kept, cleaner = _clean_pairs(*((text.encode(), b"x") for text in texts))
    assert [source for source, _ in kept] == texts
    assert cleaner.removals.counts.total() == 0


def test_white_space_is_normalised_but_segmented_tokens_are_not_split() -> None:
    assert normalise_whitespace("a\u2028b") == "a b"
    text = "  10\u00a0000 \t a@@ b\u2028c "
    assert normalise_whitespace(text) == "10 000 a@@ b c"
    assert normalise_whitespace(text, segmented=True) == "10\u00a0000 a@@ b\u2028c"


def test_the_first_of_duplicates_is_kept_across_chunks() -> None:
    rng = np.random.default_rng(5)
    numbers = rng.integers(0, 60, 500).tolist()
    pairs = [(f"s {number}".encode(), f"t {number // 2}".encode()) for number in numbers]
    kept, cleaner = _clean_pairs(*pairs)
    assert kept == [(f"s {number}", f"t {number // 2}") for number in dict.fromkeys(numbers)]
    assert cleaner.removals.counts["duplicate"] == 500 - len(set(numbers))
    assert len(_clean_pairs(*pairs, keep_duplicates=True)[0]) == 500


def test_duplicates_are_recognised_after_normalisation_of_white_space() -> None:
    kept, _ = _clean_pairs((b"a  b", b"c"), (b"a b ", b"c"), (b"a b", b"d"), (b"a", b"b c"))
    assert kept == [("a b", "c"), ("a b", "d"), ("a", "b c")]


def test_identical_sides_are_removed_only_on_request() -> None:
    pairs = ((b"Berlin", b"Berlin "), (b"a", b"b"))
    assert len(_clean_pairs(*pairs)[0]) == 2
    kept, cleaner = _clean_pairs(*pairs, remove_identical=True)
    assert kept == [("a", "b")]
    assert +cleaner.removals.counts == {"identical": 1}


def test_lengths_in_tokens() -> None:
    removals, pairs = Removals(), [("a", "b")] * 8
    config = CleaningConfig(max_length=50, max_ratio=3.0, ratio_from=10)
    #            fits  limit too long  short   ratio   at ratio  short enough for any ratio
    lengths = [[20, 50, 51, 10, 0, 31, 30, 10], [21, 50, 50, 60, 9, 10, 10, 1]]
    assert fits(config, np.array(lengths), pairs, removals).tolist() == [True, True, *[False] * 4, True, True]
    assert removals.counts == {"too_long": 2, "too_short": 1, "ratio": 1}
    assert fits(config, np.zeros((2, 0), np.int64), [], removals).tolist() == []
    moses = CleaningConfig(max_ratio=1.5, ratio_from=1)  # that of Moses' clean-corpus-n
    lengths = [[1, 2, 3, 3, 4, 60], [1, 1, 2, 1, 3, 40]]
    assert fits(moses, np.array(lengths), pairs, removals).tolist() == [True, False, True, False, True, True]
