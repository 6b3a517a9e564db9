"""Words of a command line, and names of files, that no command can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_nmt.cli import main

PREPARE = ["prepare"]
PREPARE += [f"--{split}-{side}=text" for split in ("train", "valid") for side in ("source", "target")]


@pytest.mark.parametrize(
    "word, message",
    [
        ("", "arguments must not be empty, but one is; is a variable of the shell unset?"),
        ("--init-from=", "arguments must not be empty"),
        ("--init-from=--", "argument --init-from: expected one argument"),
    ],
)
def test_words_that_are_refused(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--data", "none", "--run", "none", word])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["report", "collapse", "loop", "other"],
        [*PREPARE, "--out=loop"],
        [*PREPARE, "--out=new", "--tokenizer=\udcff"],
    ],
)
def test_strange_names_end_in_a_sentence(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("text").write_text("a\n")
    assert main(words) in (1, 2)
    assert "error: " in capsys.readouterr().err
