"""Reading of fairseq's checkpoints, dictionaries and binarised text.

The fixtures were written by fairseq 0.12.2 (post, pre) and 0.10.2 (old): tests/fixtures/fairseq/make.py.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.data.fairseq_binarised import BinarisedText
from deepspeed_nmt.data.fairseq_dictionary import read_dictionary
from deepspeed_nmt.data.fairseq_tokenizer import FairseqTokenizer
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.run.fairseq_checkpoint import read_checkpoint
from tests.fairseq_fixtures import FIXTURES, text_of, words


def saved(state: Any, path: Path, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


def changed(path: Path, change: Callable[[dict[str, Any]], None], kind: str = "post") -> Path:
    """Write the checkpoint of a fixture with a change."""
    state = torch.load(FIXTURES / kind / "checkpoint.pt", weights_only=False)
    change(state)
    return saved(state, path)


class Malicious:
    """An object whose pickle creates a directory when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Evil(argparse.Namespace):
    """A class that is not allowed, although it is derived from one that is."""


@pytest.mark.parametrize("zipped", [True, False])
def test_a_checkpoint_that_would_run_code_is_refused(zipped: bool, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for place in ("args", "model", "extra_state"):
        state = {"args": argparse.Namespace(), "model": {}, "extra_state": {}, place: {"x": Malicious(made)}}
        path = saved(state, tmp_path / "model.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(ConfigError, match=r"has posix.mkdir, which is not created.* could run code") as caught:
            read_checkpoint(path)
        assert not made.exists() and "\n" not in str(caught.value)
    torch.load(path, weights_only=False)
    assert made.exists(), "the checkpoint runs code if it is read in another way"


def test_objects_of_other_classes_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "model.pt", lambda state: state.update(args=Evil(), cfg=None))
    with pytest.raises(ConfigError, match=r"has .*Evil, which is not created"):
        read_checkpoint(path)
    # The name is enough: such classes need not be installed.
    content = pickle.dumps({"cfg": Evil(), "model": {}}, protocol=2).replace(
        Evil.__module__.encode(), b"omegaconf.dictconfig"
    )
    content = content.replace(b"Evil", b"DictConfig")
    stream = io.BytesIO()
    torch.save({}, stream, _use_new_zipfile_serialization=False)
    empty = pickle.dumps({}, protocol=2)
    assert stream.getvalue().count(empty) == 1
    (tmp_path / "model.pt").write_bytes(stream.getvalue().replace(empty, content))
    with pytest.raises(ConfigError, match=r"has omegaconf.dictconfig.DictConfig, .*; write a copy where fairseq is"):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_files_that_are_no_checkpoints_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(path)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="must be a checkpoint of fairseq, but"):
        read_checkpoint(path)
    for state in ([1], {"model": {"a": 1}}, {"model": {}}, {"model": {}, "cfg": {"model": None}}):
        with pytest.raises(ConfigError, match=r"has no weights|has none; give a checkpoint that fairseq-train"):
            read_checkpoint(saved(state, path))


@pytest.mark.parametrize("core", [b"numpy._core", b"numpy.core"])
def test_arrays_of_either_numpy_are_read(core: bytes, tmp_path: Path) -> None:
    """`--eval-bleu` saves counts as arrays; their module has another name in numpy 1."""
    state = {"args": argparse.Namespace(a=1), "model": {}, "extra_state": [np.arange(3), np.float64(2.5)]}
    path = saved(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    here = b"numpy._core" if b"numpy._core" in content else b"numpy.core"
    path.write_bytes(content.replace(here, core))
    assert read_checkpoint(path).options == {"a": 1}


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_binarised_text_is_the_text(kind: str) -> None:
    directory = FIXTURES / kind / "data-bin"
    for split, lines in (("train", 20), ("valid", 5)):
        for lang in ("en", "de"):
            symbols = read_dictionary(directory / f"dict.{lang}.txt")
            text = BinarisedText.open(directory / f"{split}.en-de.{lang}", len(symbols))
            assert text.lines == lines
            found = [" ".join(symbols[token] for token in row) for row in text.rows()]
            wanted = text_of(kind, f"{split}.{lang}")
            assert found[:-1] == wanted[:-1]
            assert found[-1] == wanted[-1].replace("unseenword", "<unk>") != wanted[-1]


def binarise(path: Path, rows: list[list[int]], code: int = 4, dtype: Any = np.int32) -> None:
    """Write binarised text, as fairseq's documentation of the format has it."""
    flat = np.concatenate([np.array(row, dtype) for row in rows]) if rows else np.zeros(0, dtype)
    sizes = np.array([len(row) for row in rows], np.int32)
    places = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64)[: len(rows)] * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + np.array([1], np.int64).tobytes() + bytes([code])
    head += np.array([len(rows)], np.int64).tobytes()
    path.with_name(f"{path.name}.bin").write_bytes(flat.tobytes())
    path.with_name(f"{path.name}.idx").write_bytes(head + sizes.tobytes() + places.tobytes())


