"""Work on many pieces in processes of its own, with results in the order of the pieces.

A pool starts when there is enough work to be worth it: importing takes a worker half a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from deepspeed_nmt.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

ALONE_BYTES = 1 << 23
"""Bytes of pieces that this process works on itself before it starts workers."""
_AHEAD = 2
"""Pieces in work or waiting, or results waiting, for each worker: the bound on memory."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_work: Callable[[Any], Any] | None = None
_stop: Any = None


def ordered_map(
    work: Callable[[T], R], pieces: Iterable[T], workers: int, size_of: Callable[[T], int]
) -> Generator[R, None, None]:
    """Yield ``work(piece)`` for each piece, in the order of the pieces. Workers live until the generator is closed.

    Args:
        work: function that depends on the piece only; a module's function, or an object that can be pickled.
        pieces: read as they are needed, in this process.
        workers: number of processes; 1 works in this one.
        size_of: returns the bytes of a piece.

    Raises:
        DataError: if a worker ends before its work.
    """
    iterator = iter(pieces)
    done = 0
    for piece in iterator:
        if workers > 1 and done + size_of(piece) > ALONE_BYTES:
            yield from _in_workers(work, chain([piece], iterator), workers)
            return
        done += size_of(piece)
        yield work(piece)


def _in_workers(work: Callable[[T], R], pieces: Iterable[T], workers: int) -> Generator[R, None, None]:
    context = multiprocessing.get_context("spawn")  # a forked process could not use threads that its parent has
    with _signals_blocked():  # the process that cleans up after semaphores starts here, and must outlive SIGHUP
        stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(work, stop))
    waiting: deque[Future[R]] = deque()
    try:
        for piece in pieces:
            with _signals_blocked():
                waiting.append(pool.submit(_run, piece))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "all workers of `prepare` must live until its end, but one was killed, often because memory had run out; "
            "start again, with fewer --workers if so"
        ) from error
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals during the block, and for good in processes that start in it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(work: Callable[[Any], Any], stop: Any) -> None:
    """Prepare a new worker."""
    global _work, _stop
    _work, _stop = work, stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library of BERTs' tokenizers would start threads
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: Any) -> None:
    """End this process when its parent has ended, however it has."""
    parent.join()
    os._exit(1)


def _run(piece: Any) -> Any:
    assert _work is not None
    return None if _stop.is_set() else _work(piece)
