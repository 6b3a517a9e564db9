"""Signals that end a command: they become an exception, so that `finally` clauses remove temporary files.

Training is stopped by :mod:`deepspeed_nmt.train.signals` instead, which saves a checkpoint first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ONE_REQUEST_S = 2.0
"""Signals within this time count as one request: a launcher forwards Ctrl-C as SIGTERM at once, `timeout` signals
the process and its group, and a terminal that closes is reported by the shell and by the kernel."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The end of a command by a signal. No `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def interruptible(*further: signal.Signals) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP during the block into :class:`Interrupted`.

    A signal that somebody handles or ignores already is left alone: `nohup` ignores SIGHUP. A signal that is repeated
    soon after the first, while temporary files are removed, changes nothing; a later one ends the process at once.
    Outside the main thread, where Python handles no signals, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            raise Interrupted(number)
        if now - first > ONE_REQUEST_S:
            os._exit(128 + number)

    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    previous = {
        number: handler for number in (*_SIGNALS, *further) if (handler := signal.getsignal(number)) in unhandled
    }
    try:
        for number in previous:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
