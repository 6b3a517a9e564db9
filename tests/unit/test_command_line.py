"""Words of a command line, and names of files, that no command can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_nmt.cli import main


@pytest.mark.parametrize(
    "word, message",
    [
        ("", "arguments must not be empty, but one is; is a variable of the shell unset?"),
        (
            "--init-from=--",
            "--init-from must have a value, but has none; one that begins with - is given as --init-from=VALUE",
        ),
    ],
)
def test_words_that_are_refused(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--data", "none", "--run", "none", word])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["translate", "--beam", "1e3"], "--beam is '1e3', which is no whole number (see `deepspeed-nmt trans"),
        (["translate", "--beam", "٣"], "--beam is '٣'"),
        (["translate", "--alpha", "x"], "--alpha is 'x', which is no finite number (see"),
        (["train", "--run", "r", "--optimizer.lr=1"],
         "unrecognized arguments: --optimizer.lr=1; a setting is given as section.key=value (see `deepspeed-nmt t"),
        (["report", "run", "r", "--run", "s"], "unrecognized arguments: --run s (see `deepspeed-nmt report run -"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_argument_is_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"error: {message}" in said and said.count("\n") == 1


TRANSLATE = ["translate", "--run", "none", "--input", __file__]


@pytest.mark.parametrize(
    "words, message",
    [
        ([*TRANSLATE, "--output", "/proc/x"], "--output: /proc/x cannot be written"),
        ([*TRANSLATE, "--output", "loop"], "--output: loop cannot be written"),
        ([*TRANSLATE, "--output", "o", "--alignment", "./o"], "--alignment and --output"),
        ([*TRANSLATE, "--output", "o", "--reliance", "./o"], "--reliance and --output"),
        ([*TRANSLATE, "--output", "o", "--alignment", "-", "--reliance", "-"], "--reliance and --alignment"),
        ([*TRANSLATE, "--output", "o", "--reliance", "/proc/x"], "--reliance: /proc/x cannot be written"),
        ([*TRANSLATE, "--output", "o", "--nbest", "0"], "--nbest"),
    ],
)
def test_options_are_checked_before_the_run_is_opened(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    assert main(words) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]
