"""Every command line ends with a documented status, and changes only what it names."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deepspeed_nmt.commands import doctor, selftest
from tests.fuzz.exploring import explore, explore_for
from tests.fuzz.lines import lines
from tests.fuzz.program import run_program

SMALL = [
    *(
        "model={name: transformer, dim: 8, ffn_dim: 8, heads: 1, encoder_layers: 1, decoder_layers: 1}",
        "layer={name: standard}",
    ),
    *("training.max_updates=1", "engine.device=cpu", "validation.max_sentences=2", "search={}"),
]
"""Settings that end every training after an update."""


def check_line(tiny: Path, place: Path, line: list[str]) -> None:
    """Run a command line in a directory that has data, a run, text, and files of all kinds."""
    furnish(tiny, place)
    last = SMALL if line[:1] == ["train"] else []
    values = {part for word in line for part in (word, word.partition("=")[2])}
    may_change = [value for value in values if value and "\0" not in value]
    may_change += [f"{kind}.png" for kind in ("collapse", "depths", "runs", "sweep")]
    may_change = [value if value != "loop" and value != "dangling" else "linked" for value in may_change]
    with _fed(place / "pipe", (tiny / "text/valid.en").read_bytes()):
        run_program([*line, *last], place, may_change, b"The dog sees a house.\n\n", "")


def furnish(tiny: Path, place: Path) -> None:
    """Fill a directory anew."""
    shutil.rmtree(place)
    shutil.copytree(tiny, place, symlinks=True)
    (place / "empty").mkdir()
    (place / "empty-file").touch()
    (place / "noise").write_bytes(bytes(range(256)) * 9)
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("linked")
    os.mkfifo(place / "pipe")


@contextmanager
def _fed(pipe: Path, content: bytes) -> Iterator[None]:
    """Write to a pipe once if the block opens it."""
    done = threading.Event()

    def feed() -> None:
        while not done.wait(0.002):
            try:
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads
                continue
            with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            return

    thread = threading.Thread(target=feed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.fixture(autouse=True)
def _no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`selftest` and `doctor` check their options, and start nothing."""
    monkeypatch.setattr(doctor, "_examine", lambda arguments: 0)
    monkeypatch.setattr(selftest, "_start", lambda arguments: 0)


def test_command_lines(tiny: Path, place: Path) -> None:
    explore(lambda line: check_line(tiny, place, line), lines(), 60)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_command_lines_for_thirteen_minutes(
    tiny: Path, place: Path, record_property: Callable[[str, object], None]
) -> None:
    done = explore_for(780.0, lambda line: check_line(tiny, place, line), lines())
    record_property("tried", f"{done} command lines")
