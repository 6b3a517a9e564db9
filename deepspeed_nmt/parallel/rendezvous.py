"""Rendezvous of ranks at a TCP store of rank 0.

Each rank registers at the store and waits until all ranks have. Meanwhile it logs the ranks that are missing, and
stops on request.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, ReportedError, TrainingError
from deepspeed_nmt.parallel.launched import RankPlace

_FIRST_REPORT_S, _REPORT_EVERY_S = 10.0, 60.0
"""Seconds of waiting before the missing ranks are logged for the first time, and between later times."""
_ANSWER_S = 5.0
"""Seconds that rank 0's store has to answer a new connection before the next attempt."""
_ATTEMPT_S = 30.0
"""Seconds after which a connection that neither fails nor answers is tried anew."""
_LEAVE_S = 5.0
"""Seconds that rank 0 waits, when all stop, until the ranks that have registered know it."""
_START, _STOP = b"start", b"stop"


def meet(place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> Any:
    """Wait until all ranks have registered at MASTER_ADDR and MASTER_PORT.

    Args:
        place: of this process.
        timeout_s: seconds after which this rank stops waiting.
        stop_requested: returns a true value when the ranks are to stop instead of waiting.

    Returns:
        The store that all ranks share.

    Raises:
        ConfigError: if MASTER_PORT is not a port, or rank 0 cannot listen there.
        TrainingError: if a rank is missing after ``timeout_s``.
        ReportedError: if a stop was requested of a rank before all had registered; all registered ranks raise it.
    """
    waiting, key = _Waiting(place, timeout_s, stop_requested), f"rendezvous/{restart()}"
    while True:
        store = connect(place, waiting.pause, timeout_s)
        try:
            starts = _decide(store, key, place, waiting)
        except dist.DistError:  # the connection was closed
            if _hosts_store(place):
                raise
            waiting.pause("for rank 0, which has left")
            continue
        if starts:
            return dist.PrefixStore(f"{key}/group", store)  # type: ignore[attr-defined]
        raise waiting.stopped(_missing(store, key, place.ranks) if _hosts_store(place) else "for other ranks")


def _decide(store: Any, key: str, place: RankPlace, waiting: _Waiting) -> bool:
    """Register this rank, and wait for the decision that holds for all ranks: True to start, False to stop.

    The first rank that sees all others there, or is asked to stop, decides. If a rank could stop by itself, one that
    saw it registered would wait for it in a process group that is never complete.

    Raises:
        TrainingError: if a rank is missing for too long.
        dist.DistError: if the store is gone.
    """
    everyone = [_rank_key(key, rank) for rank in range(place.ranks)]
    store.set(everyone[place.rank], "here")
    while True:
        proposed = _START if store.check(everyone) else _STOP if waiting.stop_requested() else None
        if proposed is not None:
            decided = store.compare_set(f"{key}/decided", "", proposed)
        elif store.check([f"{key}/decided"]):
            decided = store.get(f"{key}/decided")
        else:
            waiting.sleep(lambda: _missing(store, key, place.ranks))
            continue
        if decided == _STOP:
            _leave(store, key, place)
        return bool(decided == _START)


def _leave(store: Any, key: str, place: RankPlace) -> None:
    """Record that this rank knows that all stop; on rank 0, which hosts the store, wait until the others know it."""
    store.add(f"{key}/left", 1)
    deadline = time.monotonic() + _LEAVE_S
    while _hosts_store(place) and time.monotonic() < deadline:
        registered = sum(store.check([_rank_key(key, rank)]) for rank in range(place.ranks))
        if store.add(f"{key}/left", 0) >= registered:
            return
        time.sleep(0.02)


def _missing(store: Any, key: str, ranks: int) -> str:
    """Return a description of the ranks that have not registered."""
    missing = [rank for rank in range(ranks) if not store.check([_rank_key(key, rank)])]
    return f"for {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)}" if missing else "for the last rank"


def _rank_key(key: str, rank: int) -> str:
    return f"{key}/{rank}"


def restart() -> str:
    """Return the number of this restart by torchrun: its store outlives ranks, so keys of restarts must differ."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def connect(place: RankPlace, pause: Callable[[str], None], timeout_s: float) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 makes, unless torchrun has made one there.

    Args:
        place: of this process.
        pause: function that waits for a moment, and is told for what; it raises to give up.
        timeout_s: time limit in seconds of the store's answers.

    Raises:
        ConfigError: if MASTER_PORT is not a port, or rank 0 cannot listen there.
    """
    address, port, timeout = os.environ["MASTER_ADDR"], _port(), timedelta(seconds=timeout_s)
    if _hosts_store(place):
        try:
            return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ConfigError(
                f"MASTER_PORT must be free on the first host, but rank 0 cannot listen on {port} "
                f"({str(error).splitlines()[0]}); choose another"
            ) from error
    while True:
        if not _listens(address, port):
            pause(f"for rank 0 at {address}:{port}")
        elif (store := _connected(address, port, pause, min(timeout_s, _ANSWER_S))) is not None:
            store.set_timeout(timeout)
            return store


def _connected(address: str, port: int, pause: Callable[[str], None], answer_s: float) -> Any:
    """Return the store at an address, or None if it does not answer.

    In another thread, because torch waits without end for a service that says nothing, and so that this thread
    notices signals.
    """
    attempt, given_up_at = Future[Any](), time.monotonic() + _ATTEMPT_S

    def connect() -> None:
        try:
            # Rank 0 may stop at any moment, and torch tries to reach a store for all of this time.
            limit = timedelta(seconds=answer_s)
            attempt.set_result(dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))  # type: ignore[attr-defined]
        except RuntimeError as error:
            attempt.set_exception(error)

    threading.Thread(target=connect, name="rendezvous", daemon=True).start()
    while time.monotonic() < given_up_at:
        try:
            return attempt.result(timeout=0.05)
        except (RuntimeError, TimeoutError):
            pause(f"for rank 0 at {address}:{port}, which does not answer")
        if attempt.done() and attempt.exception() is not None:
            break
    return None