@pytest.mark.parametrize(("code", "dtype"), [(4, np.int32), (5, np.int64), (8, np.uint16), (1, np.uint8)])
def test_all_types_of_tokens_are_read(code: int, dtype: Any, tmp_path: Path) -> None:
    lines = 20_000 if code == 8 else 9  # more than are read at once
    rows = [[number % 200 + 4, 5, 2][number % 2 :] for number in range(lines)] + [[2]]
    binarise(tmp_path / "text", rows, code, dtype)
    assert list(BinarisedText.open(tmp_path / "text", 300).rows()) == [row[:-1] for row in rows]
    binarise(tmp_path / "text", [], code, dtype)
    assert list(BinarisedText.open(tmp_path / "text", 300).rows()) == []


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("idx", lambda content: b"TNTIDX\x00\x00" + content[8:], "must be of the format mmap"),
        ("idx", lambda content: b"x" + content, "must be an index of binarised text"),
        ("idx", lambda content: content[:-1], "its length is not that of its lines"),
        ("idx", lambda content: content[:9] + b"\x02" + content[10:], "it has version 2"),
        ("idx", lambda content: content[:17] + b"\x07" + content[18:], "and type 7"),
        ("bin", lambda content: content[:-1], "no multiple of its tokens"),
        ("bin", lambda content: content[:-4], "is outside of the file"),
        ("bin", lambda content: b"\xff\x00" + content[2:], "must have numbers below 9,"),
        ("bin", lambda content: b"\xff" * 4 + content[4:], "must have numbers below 9,"),
    ],
)
def test_damaged_binarised_text_is_refused(
    name: str, change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    binarise(tmp_path / "text", [[4, 8, 2], [5, 2]])
    path = tmp_path / f"text.{name}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        list(BinarisedText.open(tmp_path / "text", 9).rows())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 3\nb\n", "line 2 of .* must be a symbol and its count, but is 'b'"),
        (b"a 3\na 1\n", "line 2 of .* must have a new symbol, but repeats 'a'"),
        (b"<s> 3\n", "must have a new symbol, but repeats '<s>'"),
        (b"<unk> 3 #fairseq:overwrite\n", "which is not supported"),
        (b"\xff 3\n", "in UTF-8, but is not"),
        (None, "cannot be read"),
    ],
)
def test_damaged_dictionaries_are_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_dictionary(tmp_path / "dict.txt")


def test_a_tokenizer_reads_as_fairseq() -> None:
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "the@@", "m", "dog", "madeupword0000"]
    tokenizer = FairseqTokenizer((symbols, symbols))
    assert tokenizer.encode(" the@@ m\tdog cat <unk> </s> ") == [4, 5, 6, 3, 3, 3]
    assert tokenizer.decode([4, 5, 6, 3, 2, 0, 1]) == "them dog ⁇"
    assert tokenizer.reference("the@@ m dog") == "them dog" and tokenizer.segmented
    other = FairseqTokenizer((symbols, [*symbols, "a"]))
    assert other.vocabulary.source.size == 8 and other.size == 9 and other.digest != tokenizer.digest
    pieces = FairseqTokenizer(([*symbols[:4], "\u2581a", "\u2581b", "c"],) * 2)
    assert pieces.decode([4, 6, 5]) == "ac b" == pieces.reference("\u2581a c \u2581b")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--run", "R"], "--from and --run belong together"),
        ([], "--run or --out is required"),
        (["--out", "D", "--source-lang", "fr"], "--source-lang and --target-lang must be given"),
        (["--out", "D", "--source-lang", "fr", "--target-lang", "de"], "dict.fr.txt must be a dictionary of fairseq"),
    ],
)
def test_wrong_command_lines_are_refused(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words("post", *more)) == 2
    assert message in capsys.readouterr().err and list(tmp_path.iterdir()) == []
