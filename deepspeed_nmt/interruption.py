"""Signals that end a command: they become an exception, so that `finally` clauses remove temporary files.

Training is stopped by :mod:`deepspeed_nmt.train.signals` instead, which saves a checkpoint first.
"""

from __future__ import annotations

import _thread
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

_IMPORT_POLL_S = 0.02
"""Seconds between two looks whether an import has ended."""

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
    While a module is imported, the exception waits for the end of the import. Outside the main thread, where Python
    handles no signals, the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: float | None = None
    raised = ended = False
    resent: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal first, raised
        now, is_resent = time.monotonic(), bool(resent)
        resent.clear()
        first = now if first is None else first
        if not is_resent and now - first > ONE_REQUEST_S:
            os._exit(128 + number)
        if raised:
            return
        if _imports(frame):
            # Threads of the threading module take locks, which the main thread may hold at this moment.
            _thread.start_new_thread(send_again, (number,))
            return
        raised = True
        raise Interrupted(number)

    def send_again(number: int) -> None:
        time.sleep(_IMPORT_POLL_S)
        if not ended:
            resent.append(number)
            os.kill(os.getpid(), number)

    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    previous = {
        number: handler for number in (*_SIGNALS, *further) if (handler := signal.getsignal(number)) in unhandled
    }
    try:
        for number in previous:
            signal.signal(number, interrupt)
        yield
    finally:
        ended = True
        for number, handler in previous.items():
            signal.signal(number, handler)


def _imports(frame: FrameType | None) -> bool:
    """Return True if a module is being imported, whose code may swallow an exception or report it as its own."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
