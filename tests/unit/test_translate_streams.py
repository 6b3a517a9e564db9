"""`translate` reads and writes files, pipes and standard streams; a model that reverses lines stands in for a run."""

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from deepspeed_nmt import api
from deepspeed_nmt.cli import main
from deepspeed_nmt.search.base import Translation

LINES = ["one two\n", "\n", "drei\n"]


class Reverser:
    """A translator that needs no run."""

    def stream(self, lines: Iterable[str], **options: object) -> Iterator[list[Translation]]:
        """Yield each line backwards."""
        self.options = options
        for line in lines:
            yield [Translation(line[::-1], 0.0, [])]


@pytest.fixture(autouse=True)
def _no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.Translator, "opened", lambda *_, **__: Reverser())


def translate(source: Path | str, target: Path | str) -> int:
    """Run the command."""
    return main(["translate", "--run", "run", "--input", str(source), "--output", str(target)])


@pytest.mark.timeout(20)
def test_a_coprocess_gets_its_lines_as_soon_as_they_are_translated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reverser = Reverser()
    monkeypatch.setattr(api.Translator, "opened", lambda *_, **__: reverser)
    source, target = tmp_path / "source", tmp_path / "target"
    os.mkfifo(source)
    os.mkfifo(target)
    words = ["translate", "--run", "run", "--input", str(source), "--output", str(target), "--buffer-lines", "2"]
    statuses: list[int] = []
    command = threading.Thread(target=lambda: statuses.append(main(words)), daemon=True)
    command.start()
    with source.open("w") as questions, target.open() as answers:
        for pair in ("ab", "cd"):
            questions.write(f"x{pair[0]}\nx{pair[1]}\n")
            questions.flush()
            assert [answers.readline() for _ in pair] == [f"{letter}x\n" for letter in pair]
        questions.write("last\n")
        questions.close()
        assert answers.read() == "tsal\n"
    command.join(10)
    assert statuses == [0] and reverser.options["buffer_lines"] == 2


def test_the_source_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_text("".join(LINES))
    (tmp_path / "folder").mkdir()
    (tmp_path / "symbolic").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    for other in (path, tmp_path / "folder/../text", tmp_path / "symbolic", tmp_path / "hard"):
        assert translate(path, other) == 2
        said = capsys.readouterr().err
        assert f"--output is {other}, the text of --input" in said
    with path.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert translate("-", path) == 2
    assert path.read_text() == "".join(LINES)