def _hosts_store(place: RankPlace) -> bool:
    """Return True if this rank makes the store."""
    return place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


class _Waiting:
    """A wait for other ranks, in steps.

    Args:
        place: of this process.
        timeout_s: seconds after which the wait fails.
        stop_requested: returns a true value when the wait is to end.
    """

    def __init__(self, place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> None:
        self._place, self._timeout_s, self.stop_requested = place, timeout_s, stop_requested
        self._began = time.monotonic()
        self._report_at = _FIRST_REPORT_S

    def pause(self, what: str) -> None:
        """Sleep for a moment, unless a stop is requested.

        Args:
            what: description of what the rank waits for.

        Raises:
            TrainingError: if the time is over.
            ReportedError: if a stop is requested.
        """
        if self.stop_requested():
            raise self.stopped(what)
        self.sleep(lambda: what)

    def stopped(self, what: str) -> ReportedError:
        """Log that the ranks stop, and return the error to raise."""
        if self._place.local_rank == 0:
            logger.info("stopped while waiting %s; start the same command again to resume", what)
        return ReportedError(EXIT_STOPPED)

    def sleep(self, what: Callable[[], str]) -> None:
        """Sleep for a moment, and log what the rank waits for if a report is due.

        Raises:
            TrainingError: if the time is over.
        """
        waited = time.monotonic() - self._began
        if waited > self._timeout_s:
            raise TrainingError(
                f"all {self._place.ranks} ranks must connect within {self._timeout_s:.0f} s (engine.timeout_s), but "
                f"rank {self._place.rank} still waits {what()}; start all ranks with the same MASTER_ADDR and "
                "MASTER_PORT, which every host must reach"
            )
        if waited > self._report_at and self._place.local_rank == 0:
            logger.info("rank %d has been waiting %s for %.0f s", self._place.rank, what(), waited)
            self._report_at = waited + _REPORT_EVERY_S
        time.sleep(min(0.5, 0.02 + waited / 20))


def _port() -> int:
    """Return MASTER_PORT.

    Raises:
        ConfigError: if it is not a port.
    """
    text = os.environ["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT must be a port, but is '{text}'; set a number from 1024 to 65535")
    return int(text)


def _listens(address: str, port: int) -> bool:
    """Return True if a process accepts connections at the address."""
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _listed(ranks: list[int]) -> str:
    """Return the first ranks, and the number of further ones, as text."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
