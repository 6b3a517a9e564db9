"""Signals that end a command."""

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed_nmt import cli
from deepspeed_nmt.commands import sample_data
from deepspeed_nmt.data.vocabulary_training import train_subwords
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_writer
from deepspeed_nmt.interruption import Interrupted, interruptible

ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_a_command_with_its_status_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: argparse.Namespace) -> int:
        with atomic_writer(arguments.out / "file", "w") as file:
            file.write("half")
            os.kill(os.getpid(), number)
            time.sleep(5)
        return 0

    before = [signal.getsignal(each) for each in ENDING]
    monkeypatch.setattr(sample_data, "run", run)
    assert cli.main(["sample-data", "--out", str(tmp_path)]) == 128 + number
    said = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    assert f"{said}; no incomplete file was left behind" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(each) for each in ENDING] == before


def test_a_repeated_signal_does_not_disturb_the_cleaning_up() -> None:
    cleaned = False
    with pytest.raises(Interrupted) as interrupted, interruptible():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            cleaned = True
    assert cleaned and interrupted.value.signal == signal.SIGTERM


def test_a_signal_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["import os, signal, time", "os.kill(os.getpid(), signal.SIGTERM)", "time.sleep(0.1)", "complete = True"]
    (tmp_path / "slow_module_of_a_test.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(Interrupted) as interrupted, interruptible():
        importlib.import_module("slow_module_of_a_test")
        time.sleep(5)
    assert sys.modules.pop("slow_module_of_a_test").complete and interrupted.value.signal == signal.SIGTERM


def test_a_signal_that_is_ignored_or_handled_is_left_alone() -> None:
    heard = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)  # as under nohup
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert heard == [1]


@pytest.mark.parametrize("moment", ["while it reads", "while it computes"])
def test_a_signal_during_sentencepiece_is_no_failure_of_its(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = tmp_path / "reached"
    if moment == "while it computes":  # for ever, as far as a user can tell
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\ncat >/dev/null\ntouch {reached}\nexec sleep 30\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    def signalled() -> None:
        while not reached.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def lines() -> Iterator[str]:
        for each in range(1000):
            if each == 500 and moment == "while it reads":
                reached.touch()
                time.sleep(20)
            yield f"line {each}"

    threading.Thread(target=signalled, daemon=True).start()
    began, before = time.monotonic(), psutil.Process().children()
    with pytest.raises(Interrupted) as interrupted, interruptible():
        train_subwords(lines(), 60)
    assert interrupted.value.signal == signal.SIGTERM and time.monotonic() - began < 10
    assert set(psutil.Process().children()) <= set(before)


def test_a_killed_sentencepiece_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may kill it when memory runs out."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(DataError, match="could not make a vocabulary of 60 tokens: killed by signal 9"):
        train_subwords((f"line {each}" for each in range(100_000)), 60)
