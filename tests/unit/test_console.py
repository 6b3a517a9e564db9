"""Standard streams that are closed, full, or not UTF-8, log files that cannot be written, and bare surroundings."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from deepspeed_nmt.console import log_to, logger, progress_bar, setup_logging
from tests.support import ROOT

CLOSED = """
import os, sys
from deepspeed_nmt.console import logger, set_up_streams, setup_logging
from deepspeed_nmt.errors import DataError
set_up_streams()
setup_logging()
with open(sys.argv[1], "w") as file:
    logger.info("for nobody")
    os.write(2, b"as a library does")
    file.write(f"{file.fileno()}\\n")
    for use in (sys.stdin.read, sys.stdin.buffer.read1, lambda: print("lost", flush=True)):
        try:
            use()
        except (OSError, DataError) as error:
            file.write(f"{error}\\n")
os._exit(0)
"""
FULL = "import sys; from deepspeed_nmt.cli import main; sys.exit(main(sys.argv[1:]))"


def shell(line: str, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell, in which $0 is Python and "$@" are words."""
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        check=False,
    )


def test_closed_streams_are_not_taken_for_files(tmp_path: Path) -> None:
    done = shell('"$0" -c "$@" <&- >&- 2>&-', CLOSED, tmp_path / "file")
    assert done.returncode == 0 and done.stdout + done.stderr == b""
    assert (tmp_path / "file").read_text() == (
        "3\n" + 2 * "standard input is closed; give a file, or `< FILE`\n" + "[Errno 9] Bad file descriptor\n"
    )


def test_a_closed_stdin_and_a_locale_without_utf_8_are_named(tmp_path: Path) -> None:
    text = tmp_path / "trän.en"
    text.write_text("a\n")
    score = ["score", "--hypothesis", "-", "--reference", text]
    done = shell('"$0" -m deepspeed_nmt "$@" <&-', *score)
    assert done.returncode == 2
    assert done.stderr.decode().endswith("error: standard input is closed; give a file, or `< FILE`\n")
    sides = [f"--{split}-{side}={text}" for split in ("train", "valid") for side in ("source", "target")]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = shell('"$0" -m deepspeed_nmt "$@"', "prepare", "--out", tmp_path / "data", *sides, **ascii_only)
    assert done.returncode == 2 and b"but the locale's encoding is ascii; set LC_ALL=C.UTF-8" in done.stderr


def test_stdout_that_is_full_is_reported_once(tmp_path: Path) -> None:
    counts = ["--train", "20", "--valid", "5", "--test", "5"]
    done = shell('"$0" -c "$@" > /dev/full', FULL, "sample-data", "--out", tmp_path / "text", *counts)
    assert done.returncode == 1
    assert done.stderr.count(b"No space left on device") == 1 and b"Exception" not in done.stderr


def test_a_log_file_that_cannot_be_written_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging()
    log_to(Path("/dev/full"))
    logger.info("one")
    logger.info("two")
    error = capsys.readouterr().err
    assert error.count("/dev/full could not be written (No space left on device)") == 1
    assert "one\n" in error and "two\n" in error and "Traceback" not in error


def test_a_terminal_whose_size_comes_late_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> str:
        bar.refresh()
        stream.write("$")
        stream.flush()
        text = ""
        while not text.endswith("$"):  # the kernel hands a text over in parts
            text += os.read(terminal, 4096).decode()
        return text.removesuffix("$").rpartition("\r")[2]

    def set_size(columns: int) -> None:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    terminal, side = pty.openpty()
    set_size(0)
    with os.fdopen(side, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        bar = progress_bar(total=9, initial=3, disable=None)
        assert "33%|" in drawn() and len(drawn()) > 60, "80 columns"
        set_size(40)
        assert len(drawn().rstrip()) <= 45
        bar.close()
    os.close(terminal)
