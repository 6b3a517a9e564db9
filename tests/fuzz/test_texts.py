"""No text loses a line, and all output is UTF-8."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from deepspeed_nmt.data.data_directory import DataDirectory
from tests.fuzz.conftest import Explore
from tests.fuzz.program import run_program

# fmt: off
SPECIAL = [
    "", " ", "\t", "\0", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029", "\r", "\x0b\x0c", "\x1c\x1d\x1e",
    "\ufeff", "\u200b", "\u200d", "\u202e", "\u3000", "\xa0", "\xad", "▁", "⁇", "<s>", "</s>", "<unk>",
    "<pad>", "[MASK]", "@@ ", "a@@", "@@", "e\u0301", "\u0301", "\u1112\u1161\u11ab", "ﬁ", "½ km²",
    "ＡＢＣ", "、。", "ß", "İ", "ǆ", "🏳️‍🌈", "👩‍👩‍👧", "\U0010ffff", "\ue000", "\U000f0000", "\ufffe",
    "\U000e0041", "नमस्ते", "שלום", "中文", "日本語", "한국어", "ไทย", "The dog sees a house.", "||| 0.5",
    "-",
]
BROKEN = [
    b"\xff", b"\xfe\xff", b"\xc3", b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"\x80",
    b"\x1f\x8b",
]
# fmt: on
Ends = tuple[bytes, bool, bytes]
Pairs = list[tuple[bytes, bytes]]
SOUND: SearchStrategy[bytes] = st.one_of(
    st.sampled_from(SPECIAL),
    st.text(max_size=9),
    st.text(st.characters(categories=["Mn", "Mc", "Me", "Cf", "Cc", "Co", "Zs"]), max_size=6),
).map(str.encode)
"""Parts of lines of UTF-8."""
ANY: SearchStrategy[bytes] = st.one_of(
    SOUND,
    st.text(st.characters(categories=["Cs"]), max_size=2).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from(BROKEN),
    st.binary(max_size=6),
)
"""Parts of lines of bytes."""


@st.composite
def lines(draw: st.DrawFn, parts: SearchStrategy[bytes], longest: int) -> bytes:
    """A line of text without its end."""
    line = draw(st.sampled_from([b"", b" "])).join(draw(st.lists(parts, max_size=6)))
    if draw(st.integers(0, 15)) == 0:
        line = (line or b"a") * draw(st.integers(1, 200))
    return line[:longest].replace(b"\n", b"")


def pairs(longest: int = 2000, size: int = 12) -> SearchStrategy[Pairs]:
    """Lines of two files of the same length. Lines may be empty, and those of a pair equal."""

    def of(parts: SearchStrategy[bytes]) -> SearchStrategy[Pairs]:
        line = lines(parts, longest)
        return st.lists(st.tuples(line, line) | line.map(lambda both: (both, both)), max_size=size)

    return of(SOUND) | of(ANY)


ENDS = st.tuples(
    st.sampled_from([b"\n", b"\n", b"\r\n"]), st.booleans(), st.sampled_from([b"", b"", b"\xef\xbb\xbf"])
)
"""The end of a line, if the last line has one, and a byte order mark or none."""


def joined(content: list[bytes], ends: tuple[bytes, bool, bytes]) -> bytes:
    """The content of a file."""
    end, last, mark = ends
    return mark + end.join(content) + (end if last and content else b"")


def count(content: bytes) -> int:
    """Number of lines of a file. Line feeds end them; a byte order mark is no text."""
    content = content.removeprefix(b"\xef\xbb\xbf")
    return content.count(b"\n") + (content != b"" and not content.endswith(b"\n"))


def clear(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def check_prepare(tiny: Path, place: Path, content: Any, ends: Ends, options: str, piped: bool) -> None:
    """Prepare text, and compare the counts with those of the lines."""
    clear(place)
    train, valid, test = content
    words = ["prepare", "--out", "data", *options.format(tiny / "data").split()]
    for split, content in (("train", train), ("valid", valid), ("test", test)):
        for side, name in enumerate(("source", "target")):
            (place / f"{split}.{name}").write_bytes(joined([pair[side] for pair in content], ends))
            words += [f"--{split}-{name}", f"{split}.{name}"]
    # Sound text first, so that a vocabulary can be made.
    for name, ending in (("source", "en"), ("target", "de")):
        shutil.copy(tiny / "text" / f"train.{ending}", place / f"sound.{name}")
        words.insert(words.index(f"--train-{name}") + 1, f"sound.{name}")
    outcome = run_program(words, place, ["data"])
    read = 200 + max(count((place / f"train.{name}").read_bytes()) for name in ("source", "target"))
    if outcome.status == 0:
        meta = DataDirectory.open(place / "data").meta
        assert meta.pairs_read == read
        assert meta.splits["train"].pairs + sum(meta.removed.values()) == read
        for split in ("valid", "test"):
            for name in ("source", "target"):
                text = (place / f"{split}.{name}").read_bytes().removeprefix(b"\xef\xbb\xbf")
                assert (place / f"data/{split}.{name}").read_bytes() == text
        assert meta.splits["valid"].pairs == count((place / "valid.source").read_bytes())
    else:
        assert not (place / "data").exists()


def check_translation(tiny: Path, place: Path, content: list[bytes], ends: Ends, options: str, piped: bool) -> None:
    """Translate text, and compare the number of lines."""
    clear(place)
    text = joined(content, ends)
    (place / "in").write_bytes(text)
    names = ["--input", "-", "--output", "-"] if piped else ["--input", "in", "--output", "out"]
    words = ["translate", "--run", str(tiny / "run"), *names, *options.split()]
    outcome = run_program(words, place, ["out"], text, repr(text))
    if outcome.status != 0:
        return
    output = outcome.out if piped else (place / "out").read_bytes()
    lines = output.decode().split("\n")
    assert lines.pop() == ""
    if "--nbest" in options:
        numbers = [int(line.split(" ||| ")[0]) for line in lines]
        assert sorted(set(numbers)) == list(range(count(text))) and numbers == sorted(numbers)
    else:
        assert len(lines) == count(text), repr(text)
        assert not any(new for old, new in zip(content, lines, strict=False) if not old), repr(text)


OPTIONS = {
    "prepare": [
        *["--vocab-from {}"] * 2,
        "--vocab-size 400",
        "--segmented",
        "--normalization nfc --vocab-size 400",
        "--vocab-from {} --filters web,script=Latin/Latin --unicode nfc,drop_control,drop_zero_width,drop_bidi",
    ],
    "translate": ["", "", "--nbest 2", "--max-tokens 9", "--exit 1-1", "--beam 1"],
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_texts(kind: str, tiny: Path, place: Path, explore: Explore) -> None:
    options = st.sampled_from(OPTIONS[kind])
    content, check, number = {
        "prepare": (st.tuples(pairs(), pairs(), pairs()), check_prepare, 8),
        "translate": (pairs().map(lambda lines: [line for line, _ in lines]), check_translation, 15),
    }[kind]
    examples = st.tuples(content, ENDS, options, st.booleans())
    explore(lambda case: check(tiny, place, *case), examples, number, 180.0)
