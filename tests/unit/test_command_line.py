"""Words of a command line that no command takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_nmt.cli import main

TEXT = [
    word for split in ("train", "valid") for side in ("source", "target") for word in (f"--{split}-{side}", "text")
]


@pytest.mark.parametrize(
    "word, message",
    [
        ("--data=\udcff", r"arguments must be UTF-8, but '--data=\udcff' is not; rename the file"),
        ("model.source_encoder=\udcff", r"arguments must be UTF-8"),
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
    [["report", "collapse", "loop", "other"], ["prepare", *TEXT, "--out", "loop"]],
    ids=lambda words: words[0],
)
def test_links_in_a_circle(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("text").write_text("a\n")
    assert main(words) in (1, 2)
    assert "error: " in capsys.readouterr().err
