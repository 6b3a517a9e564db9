"""`prepare`, from text files to a data directory, and its messages about bad input."""

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt import cli
from deepspeed_nmt.commands.prepare import report
from deepspeed_nmt.console import logger
from deepspeed_nmt.data import preparation as prepare_module
from deepspeed_nmt.data import stages
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.inputs import InputRecord, InputText
from deepspeed_nmt.errors import EXIT_USER_ERROR, DataError
from deepspeed_nmt.manifest import FileRecord, write_record
from deepspeed_nmt.text import TextForm
from tests.commands import prepare_with as _prepare

NOUNS = ("house", "river", "teacher", "apple", "window", "garden", "letter", "street")
ADJECTIVES = ("old", "new", "red", "small", "quiet", "open")
SOURCE = [f"the {a} {n} is near the {m}" for a in ADJECTIVES for n in NOUNS for m in NOUNS[:3]]
TARGET = [line.replace("the ", "der ").replace(" is near", " ist nah bei") for line in SOURCE]
VALID_SOURCE = b"the old house\r\n\nbad \xff bytes here\nthe new\xe2\x80\xa8river"
VALID_TARGET = "der old house\nleer\nunbekannt 猫\nder new river\n".encode()


@pytest.fixture(autouse=True)
def _logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)  # an earlier run of the command line turns it off


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Good files, as options."""
    content = {
        "train_source": "\n".join(SOURCE).encode() + b"\n",
        "train_target": "\n".join(TARGET).encode() + b"\n",
        "valid_source": VALID_SOURCE,
        "valid_target": VALID_TARGET,
    }
    options: dict[str, Any] = {"out": tmp_path / "data", "vocab_size": 120}
    for name, data in content.items():
        path = tmp_path / f"{name}.txt"
        path.write_bytes(data)
        options[name] = (path,)
    return options


def _arguments(options: dict[str, Any], *more: str) -> list[str]:
    words = ["prepare", "--out", str(options["out"]), "--vocab-size", str(options["vocab_size"])]
    for name in ("train_source", "train_target", "valid_source", "valid_target"):
        words += [f"--{name.replace('_', '-')}", *map(str, options[name])]
    return [*words, *more]


def recorded(files: Mapping[str, FileRecord]) -> dict[str, Any]:
    return {name: record.model_dump() for name, record in files.items()}


def _left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_text_files_to_data_directory(texts: dict[str, Any], tmp_path: Path) -> None:
    meta = _prepare(texts, test_source=texts["valid_source"], test_target=texts["valid_target"], workers=2)
    directory = DataDirectory.open(texts["out"])
    directory.verify_hashes()
    assert directory.meta == meta and _left_behind(tmp_path) == ["data"]
    assert re.search(rf"\ntest +{meta.splits['valid'].pairs} +copied\n", report(meta, texts["out"]))
    assert meta.vocabulary_size == 120
    assert meta.pairs_read == meta.splits["train"].pairs == len(SOURCE)

    tokenizer, corpus = directory.tokenizer(), directory.corpus("train")
    assert [tokenizer.decode(corpus.source(i)) for i in range(len(corpus))] == SOURCE
    assert [tokenizer.decode(corpus.target(i)) for i in range(len(corpus))] == TARGET

    # Raw text is copied byte for byte. Every line is encoded at its own number, even if it is damaged.
    for split in ("valid", "test"):
        assert directory.text(split, "source").read_bytes() == VALID_SOURCE
        assert directory.text(split, "target").read_bytes() == VALID_TARGET
    valid = directory.corpus("valid")
    assert len(valid) == 4 and valid.source_lengths[1] == 1
    assert [tokenizer.decode(valid.source(line)) for line in (0, 3)] == ["the old house", "the new river"]
    assert meta.splits["valid"].target.unknown > 0 == meta.splits["train"].target.unknown


def test_every_removal_is_counted(texts: dict[str, Any]) -> None:
    bad = [
        (b"bad \xff", b"x"), (b"x", b"\xc3("), (b"nul \x00", b"x"), (b"", b"x"), (b"the old", b""),
        (SOURCE[0].encode() + b"\r", TARGET[0].encode()), (b"long " * 41, b"x"),
        (b"the house " * 15, b"der river"),
    ]  # fmt: skip
    for name, side in (("train_source", 0), ("train_target", 1)):
        with texts[name][0].open("ab") as file:
            file.writelines(pair[side] + b"\n" for pair in bad)
    meta = _prepare(texts, cleaning={"max_length": 40})
    assert {reason: count for reason, count in meta.removed.items() if count} == {
        "undecodable": 2, "bad_character": 1, "empty": 2, "duplicate": 1, "too_long": 1, "ratio": 1,
    }  # fmt: skip
    assert meta.splits["train"].pairs == len(SOURCE)
    assert "more than 40 tokens" in report(meta, texts["out"])


@pytest.mark.parametrize("name", ["train_target", "valid_source", "test_target"])
def test_text_that_grows_while_it_is_read_is_refused(
    name: str, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts.update(test_source=texts["valid_source"], test_target=(tmp_path / "test.txt",))
    path, record = texts[name][0], InputText.record
    (tmp_path / "test.txt").write_bytes(VALID_TARGET)

    def then_grown(text: InputText) -> InputRecord:
        if text.name == str(path):
            with path.open("ab") as file:
                file.write(b"more\n")
        return record(text)

    monkeypatch.setattr(InputText, "record", then_grown)
    with pytest.raises(DataError, match=f"{path} changed while `prepare` read it"):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def test_unaligned_files_give_both_counts(texts: dict[str, Any], tmp_path: Path) -> None:
    good = texts["valid_source"][0].read_bytes()
    texts["train_target"][0].write_text("\n".join(TARGET[:-3]))
    texts["valid_source"][0].write_text("one\n")
    with pytest.raises(DataError, match=r"valid_source\.txt has 1 lines and .*valid_target\.txt has 4;"):
        _prepare(texts)
    texts["valid_source"][0].write_bytes(good)
    with pytest.raises(DataError, match=r"train_source\.txt has 144 lines and .*train_target\.txt has 141;"):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def test_references_must_be_utf8(texts: dict[str, Any], tmp_path: Path) -> None:
    (file,) = texts["valid_target"]
    good = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(good[0] + "ein großer Satz\n".encode("latin-1") + b"".join(good[2:]))
    with pytest.raises(DataError, match=rf"^line 2 of {re.escape(str(file))} is not UTF-8, .* `iconv -f LATIN1"):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def test_nothing_left_after_cleaning(texts: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"left after cleaning of 144 \(144: more than 2 tokens\)"):
        _prepare(texts, cleaning={"max_length": 2})
    texts["train_source"][0].write_bytes(b"")
    texts["train_target"][0].write_bytes(b"")
    with pytest.raises(DataError, match=r"cleaning of 0 \(the files are empty\)"):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def test_interrupted_run_leaves_nothing(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        assert any(".partial-" in name for name in _left_behind(tmp_path)), (
            "prepare must write to a temporary directory"
        )
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "copy_text", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def _killed(texts: dict[str, Any], at: str) -> None:
    """Replace the data directory in a process that is killed at a moment."""
    child = os.fork()
    if child == 0:
        rename, calls = Path.rename, []

        def die_at(path: Path, target: Path) -> Path:
            calls.append(path)
            if len(calls) == {"before": 1, "between": 2}[at]:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, target)

        Path.rename = die_at  # type: ignore[method-assign]
        _prepare(texts, vocab_size=110, overwrite=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("at", ["before", "between"])
def test_what_a_killed_process_left_is_cleared_away(
    at: str, texts: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meta = _prepare(texts)
    _killed(texts, at)
    assert len(_left_behind(tmp_path)) == 2 and texts["out"].exists() == (at == "before")
    with caplog.at_level(logging.INFO, logger=logger.name):
        assert _prepare(texts) == meta, "nothing to do: the old directory is whole"
    assert ("is restored: a killed process" in caplog.text) == (at == "between")
    assert _left_behind(tmp_path) == ["data"] and not list(tmp_path.glob(".*"))


def test_only_a_whole_directory_is_restored(texts: dict[str, Any], tmp_path: Path) -> None:
    _prepare(texts)
    texts["out"].rename(tmp_path / ".data.old-01234567")
    (tmp_path / ".data.old-01234567" / "valid.source").unlink()  # its removal had begun
    assert _prepare(texts, vocab_size=110).vocabulary_size == 110
    assert _left_behind(tmp_path) == ["data"]


def test_two_processes_do_not_write_one_directory(texts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    copy = prepare_module.copy_text

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(prepare_module, "copy_text", copy)
        with pytest.raises(DataError, match=rf"process {os.getpid()} on .* is writing"):
            _prepare(texts)
        return copy(*arguments)

    monkeypatch.setattr(prepare_module, "copy_text", meanwhile)
    _prepare(texts)
    DataDirectory.open(texts["out"]).verify_hashes()


def test_full_disk(texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepspeed_nmt.data.corpus._SideWriter.append", full)
    with pytest.raises(DataError, match=r"could not be written .*No space left on device.*as it was before"):
        _prepare(texts)
    assert _left_behind(tmp_path) == []


def test_preparing_again_does_nothing(
    texts: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first = _prepare(texts)
    before = (texts["out"] / "meta.json").stat().st_mtime_ns
    moved = tmp_path / "moved.txt"
    moved.write_bytes(texts["train_source"][0].read_bytes())
    with caplog.at_level(logging.INFO, logger=logger.name):
        assert _prepare(texts, train_source=(moved,), workers=2) == first
    assert "already prepared" in caplog.text
    assert (texts["out"] / "meta.json").stat().st_mtime_ns == before


def test_other_data_is_replaced_only_on_request(texts: dict[str, Any], tmp_path: Path) -> None:
    _prepare(texts)
    fingerprint = DataDirectory.open(texts["out"]).fingerprint
    texts["train_source"][0].write_text("\n".join(reversed(SOURCE)))
    with pytest.raises(DataError, match=r"differs in vocab_size, train.source text; give --overwrite"):
        _prepare(texts, vocab_size=110)
    assert DataDirectory.open(texts["out"]).fingerprint == fingerprint
    _prepare(texts, vocab_size=110, overwrite=True)
    directory = DataDirectory.open(texts["out"])
    assert directory.fingerprint != fingerprint
    assert directory.tokenizer().size == 110
    assert _left_behind(tmp_path) == ["data"]


def test_a_directory_with_other_files_is_never_replaced(texts: dict[str, Any]) -> None:
    texts["out"].mkdir()
    _prepare(texts)  # an empty directory is accepted
    (texts["out"] / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"--out .* has thesis.tex, which this program did not write"):
        _prepare(texts, overwrite=True)
    (texts["out"] / "meta.json").unlink()
    with pytest.raises(DataError, match=r"thesis.tex, train.*which this program did not write"):
        _prepare(texts, overwrite=True)
    assert (texts["out"] / "thesis.tex").read_text() == "years of work"
    foreign = texts["out"].parent / "foreign"
    foreign.mkdir()
    (foreign / "diary").write_text("mine")
    (foreign / "meta.json").write_text(json.dumps({"files": {"diary": FileRecord.of(b"mine").model_dump()}}))
    with pytest.raises(DataError, match=r"diary, meta.json.*the hash of .* is missing"):
        _prepare({**texts, "out": foreign}, overwrite=True)
    write_record(foreign / "meta.json", b'{"files": {"../diary": {"bytes": 4, "sha256": "' + b"0" * 64 + b'"}}}')
    with pytest.raises(DataError, match=r"diary, .*lists no files"):
        _prepare({**texts, "out": foreign}, overwrite=True)
    assert (foreign / "diary").read_text() == "mine"


def test_a_directory_that_holds_the_text_is_not_replaced(texts: dict[str, Any], tmp_path: Path) -> None:
    _prepare(texts)
    (tmp_path / "link").symlink_to(texts["out"] / "valid.source")
    inside = {"test_source": (tmp_path / "link",), "test_target": texts["valid_target"]}
    with pytest.raises(DataError, match=r"--out .* holds the text .*link"):
        _prepare(texts, **inside, overwrite=True)
    assert (texts["out"] / "valid.source").read_bytes() == VALID_SOURCE


def test_vocabulary_of_another_directory(texts: dict[str, Any], tmp_path: Path) -> None:
    _prepare(texts)
    texts["train_source"][0].write_text("\n".join(SOURCE[:50]))
    texts["train_target"][0].write_text("\n".join(TARGET[:50]))
    second = {**texts, "out": tmp_path / "second", "vocab_size": None, "vocab_from": texts["out"]}
    meta = _prepare(second)
    assert meta.vocabulary_size == 120
    assert meta.splits["train"].pairs == 50
    model = "vocabulary.model"
    assert (tmp_path / "second" / model).read_bytes() == (texts["out"] / model).read_bytes()
    with pytest.raises(DataError, match=r"--vocab-size is 500, but .* has 120 tokens"):
        _prepare(second, vocab_size=500)
    with pytest.raises(DataError, match="is for raw text; take another"):
        _prepare(second, segmented=True)


def test_several_files_are_read_in_order(texts: dict[str, Any], tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("a\nb")
    _prepare(
        texts,
        train_source=(*texts["train_source"], more),
        train_target=(*texts["train_target"], more),
        valid_source=(more, *texts["valid_source"]),
        valid_target=(more, *texts["valid_target"]),
    )
    directory = DataDirectory.open(texts["out"])
    assert len(directory.corpus("train")) == len(SOURCE) + 2
    assert directory.text("valid", "source").read_bytes() == b"a\nb\n" + VALID_SOURCE
    assert len(directory.corpus("valid")) == 6


def test_segmented_round_trip(texts: dict[str, Any]) -> None:
    for name, lines in (("train_source", SOURCE), ("train_target", TARGET)):
        texts[name][0].write_text("\n".join(line.replace("teacher", "teach@@ er") for line in lines) + "\n")
    meta = _prepare(texts, vocab_size=None, segmented=True)
    directory = DataDirectory.open(texts["out"])
    tokenizer, corpus = directory.tokenizer(), directory.corpus("train")
    assert meta.segmented
    assert [tokenizer.decode(corpus.source(i)) for i in range(len(corpus))] == SOURCE
    assert meta.splits["train"].source.tokens == sum(len(line.split()) + line.count("teacher") for line in SOURCE)
    assert meta.round_trips["train.source"].changed == 0, "joining loses nothing"
    assert meta.round_trips["valid.target"].examples == (("leer", "⁇"), ("unbekannt 猫", "⁇ ⁇"))


def test_lines_that_do_not_survive_encoding_are_counted_and_shown(
    texts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [line.replace("old", "½  km²") for line in SOURCE]
    texts["train_source"][0].write_text("\n".join(changed) + "\n")
    share = sum("old" in line for line in SOURCE)
    meta = _prepare(texts, normalization="nfkc")
    tried = meta.round_trips["train.source"]
    assert (tried.lines, tried.changed) == (len(SOURCE), share)
    assert tried.examples[0] == (changed[0].replace("  ", " "), changed[0].replace("½  km²", "1⁄2 km2"))
    assert len(tried.examples) == 3
    assert meta.round_trips["train.target"].changed == 0 and meta.round_trips["valid.target"].changed == 1
    assert "  target  unbekannt 猫 -> unbekannt ⁇" in report(meta, texts["out"])
    for form in (None, "none"):  # by default, a model can write what it has read
        kept = _prepare(texts, normalization=form, overwrite=True)
        assert kept.round_trips["train.source"].changed == 0
    monkeypatch.setattr(stages, "SAMPLE_LINES", 50)
    sampled = _prepare(texts, normalization="nfkc", overwrite=True).round_trips["train.source"]
    assert sampled.lines == len(SOURCE) // 3 and 0 < sampled.changed < share


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pairs_read", 10**400), ("pairs_read", "120"), ("vocabulary_size", None), ("splits", []),
        ("files", {"../x": {"bytes": 1, "sha256": "0" * 64}}),
        ("files", {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}),
    ],
)  # fmt: skip
def test_a_record_of_wrong_content_is_named(texts: dict[str, Any], key: str, value: object) -> None:
    texts["out"].mkdir()
    meta: dict[str, Any] = {"format": 1, "version": "1", "segmented": False}
    meta |= dict.fromkeys(("vocabulary_size", "source_vocabulary_size", "pairs_read"), 9)
    for name in ("options", "inputs", "text", "tags", "removed", "removed_examples", "repaired"):
        meta[name] = {}
    meta |= {"splits": {}, "round_trips": {}, "files": {}}
    write_record(texts["out"] / "meta.json", json.dumps(meta).encode())
    assert DataDirectory.open(texts["out"]).meta.pairs_read == 9
    write_record(texts["out"] / "meta.json", json.dumps(meta | {key: value}).encode())
    with pytest.raises(DataError, match=rf"meta.json.* {key}"):
        DataDirectory.open(texts["out"])


def test_changed_data_is_detected(texts: dict[str, Any]) -> None:
    out = texts["out"]
    with pytest.raises(DataError, match="does not exist; run `prepare"):
        DataDirectory.open(out)
    meta = _prepare(texts)
    tokens = out / "train.target.uint16.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(DataError, match=r"train\.target\.uint16\.bin has other content than was written"):
        DataDirectory.open(out).verify_hashes()
    with pytest.raises(DataError, match=r"train\.target\.uint16\.bin has other content than was written"):
        _prepare(texts)
    with pytest.raises(DataError, match=r"has train\.target\.uint16\.bin, which .* was changed"):
        _prepare(texts, overwrite=True)
    tokens.write_bytes(content[:-2])
    (out / "valid.source").unlink()
    with pytest.raises(DataError, match=r"target\.uint16\.bin has \d+ bytes instead of \d+; valid.source is missing"):
        DataDirectory.open(out)
    shutil.rmtree(out)
    assert _prepare(texts) == meta

    record = json.loads((out / "meta.json").read_text())
    (out / "meta.json").write_text(json.dumps({**record, "format": 99}))
    for again in (lambda: DataDirectory.open(out), lambda: _prepare(texts, overwrite=True)):
        with pytest.raises(DataError, match="does not match its hash"):
            again()
    write_record(out / "meta.json", json.dumps({"format": 99, "files": record["files"]}).encode())
    with pytest.raises(DataError, match=r"format .*99.*run `prepare` again"):
        _prepare(texts)
    assert _prepare(texts, overwrite=True) == meta, "its files are those of its record"


def test_a_pipe_in_place_of_a_file_is_refused_at_once(texts: dict[str, Any]) -> None:
    _prepare(texts)
    for path in sorted(texts["out"].iterdir()):
        path.rename(aside := texts["out"].parent / "aside")
        os.mkfifo(path)
        with pytest.raises(DataError, match=re.escape(path.name)):
            DataDirectory.open(texts["out"]).verify_hashes()
        with pytest.raises(DataError, match=re.escape(path.name)):
            _prepare(texts, overwrite=True)
        path.unlink()
        aside.rename(path)
    DataDirectory.open(texts["out"]).verify_hashes()


def test_the_form_of_the_text_is_recorded(texts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert _prepare(texts).text == TextForm(form="raw")
    before = DataDirectory.open(texts["out"])
    assert "text" not in before.meta.options
    moses = {"text": "moses", "source_lang": "en", "target_lang": "de"}
    with pytest.raises(DataError, match=r"differs in text; give --overwrite"):
        _prepare(texts, **moses)
    assert _prepare(texts, **moses, overwrite=True).text == TextForm(form="moses", source_lang="en", target_lang="de")
    after = DataDirectory.open(texts["out"])
    assert after.fingerprint == before.fingerprint, "runs accept the directory with its form recorded"
    assert after.text_form.form == "moses"
    assert cli.main(_arguments(texts, "--text", "moses")) == EXIT_USER_ERROR
    assert "give --target-lang" in capsys.readouterr().err
    target = texts["valid_target"][0]
    target.write_bytes(b"das Haus .\nder Fluss .\nein Hut\nder Mann\n")
    _prepare(texts, overwrite=True)
    assert "valid.target: 2 of 4 lines end in ' .' and look tokenised" in capsys.readouterr().err
    _prepare(texts, overwrite=True, **moses)
    assert "look tokenised" not in capsys.readouterr().err


def test_an_interrupt_between_the_renames_changes_nothing(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = _prepare(texts)
    rename = Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _prepare(texts, vocab_size=110, overwrite=True)
    assert _left_behind(tmp_path) == ["data"] and DataDirectory.open(texts["out"]).meta == meta
