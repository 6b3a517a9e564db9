"""Signals that end a command, and requests to stop a run."""

import argparse
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from deepspeed_nmt import cli
from deepspeed_nmt.commands import sample_data
from deepspeed_nmt.data.vocabulary_training import train_subwords
from deepspeed_nmt.files import atomic_writer
from deepspeed_nmt.interruption import Interrupted, interruptible
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train import loop
from deepspeed_nmt.train.signals import STATUS_FILE, STOP_FILE, StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def test_signals_in_quick_succession_are_one_request(capfd: pytest.CaptureFixture[str]) -> None:
    """A launcher forwards Ctrl-C as SIGTERM, so one request may arrive as several signals, even during the exit."""
    with StopRequest() as stop:
        assert not stop
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert stop and stop.signal_name == "SIGINT"
        stop.agree()
    send(signal.SIGUSR1)
    assert capfd.readouterr().err == "finishing this update, then saving; interrupt again to stop at once\n"


def test_a_signal_after_the_agreement_to_stop_is_not_a_second_request() -> None:
    """A preemption signals one rank after another, and ranks may agree to stop between the first and the last."""
    with StopRequest() as stop:
        stop.agree()
        send(signal.SIGTERM)  # would end this process, and with it the tests
        assert stop.signal_name == "a request to another rank"


def test_a_status_is_handed_over_if_training_ended_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher reports every status but 0 as an error."""
    monkeypatch.setenv("RANK", "0")
    stop, status = StopRequest(), tmp_path / "status"
    assert stop.hand_over(75) == 75
    monkeypatch.setenv(STATUS_FILE, str(status))
    assert stop.hand_over(1) == 1 and stop.hand_over(70) == 70 and not status.exists()
    for number in (75, 0):
        assert stop.hand_over(number) == 0 and status.read_text() == f"{number}\n"
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "on another host" / "status"))
    assert stop.hand_over(75) == 75
    monkeypatch.setenv(STATUS_FILE, str(status))
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert stop.hand_over(75) == 75 and status.read_text() == "0\n", "nobody is there to hear of it"


def _requested(stop: StopRequest) -> bool:
    """Ask as the loop of a single rank does."""
    alone = SimpleNamespace(stop=stop, world=World(0, 1, 0, torch.device("cpu")), verified=None)
    return loop.TrainingLoop._stop_requested(alone)  # type: ignore[arg-type]


def test_a_request_to_one_rank_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopRequest()
    assert not _requested(stop) and not stop.agreed
    monkeypatch.setattr(loop, "any_rank", lambda value, world: True)
    assert _requested(stop)
    assert stop and stop.agreed and stop.signal_name == "a request to another rank"
    stop = StopRequest()
    monkeypatch.setattr(loop, "gather_lists", lambda items, world: ["", "SIGUSR1"])
    assert _requested(stop) and stop.signal_name == "SIGUSR1"


def test_a_file_requests_a_stop_on_which_all_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOP_FILE, str(tmp_path / "stop"))
    stop = StopRequest()
    assert not stop

    def none_yet(value: bool, world: World) -> bool:
        assert not value
        (tmp_path / "stop").touch()  # created during the agreement, when only some ranks see it
        return value

    monkeypatch.setattr(loop, "any_rank", none_yet)
    assert not _requested(stop), "other ranks have not seen the file"
    assert stop and not stop.agreed
    monkeypatch.setattr(loop, "any_rank", lambda value, world: value)
    assert _requested(stop) and stop.agreed and stop.signal_name == "request"


def test_a_rank_whose_launcher_is_gone_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    stop = StopRequest()
    assert not stop
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert stop and stop.signal_name == "the loss of its launcher"
    monkeypatch.delenv("RANK")  # without RANK the lost parent is not a launcher
    alone = StopRequest()
    monkeypatch.setattr("os.getppid", lambda: 2)
    assert not alone


def test_a_signal_during_the_check_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopRequest() as stop:

        def looks_elsewhere() -> str:
            send(signal.SIGTERM)
            return ""

        monkeypatch.setattr(stop, "_without_a_signal", looks_elsewhere)
        assert stop and stop.signal_name == "SIGTERM"


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


def test_a_lost_terminal_is_a_request_unless_nohup_ignores_it() -> None:
    with StopRequest() as stop:
        send(signal.SIGHUP)
        send(signal.SIGHUP)  # the shell and the kernel both report it
        assert stop and stop.signal_name == "SIGHUP"
        stop.agree()
    send(signal.SIGHUP)  # while the process ends
    with StopRequest() as stop:  # it is ignored now
        send(signal.SIGHUP)
        assert not stop
