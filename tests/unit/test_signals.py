"""Asking a run to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train import loop
from deepspeed_nmt.train.signals import StopRequest


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def test_signals_soon_after_another_are_one_request(capfd: pytest.CaptureFixture[str]) -> None:
    """A launcher passes Ctrl-C on as SIGTERM, and the same may come by two ways, even while the process is ending."""
    with StopRequest() as stop:
        assert not stop
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert stop and stop.signal_name == "SIGINT"
    send(signal.SIGUSR1)
    assert capfd.readouterr().err == "finishing this update, then saving; once more, and it stops at once\n"


def test_unasked_it_leaves_no_trace() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) != before
    assert not stop and signal.getsignal(signal.SIGTERM) == before


def test_a_signal_to_one_rank_is_a_signal_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, world = StopRequest(), World(0, 1, 0, torch.device("cpu"))
    assert not loop._asked_to_stop(stop, world)
    monkeypatch.setattr(loop, "any_rank", lambda value, world: True)
    assert loop._asked_to_stop(stop, world)
    assert stop and stop.signal_name == "a signal to another rank"
