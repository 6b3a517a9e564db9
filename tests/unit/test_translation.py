"""Translation of a file in pieces: the same for any ranks, starts and stops, with the warnings of the whole text."""

import copy
import errno
import hashlib
import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from deepspeed_nmt.api import Translator
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, DataError, ReportedError
from deepspeed_nmt.files import exclusive
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.launched import RankPlace
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.run import opening, translation
from deepspeed_nmt.run.opening import Opened
from deepspeed_nmt.run.translation import (
    Pieces,
    open_texts,
    output_path,
    translate_in_pieces,
    translate_stream,
    written,
)
from deepspeed_nmt.search.beam import BeamConfig
from deepspeed_nmt.search.constrained import ConstrainedBeamConfig
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.text import DamagedLine, Tags, text_of
from tests.models import Letters

LONG, UNKNOWN = "abcdefghijkl", "?????"
LINES = [*("abc", "", "de", LONG, "fghi") * 4, LONG, *(UNKNOWN,) * 3, "end"]


@pytest.fixture(scope="module")
def translator() -> Translator:
    """A translator with random weights."""
    torch.manual_seed(5)
    sizes = {"dim": 16, "ffn_dim": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = build_transformer(TransformerConfig(**sizes, share_embeddings="none"), Vocabulary(30)).eval()
    search = BeamConfig(beam=2, max_length_ratio=1.0, max_length_extra=3)
    opened = Opened((), "best", "top", ("w",))
    return Translator(model, Letters(), search, torch.device("cpu"), opened=opened)  # type: ignore[arg-type]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A text of 25 lines."""
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in LINES))
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def _pieces_of_four_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translation, "_TOKENS_PER_LINE", 2)


def options_of(source: Path, **changes: Any) -> DecodeOptions:
    """Return options of two translations of each line."""
    files = {"input": str(source), "output": str(source.with_name("target"))}
    return DecodeOptions.of({**files, "max_tokens": 8, "max_source_tokens": 10, "nbest": 2, **changes})


def translate(translator: Translator, source: Path, **changes: Any) -> int:
    """Translate the text in pieces of four lines."""
    with open_texts(options_of(source, **changes)) as texts:
        return translate_in_pieces(translator, texts)


@pytest.fixture
def expected(translator: Translator, source: Path) -> str:
    """The translation at once."""
    assert translate(translator, source) == 0
    text = source.with_name("target").read_text()
    source.with_name("target").unlink()
    return text


@contextmanager
def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> Iterator[None]:
    """Raise an error when a number of batches has been translated."""
    before, advance = 0, SharedWork.advance

    def stop(self: SharedWork, count: int) -> None:
        nonlocal before
        before += 1
        if before == at:
            raise error
        advance(self, count)

    with monkeypatch.context() as patch:
        patch.setattr(SharedWork, "advance", stop)
        yield


def test_pieces_are_in_order_and_numbered_over_the_file(translator: Translator, expected: str) -> None:
    numbers = [int(line.split()[0]) for line in expected.splitlines()]
    assert sorted(set(numbers)) == list(range(len(LINES))) and numbers == sorted(numbers)
    at_once = list(translator.stream(LINES, max_tokens=8, buffer_lines=4, nbest=2, max_source_tokens=10))
    options = DecodeOptions(nbest=2)
    assert expected == "".join(written(options, number, best) for number, best in enumerate(at_once))


