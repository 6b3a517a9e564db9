"""Random text: lines of bytes, most of them UTF-8."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SPECIAL = [
    *(
        "",
        " ",
        "\t",
        "\0",
        "\x1b[31m",
        "\x7f",
        "\x85",
        "\u2028",
        "\u2029",
        "\r",
        "\x0b\x0c",
        "\x1c\x1d\x1e",
        "\ufeff",
    ),
    *(
        "\u200b",
        "\u200d",
        "\u202e",
        "\u3000",
        "\xa0",
        "\xad",
        "▁",
        "⁇",
        "<s>",
        "</s>",
        "<unk>",
        "<pad>",
        "[MASK]",
        "@@ ",
    ),
    *(
        "a@@",
        "@@",
        "e\u0301",
        "\u0301",
        "\u1112\u1161\u11ab",
        "ﬁ",
        "½ km²",
        "ＡＢＣ",
        "、。",
        "ß",
        "İ",
        "ǆ",
        "🏳️‍🌈",
        "👩‍👩‍👧",
        "\U0010ffff",
    ),
    *(
        "\ue000",
        "\U000f0000",
        "\ufffe",
        "\U000e0041",
        "नमस्ते",
        "שלום",
        "中文",
        "日本語",
        "한국어",
        "ไทย",
        "The dog sees a house.",
        "||| 0.5",
        "-",
    ),
]
BROKEN = [
    b"\xff",
    b"\xfe\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xed\xb0\x80",
    b"\xc0\x80",
    b"\xf5\x80\x80\x80",
    b"\x80",
    b"\x1f\x8b",
]
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


def pairs(longest: int = 2000, size: int = 12) -> SearchStrategy[list[tuple[bytes, bytes]]]:
    """Lines of two files of the same length. Lines may be empty, and those of a pair equal."""

    def of(parts: SearchStrategy[bytes]) -> SearchStrategy[list[tuple[bytes, bytes]]]:
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
