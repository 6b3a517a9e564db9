"""Requests to stop a run."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
    alone = SimpleNamespace(stop=stop, world=World(0, 1, 0, torch.device("cpu")))
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
