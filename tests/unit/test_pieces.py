"""Pieces of a translation on disk: cut without regard to ranks, and checked before they are used."""

from __future__ import annotations

import errno
import json
import os
from codecs import BOM_UTF8
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import open_text
from deepspeed_nmt.run.divided_text import Text, count_lines, lines_of_a_piece
from deepspeed_nmt.run.pieces import SOURCE, Pieces, Translated, TranslationJob
from deepspeed_nmt.search.source_lines import SourceCounts

TEXT = b"\xef\xbb\xbfone\r\ntwo\n\nBZh is no compression here\nfive"
OPTIONS = {"--beam": 4, "the source text": "abc"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A source text of five lines, the last without its end."""
    (tmp_path / "text").write_bytes(TEXT)
    return tmp_path / "text"


def prepared(text: Path, piece_lines: int = 2, **options: Any) -> tuple[Pieces, int]:
    """Return the pieces of a text, and the number of lines that are finished."""
    pieces = Pieces(text.with_name("out.pieces"), TranslationJob({**OPTIONS, **options}, 5, piece_lines))
    with open_text(text) as source:
        return pieces, pieces.prepare({SOURCE: Text(source, str(text))})


@pytest.mark.parametrize(
    ("lines", "max_tokens", "expected"),
    [
        (0, 4096, 512),
        (3000, 4096, 512),
        (100_000, 4096, 1563),
        (10**9, 4096, 4096),
        (3000, 65536, 8192),
        (9, 10**9, 16384),
        (9, 1, 1),
    ],
)
def test_pieces_fill_batches_and_are_bounded(lines: int, max_tokens: int, expected: int) -> None:
    assert lines_of_a_piece(lines, max_tokens) == expected


def test_lines_are_counted_as_they_are_read() -> None:
    plain = [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\n", 2), (b"\n\n\n\n", 4)]
    for content, lines in (*plain, (TEXT, 5), (BOM_UTF8, 0), (BOM_UTF8 + b"\n", 1)):
        stream: Any = BytesIO(content)
        assert count_lines(stream) == lines and stream.tell() == 0


def test_pieces_are_the_lines_of_the_text(text: Path) -> None:
    pieces, finished = prepared(text)
    assert (pieces.job.pieces, finished) == (3, 0) and [pieces.job.lines_of(piece) for piece in range(3)] == [2, 2, 1]
    with open_text(text) as source:
        read = [pieces.lines(SOURCE, Text(source, "text"), piece) for piece in (2, 0, 1)]
    assert read == [[b"five"], [b"one\r\n", b"two\n"], [b"\n", b"BZh is no compression here\n"]]


def test_finished_pieces_are_used_again(text: Path) -> None:
    pieces, _ = prepared(text)
    counts = SourceCounts(1, 7, 2, 1, [(5, 9, True)], [(5, 10)])
    pieces.write(2, Translated("fünf\n".encode()), counts)
    pieces.write(0, Translated(b"eins\nzwei\n"), SourceCounts(2))
    again, finished = prepared(text)
    assert finished == 3 and [again.has(piece) for piece in range(3)] == [True, False, True]
    assert again.read(2) == Translated("fünf\n".encode())
    found = again.counts(2)
    assert found is not None and (found.tokens, found.unknown, [tuple(each) for each in found.first_cut]) == (
        7,
        2,
        [(5, 9, True)],
    )
    again.remove()
    assert not again.path.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "emptied", "no header", "another job", "moved"])
def test_a_damaged_piece_is_translated_again(damage: str, text: Path, caplog: pytest.LogCaptureFixture) -> None:
    pieces, _ = prepared(text)
    pieces.write(0, Translated(b"eins\nzwei\n"), SourceCounts(2))
    pieces.write(1, Translated(b"\nvier\n"), SourceCounts(2))
    file, content = pieces.file(1), pieces.file(1).read_bytes()
    header = json.loads(content.partition(b"\n")[0])
    damaged = {
        "cut": content[:-1],
        "changed": content[:-2] + b"?\n",
        "emptied": b"",
        "no header": b"\x00\xff" * 50,
        "another job": json.dumps({**header, "job": "0" * 64}).encode() + b"\n\nvier\n",
        "moved": pieces.file(0).read_bytes(),
    }
    file.write_bytes(damaged[damage])
    again, finished = prepared(text)
    assert finished == 2 and again.has(0) and not again.has(1)
    assert f"{file} " in caplog.text and "translated again" in caplog.text


def test_a_piece_damaged_meanwhile_has_no_counts(text: Path) -> None:
    pieces, _ = prepared(text)
    pieces.write(0, Translated(b"eins\nzwei\n"), SourceCounts(2))
    pieces.file(0).write_bytes(b"{}\n")
    assert pieces.counts(0) is None and pieces.counts(1) is None and pieces.read(0) is None


def test_texts_beside_the_source_are_cut_alike(text: Path) -> None:
    beside = text.with_name("beside")
    beside.write_bytes(b"\xef\xbb\xbf1\n2\n3\n4\n5\n")

    def pieces_of() -> tuple[Pieces, int]:
        pieces = Pieces(text.with_name("out.pieces"), TranslationJob(OPTIONS, 5, 2, ("prefix",)))
        with open_text(text) as source, open_text(beside) as prefix:
            return pieces, pieces.prepare({SOURCE: Text(source, "text"), "prefix": Text(prefix, "beside")})

    pieces, _ = pieces_of()
    with open_text(beside) as stream:
        assert pieces.lines("prefix", Text(stream, "beside"), 1) == [b"3\n", b"4\n"]
        assert pieces.lines("prefix", Text(stream, "beside"), 0) == [b"1\n", b"2\n"]
    written = Translated(b"eins\nzwei\n", b"0-0\n\n")
    pieces.write(0, written, SourceCounts(2))
    pieces.write(1, written, SourceCounts(2))
    assert pieces_of()[1] == 4 and pieces.read(0) == written
    beside.write_bytes(b"1\n2\n3\n?\n5\n")
    again, finished = pieces_of()
    assert finished == 2 and again.has(0) and not again.has(1), "its prefixes have changed"


def test_a_directory_that_cannot_be_removed_is_named(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pieces, _ = prepared(text)

    def busy(self: Path) -> None:  # as on NFS, where removed files that are open stay as .nfs*
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", busy)
        pieces.remove()
    assert "out.pieces is no longer needed, but could not be removed (Directory not empty); remove it" in caplog.text
    (pieces.path / ".nfs0001").touch()
    assert prepared(text)[1] == 0


def test_another_translation_does_not_resume(text: Path) -> None:
    prepared(text)
    with pytest.raises(DataError, match=r"but --beam was 4 and is 5, the source text was another one; start with"):
        prepared(text, **{"--beam": 5, "the source text": "xyz"})
    with pytest.raises(DataError, match=r"but --new was None and is 'x'; .* or remove .*out.pieces to begin anew"):
        prepared(text, **{"--new": "x"})
    with pytest.raises(DataError, match="but lines of a piece was 2 and is 3"):
        prepared(text, 3)
    assert prepared(text)[1] == 0, "a refused start changes nothing"


def test_a_damaged_record_of_the_job_loses_nothing(text: Path, caplog: pytest.LogCaptureFixture) -> None:
    pieces, _ = prepared(text)
    pieces.write(0, Translated(b"eins\nzwei\n"), SourceCounts(2))
    (pieces.path / "job.json").write_bytes(b"\x00")
    (pieces.path / "index").write_bytes(b"\x00")
    assert prepared(text)[1] == 2 and "job.json is damaged" in caplog.text
    with pytest.raises(DataError, match="--beam was 4 and is 5"):
        prepared(text, **{"--beam": 5})


def test_files_of_others_are_not_touched(text: Path) -> None:
    directory = text.with_name("out.pieces")
    directory.write_text("mine")
    with pytest.raises(DataError, match=r"but .*out.pieces is in the way, which `translate` did not write"):
        prepared(text)
    directory.unlink()
    directory.mkdir()
    (directory / "thesis").write_text("mine")
    with pytest.raises(DataError, match="thesis is in the way"):
        prepared(text)
    assert (directory / "thesis").read_text() == "mine"


def test_a_text_that_changes_meanwhile_is_refused(text: Path) -> None:
    pieces, _ = prepared(text)
    text.write_bytes(TEXT.replace(b"five", b"5"))
    with open_text(text) as source:
        assert pieces.lines(SOURCE, Text(source, "text"), 0)
        with pytest.raises(DataError, match="text must not change while it is translated, but has"):
            pieces.lines(SOURCE, Text(source, "text"), 2)