def test_a_stopped_translation_resumes(
    translator: Translator,
    source: Path,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    for at in (6, 5, 2):
        with interrupted(monkeypatch, at, Interrupted(signal.SIGUSR1)):
            assert translate(translator, source) == 75
        assert not source.with_name("target").exists()
    assert "1 of 7 pieces are finished" in caplog.text
    calls: list[int] = []
    stream = translator.stream
    monkeypatch.setattr(
        translator, "stream", lambda *a, **k: (calls.extend([k["first_line"]] if a[0] else []), stream(*a, **k))[1]
    )
    assert translate(translator, source) == 0
    assert source.with_name("target").read_text() == expected
    assert 0 < len(calls) < 7 and calls == sorted(calls), "finished pieces are not translated again"
    assert {path.name for path in source.parent.iterdir()} == {"source", "target"}


def test_a_full_disk_loses_nothing_that_was_translated(
    translator: Translator, source: Path, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    write, full = translation.atomic_write_bytes, OSError(errno.ENOSPC, "No space left on device")

    def fails(path: Path, data: bytes) -> None:
        if path.name == "piece-0000003":
            raise full
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(translation, "atomic_write_bytes", fails)
        with pytest.raises(OSError, match="No space left"):
            translate(translator, source)
    assert "3 of 7 pieces are finished, in " in caplog.text and "the same command resumes there" in caplog.text
    with monkeypatch.context() as patch:  # full again when the pieces are joined

        @contextmanager
        def joins(path: Path) -> Iterator[None]:
            raise full
            yield

        patch.setattr(translation, "atomic_writer", joins)
        with pytest.raises(OSError, match="No space left"):
            translate(translator, source)
    assert "7 of 7 pieces are finished" in caplog.text
    assert translate(translator, source) == 0 and source.with_name("target").read_text() == expected


def reseal(content: bytes) -> bytes:
    """Give the changed content of a piece its hash."""
    body = content.partition(b"\n")[2]
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@pytest.mark.parametrize(
    "damage",
    [
        lambda piece: re.sub(rb'"sizes": \[\d+', b'"sizes": [3', piece),  # other bytes of the texts
        lambda piece: reseal(re.sub(rb'"sizes": \[\d+', b'"sizes": [-3', piece)),
        lambda piece: reseal(re.sub(rb'"sizes": \[\d+', b'"sizes": [3', piece)),
        lambda piece: reseal(re.sub(rb'"sizes": \[', b'"sizes": [0, ', piece)),  # of another output
        lambda piece: b"",
    ],
)
def test_a_piece_damaged_between_two_starts(
    translator: Translator,
    source: Path,
    expected: str,
    damage: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
) -> None:
    with interrupted(monkeypatch, 14, Interrupted(signal.SIGTERM)):
        assert translate(translator, source) == 75
    piece = source.with_name("target.pieces") / "piece-0000001"
    assert reseal(piece.read_bytes()) == piece.read_bytes() != damage(piece.read_bytes())
    piece.write_bytes(damage(piece.read_bytes()))
    piece.with_name("job.json").write_bytes(b"{")
    assert translate(translator, source) == 0 and source.with_name("target").read_text() == expected
    assert "piece-0000001 is damaged; it is translated again" in caplog.text and "job.json is damaged" in caplog.text


def test_no_output_lies_in_a_run_or_replaces_a_text(tmp_path: Path, source: Path) -> None:
    inside = tmp_path / "own/checkpoints"
    inside.mkdir(parents=True)
    (tmp_path / "own" / "manifest.json.sha256").touch()
    (tmp_path / "link").symlink_to(inside)
    for place in (inside.parent, inside, tmp_path / "link"):
        with pytest.raises(ConfigError, match=r"--output: .* lies in .*/own, which other commands read"):
            output_path(str(place / "hyp"), "--output")
    assert output_path(str(tmp_path / "hyp"), "--output") == tmp_path / "hyp"
    for path, refusal in ((inside / "doubt", "lies in"), (source, "the text of --input")):
        with (
            pytest.raises(ConfigError, match=f"--reliance.* {refusal}"),
            open_texts(options_of(source, reliance=str(path))),
        ):
            pass


def test_warnings_are_those_of_the_whole_text(
    translator: Translator, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [b"b\xe9b" if number in (6, 7, 20) else line.encode() for number, line in enumerate(LINES)]
    source.write_bytes(b"\n".join(lines))
    list(translator.stream(map(text_of, lines), max_tokens=8, buffer_lines=4, max_source_tokens=10))
    at_once = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for message in ("line 7 of the source has bytes", "3 of 25 lines have bytes", "4 of 25 lines were cut"):
        assert sum(message in warning for warning in at_once) == 1
    assert len(at_once) == 5, "first and all: damaged, cut; unknown tokens"
    caplog.clear()
    assert translate(translator, source, nbest=1) == 0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == at_once
    with pytest.raises(DataError, match="line 7"):
        translate(translator, source, strict=True, max_source_tokens=100)


@pytest.mark.parametrize("name", ["prefix", "constraints"])
def test_damaged_lines_beside_the_source_are_named_and_refused(
    translator: Translator, source: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = copy.copy(translator)
    other.search = ConstrainedBeamConfig(beam=2, max_length_ratio=1.0, max_length_extra=3)
    beside = source.with_name("beside")
    beside.write_bytes(b"".join(b"b\t\xe9b\n" if number in (6, 7, 20) else b"\n" for number in range(len(LINES))))
    assert translate(other, source, **{name: str(beside)}) == 0
    warnings = [record.getMessage() for record in caplog.records]
    assert sum(f"line 7 of the {name} has bytes that are not UTF-8" in warning for warning in warnings) == 1
    assert "3 of 25 lines have bytes beside the source that are not UTF-8" in warnings
    monkeypatch.setattr(other, "stream", None)  # nothing is translated
    for start in (translate_in_pieces, translate_stream):
        options = options_of(source, strict=True, max_source_tokens=100, **{name: str(beside)})
        with pytest.raises(DataError, match=f"line 7 of the {name} is not UTF-8"), open_texts(options) as texts:
            start(other, texts)


def test_another_translation_does_not_resume(
    translator: Translator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "remove", lambda self: None)
        assert translate(translator, source) == 0
    rounded, wider = copy.copy(translator), copy.copy(translator)
    rounded._opened = Opened((), "best", "top", ("w",), "bf16")
    wider.search = translator.search.model_copy(update={"beam": 5})
    for other, changes, difference in (
        (rounded, {}, "--precision was 'fp32' and is 'bf16'"),
        (wider, {}, "--beam was 2 and is 5"),
        (translator, {"nbest": 1}, "--nbest was 2 and is 1"),
    ):
        with pytest.raises(DataError, match=difference):
            translate(other, source, **changes)
    source.write_text(source.read_text() + "more\n")
    with pytest.raises(DataError, match="the source text was another one"):
        translate(translator, source)


def test_what_the_search_refuses_leaves_nothing_behind(translator: Translator, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"nbest.* is 3, more than"):
        translate(translator, source, nbest=3)
    assert translate(translator, source, nbest=1) == 0
    assert {path.name for path in source.parent.iterdir()} == {"source", "target"}


def test_files_of_others_are_not_touched(translator: Translator, source: Path) -> None:
    directory = source.with_name("target.pieces")
    directory.mkdir()
    (directory / "diary").write_text("mine")
    with pytest.raises(DataError, match="diary is in the way"):
        translate(translator, source)
    assert (directory / "diary").read_text() == "mine"


def test_a_text_that_changes_meanwhile_is_refused(
    translator: Translator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Pieces.write

    def changes(self: Pieces, number: int, *content: Any) -> None:
        write(self, number, *content)
        source.write_text(source.read_text().upper())

    monkeypatch.setattr(Pieces, "write", changes)
    with pytest.raises(DataError, match="changed while it was translated"):
        translate(translator, source)
    assert not source.with_name("target").exists()


def in_ranks(monkeypatch: pytest.MonkeyPatch, ranks: int, work: Callable[[int], None]) -> None:
    """Run a function as several ranks, which are threads with a store."""
    store, mine = dist.HashStore(), threading.local()
    monkeypatch.setattr(SharedWork, "join", lambda place: SharedWork(place, store))
    monkeypatch.setattr(translation, "place", lambda: RankPlace(mine.rank, ranks, mine.rank))

    def run(rank: int) -> None:
        mine.rank = rank
        work(rank)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.timeout(20)
def test_any_number_of_ranks_writes_the_same(
    translator: Translator,
    source: Path,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    statuses: list[int] = []
    in_ranks(monkeypatch, 3, lambda rank: statuses.append(translate(translator, source)))
    assert statuses == [0] * 3 and source.with_name("target").read_text() == expected
    assert caplog.text.count("its end is not translated") == 1


@pytest.mark.timeout(20)
def test_rank_0_chooses_the_layer_that_aligns(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(opening, "alignment_layer", lambda run, model: chosen.append(len(chosen) + 1) or chosen[-1])
    monkeypatch.setattr(Pieces, "remove", lambda self: None)
    sizes = {"dim": 16, "ffn_dim": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}
    model = build_transformer(TransformerConfig(**sizes, share_embeddings="none"), Vocabulary(30)).eval()
    runs: Any = (None,)
    openeds = [Opened(runs, "best", "top", ("w",)) for _ in range(3)]
    search, tokenizer, cpu = BeamConfig(beam=2, max_length_extra=3), cast(Any, Letters()), torch.device("cpu")
    ranks = [Translator(copy.deepcopy(model), tokenizer, search, cpu, opened=opened) for opened in openeds]
    links = str(source.with_name("links"))
    with monkeypatch.context() as patch:
        in_ranks(patch, 2, lambda rank: translate(ranks[rank], source, alignment=links) and None)
    assert chosen == [1] and [opened.aligning for opened in openeds] == [{"top": [1]}, {"top": [1]}, {}]
    with pytest.raises(DataError, match="the layer of alignments was another one"):
        translate(ranks[2], source, alignment=links)


@pytest.mark.timeout(20)
def test_the_end_of_one_rank_ends_the_others(
    translator: Translator, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: dict[int, str] = {}
    claimed = threading.Event()

    def work(rank: int) -> None:
        try:
            ends[rank] = str(translate(translator, source))
        except (DataError, ReportedError) as error:
            ends[rank] = f"{type(error).__name__} {getattr(error, 'status', '')}"

    def fails(self: Any, piece: int) -> None:
        if self._work.place.rank == 1:
            claimed.set()
            raise DataError("damaged")
        claimed.wait(20)
        self._work.pause()
        self._work.pause()

    monkeypatch.setattr(Pieces, "_translate", fails)
    in_ranks(monkeypatch, 2, work)
    assert ends == {1: "DataError ", 0: "ReportedError 2"}


@pytest.mark.timeout(20)
def test_a_piece_of_a_silent_rank_is_taken_over(
    translator: Translator,
    source: Path,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = dist.HashStore()
    store.add("claimed/items", 1)  # another rank has the first piece, and is lost
    monkeypatch.setattr(SharedWork, "join", lambda place: SharedWork(RankPlace(0, 1, 0), store))
    monkeypatch.setattr(translation, "SILENT_S", 0.0)
    assert translate(translator, source) == 0 and source.with_name("target").read_text() == expected
    assert "piece 0 is taken over" in caplog.text


def test_a_tagged_line_that_is_not_utf8_stays_marked() -> None:
    whole, damaged = Tags(source="<2de>").tagged([text_of(b"the house"), text_of(b"the h\xffuse")])
    assert (whole, damaged) == ("<2de> the house", "<2de> the h\ufffduse")
    assert isinstance(damaged, DamagedLine) and not isinstance(whole, DamagedLine)


def test_two_translations_to_one_output(translator: Translator, source: Path) -> None:
    holds = exclusive(source.with_name(".target.translate.lock"), "")
    with (
        holds,
        pytest.raises(DataError, match=r"target is in use: process \d+ on "),
    ):
        translate(translator, source)


def test_a_piece_damaged_while_others_are_translated(
    translator: Translator, source: Path, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    write = Pieces.write

    def damaged(self: Pieces, piece: int, *content: Any) -> None:
        write(self, piece, *content)
        if piece == 2 and "is damaged" not in caplog.text:
            self.file(piece).write_bytes(b"{}")

    monkeypatch.setattr(Pieces, "write", damaged)
    assert translate(translator, source) == 0 and source.with_name("target").read_text() == expected
    assert "piece-0000002 is damaged; it is translated again" in caplog.text
