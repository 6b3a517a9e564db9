"""How ranks find each other: rank 0 has a store, and all wait there until all have come. They say whom they wait for,
and end at once when asked to.
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
from deepspeed_nmt.parallel.launched import Place

_FIRST_WORD_S, _WORDS_EVERY_S = 10.0, 60.0


def meet(place: Place, timeout_s: float, asked: Callable[[], object]) -> Any:
    """Wait for all ranks at MASTER_ADDR and MASTER_PORT, and return the store that they share.

    Args:
        asked: whether to end instead.

    Raises:
        ConfigError: if the address makes no sense, or rank 0 cannot listen there.
        TrainingError: if not all have come in time; names those who have not.
        ReportedError: if asked to end.
    """
    address, port = os.environ["MASTER_ADDR"], _port()
    # torchrun has a store of its own there already, which outlives the ranks that it starts anew.
    hosts = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    key = f"rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    waiting = _Waiting(place, timeout_s, asked)
    if not hosts:
        while not _listens(address, port):
            waiting.on(f"for rank 0 at {address}:{port}")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=hosts, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        if not hosts:
            raise
        raise ConfigError(
            f"MASTER_PORT must be free on the first host, but rank 0 cannot listen on {port} "
            f"({str(error).splitlines()[0]}); choose another"
        ) from error
    store.set(f"{key}/{place.rank}", "here")
    store.add(f"{key}/count", 1)
    while store.add(f"{key}/count", 0) < place.ranks:
        missing = [rank for rank in range(place.ranks) if not store.check([f"{key}/{rank}"])]
        waiting.on(
            f"for {'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)}" if missing else "for the last"
        )
    return dist.PrefixStore(f"{key}/group", store)  # type: ignore[attr-defined]


class _Waiting:
    """One step of waiting after another."""

    def __init__(self, place: Place, timeout_s: float, asked: Callable[[], object]) -> None:
        self._place, self._timeout_s, self._asked = place, timeout_s, asked
        self._began = time.monotonic()
        self._speak_at = _FIRST_WORD_S

    def on(self, what: str) -> None:
        """Sleep a little, speak now and then, and end when it is time."""
        waited = time.monotonic() - self._began
        if self._asked():
            if self._place.local_rank == 0:
                logger.info("stopped while waiting %s; start the same command again to go on", what)
            raise ReportedError(EXIT_STOPPED)
        if waited > self._timeout_s:
            raise TrainingError(
                f"all {self._place.ranks} ranks must come within {self._timeout_s:.0f} s (engine.timeout_s), but "
                f"rank {self._place.rank} still waits {what}; start them all with one address that they reach"
            )
        if waited > self._speak_at and self._place.local_rank == 0:
            logger.info("rank %d has been waiting %s for %.0f s", self._place.rank, what, waited)
            self._speak_at = waited + _WORDS_EVERY_S
        time.sleep(min(0.5, 0.02 + waited / 20))


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(f"MASTER_PORT must be a port, but is '{text}'; set a number from 1024 to 65535")
    return int(text)


def _listens(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
