"""Exchange of values between ranks of which some may be missing, without collectives.

Values are JSON in the TCP store of rank 0. Every wait has a time limit, so that a rank that is lost or slow is named
instead of waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.parallel.launched import RankPlace
from deepspeed_nmt.parallel.rendezvous import connect, restart

_POLL_S = 0.02
"""Seconds between two looks at the store; they grow with the wait."""


class Exchange:
    """Named values of the ranks of a start.

    Args:
        place: of this process.
        store: that all ranks share.
    """

    def __init__(self, place: RankPlace, store: Any) -> None:
        self.place, self._store = place, store
        self._prefix = f"exchange/{restart()}"

    @classmethod
    def join(cls, place: RankPlace, timeout_s: float) -> Exchange:
        """Connect to the store of rank 0, which need not know of any other rank.

        Raises:
            ConfigError: if MASTER_PORT is not a port, or rank 0 cannot listen there.
            TrainingError: if rank 0 does not answer within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s

        def pause(what: str) -> None:
            if time.monotonic() > deadline:
                raise TrainingError(what)
            time.sleep(0.1)

        return cls(place, connect(place, pause, timeout_s))

    @property
    def store(self) -> Any:
        """The store, for process groups."""
        return self._store

    def put(self, name: str, value: Any) -> None:
        """Publish a value of this rank.

        Args:
            name: of the value; each is published once by each rank.
            value: anything that JSON can represent.
        """
        self._store.set(self._key(name, self.place.rank), json.dumps(value))

    def get(self, name: str, rank: int, within_s: float) -> Any:
        """Wait for a value of another rank and return it.

        Raises:
            TimeoutError: if it is not there in time.
        """
        key, began = self._key(name, rank), time.monotonic()
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > within_s:
                raise TimeoutError(f"rank {rank} did not answer within {within_s:.0f} s")
            time.sleep(min(0.2, _POLL_S / 10 + waited / 20))
        return json.loads(self._store.get(key))

    def gather(self, name: str, ranks: Iterable[int], within_s: float) -> dict[int, Any]:
        """Return the values of these ranks by rank, without those that are not there in time."""
        deadline, found = time.monotonic() + within_s, dict[int, Any]()
        for rank in ranks:
            try:
                found[rank] = self.get(name, rank, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                continue
        return found

    def raise_flag(self, name: str) -> None:
        """Raise a flag that all ranks can see."""
        self._store.set(f"{self._prefix}/flags/{name}", "raised")

    def has_flag(self, name: str) -> Callable[[], bool]:
        """Return a function that returns True once any rank has raised a flag."""
        return lambda: bool(self._store.check([f"{self._prefix}/flags/{name}"]))

    def clock_offset(
        self, rank: int, now: Callable[[], float], within_s: float, rounds: int = 5
    ) -> tuple[float, float]:
        """Return by how many seconds the clock of another rank is ahead of ours, and the uncertainty.

        The other rank calls :meth:`answer_clock` at the same time.

        Raises:
            TimeoutError: if it does not answer in time.
        """
        best = (0.0, float("inf"))
        for number in range(rounds):
            asked, began = now(), time.monotonic()
            self.put(f"clock/{rank}/{number}", 0)
            theirs = self.get(f"clock/{self.place.rank}/{number}", rank, within_s)
            half = (time.monotonic() - began) / 2
            if half < best[1]:
                best = (theirs - (asked + half), half)
        return best

    def answer_clock(self, rank: int, now: Callable[[], float], within_s: float, rounds: int = 5) -> None:
        """Tell another rank the time, as often as it asks.

        Raises:
            TimeoutError: if it does not ask in time.
        """
        for number in range(rounds):
            self.get(f"clock/{self.place.rank}/{number}", rank, within_s)
            self.put(f"clock/{rank}/{number}", now())

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"
