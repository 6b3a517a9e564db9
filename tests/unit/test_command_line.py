"""Words of a command line that no command takes."""

from __future__ import annotations

import pytest

from deepspeed_nmt.cli import main


@pytest.mark.parametrize(
    "word, message",
    [
        ("--data=\udcff", r"arguments must be UTF-8, but '--data=\udcff' is not; rename the file"),
        ("model.source_encoder=\udcff", r"arguments must be UTF-8"),
        ("--init-from=--", "argument --init-from: expected one argument"),
    ],
)
def test_words_that_are_refused(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--data", "none", "--run", "none", word])
    assert end.value.code == 2 and message in capsys.readouterr().err
