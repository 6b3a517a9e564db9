"""Rendezvous of ranks at a TCP store of rank 0.

Each rank registers at the store and waits until all ranks have. Meanwhile it logs the ranks that are missing, and
stops on request.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, ReportedError, TrainingError
from deepspeed_nmt.parallel.launched import RankPlace

_FIRST_REPORT_S, _REPORT_EVERY_S = 10.0, 60.0
"""Seconds of waiting before the missing ranks are logged for the first time, and between later times."""


def meet(place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> Any:
    """Wait until all ranks have registered at MASTER_ADDR and MASTER_PORT.

    Args:
        place: of this process.
        timeout_s: seconds after which this rank stops waiting.
        stop_requested: returns a true value when the rank is to stop instead of waiting.

    Returns:
        The store that all ranks share.

    Raises:
        ConfigError: if MASTER_PORT is not a port, or rank 0 cannot listen there.
        TrainingError: if a rank is missing after ``timeout_s``.
        ReportedError: if a stop is requested.
    """
    waiting = _Waiting(place, timeout_s, stop_requested)
    store, key = connect(place, waiting.pause, timeout_s), f"rendezvous/{restart()}"
    store.set(f"{key}/{place.rank}", "here")
    store.add(f"{key}/count", 1)
    while store.add(f"{key}/count", 0) < place.ranks:
        missing = [rank for rank in range(place.ranks) if not store.check([f"{key}/{rank}"])]
        waiting.pause(
            f"for {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)}" if missing else "for the last rank"
        )
    return dist.PrefixStore(f"{key}/group", store)  # type: ignore[attr-defined]


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
    address, port = os.environ["MASTER_ADDR"], _port()
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        while not _listens(address, port):
            pause(f"for rank 0 at {address}:{port}")
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        if not hosts:
            raise
        raise ConfigError(
            f"MASTER_PORT must be free on the first host, but rank 0 cannot listen on {port} "
            f"({str(error).splitlines()[0]}); choose another"
        ) from error


class _Waiting:
    """A wait for other ranks, in steps.

    Args:
        place: of this process.
        timeout_s: seconds after which the wait fails.
        stop_requested: returns a true value when the wait is to end.
    """

    def __init__(self, place: RankPlace, timeout_s: float, stop_requested: Callable[[], object]) -> None:
        self._place, self._timeout_s, self._stop_requested = place, timeout_s, stop_requested
        self._began = time.monotonic()
        self._report_at = _FIRST_REPORT_S

    def pause(self, what: str) -> None:
        """Sleep for a moment, and log ``what`` the rank waits for if a report is due.

        Raises:
            TrainingError: if the time is over.
            ReportedError: if a stop is requested.
        """
        waited = time.monotonic() - self._began
        if self._stop_requested():
            if self._place.local_rank == 0:
                logger.info("stopped while waiting %s; start the same command again to resume", what)
            raise ReportedError(EXIT_STOPPED)
        if waited > self._timeout_s:
            raise TrainingError(
                f"all {self._place.ranks} ranks must connect within {self._timeout_s:.0f} s (engine.timeout_s), but "
                f"rank {self._place.rank} still waits {what}; start all ranks with the same MASTER_ADDR and "
                "MASTER_PORT, which every host must reach"
            )
        if waited > self._report_at and self._place.local_rank == 0:
            logger.info("rank %d has been waiting %s for %.0f s", self._place.rank, what, waited)
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
