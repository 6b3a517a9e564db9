"""Work that ranks share without collectives: numbered items that they claim one by one; and ranks of this host.

Ranks need not keep step, so a fast one does more items than a slow one. They meet at a TCP store, whose counters say
which item is next and how much is done. The end of one rank, by a failure or on request, ends the others.

:func:`run_workers` starts ranks on this host's CPU, with the environment variables that a launcher sets, so that a
worker is a rank like any other. Nothing heavy is imported before a worker has set its number of threads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any, TypeVar

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_RANK_LOST, EXIT_STOPPED, EXIT_USER_ERROR, ReportedError, UserError
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.parallel.launched import RankPlace, pointing_to_doctor

T = TypeVar("T")
_CONNECT_S = 1800.0
"""Seconds after which a rank stops waiting for the others to start."""
_LEAVE_S = 10.0
"""Seconds that a rank waits for the others to leave, so that none takes the end of rank 0 for a failure."""
_POLL_S = 0.2
"""Seconds between two looks at the store while a rank waits."""
_STOP_S = 30.0
"""Seconds that workers have to end on request before they are killed."""


class SharedWork:
    """Items that the ranks of a start share; a context manager around this rank's part.

    If the block fails or is interrupted, the other ranks end at their next call of a method, by a ReportedError. A
    single rank needs no store.

    Attributes:
        stopped_by: name of the signal that asked a rank to stop; empty without one.
        ended_together: True after the block if all ranks have left it, False if one was lost.
    """

    def __init__(self, place: RankPlace, store: Any = None) -> None:
        self.place = place
        self.stopped_by = ""
        self.ended_together = False
        self._store = _OwnStore() if store is None else store
        # A rank outlives a launcher that is killed.
        self._launcher = os.getppid() if place.ranks > 1 else 0

    @classmethod
    def join(cls, place: RankPlace) -> SharedWork:
        """Connect this process to the other ranks at MASTER_ADDR and MASTER_PORT."""
        if place.ranks == 1:
            return cls(place)
        from deepspeed_nmt.parallel.world import check_launcher, meet  # torch, which a single rank need not have

        check_launcher(place.ranks)
        with pointing_to_doctor():
            return cls(place, meet(place, _CONNECT_S, lambda: False))

    def __enter__(self) -> SharedWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with suppress(ReportedError, KeyboardInterrupt):
            if isinstance(error, Interrupted):
                self.stopped_by = error.signal.name
            if error is not None and self.claim("ends") == 0:
                self._ask(lambda: self._store.set("ended", json.dumps([_status(error), self.stopped_by])))
            self._leave()

    def announce(self, value: Any) -> None:
        """Tell the other ranks what rank 0 has prepared; they wait for it in :meth:`announced`."""
        self._ask(lambda: self._store.set("announced", json.dumps(value)))

    def announced(self) -> Any:
        """Wait for the value that rank 0 announces, and return it."""
        while not self._ask(lambda: self._store.check(["announced"])):
            self.pause()
        return json.loads(self._ask(lambda: self._store.get("announced")))

    def claim(self, series: str = "items") -> int:
        """Return a number of a series that no other rank gets: 0, 1, 2, ..."""
        return int(self._ask(lambda: self._store.add(f"claimed/{series}", 1))) - 1

    def advance(self, count: int) -> None:
        """Add to the count of what is done on all ranks."""
        self.check()
        self._ask(lambda: self._store.add("done", count))

    def done(self) -> int:
        """Return the count of what is done on all ranks."""
        return int(self._ask(lambda: self._store.add("done", 0)))

    def complete(self) -> None:
        """Tell the other ranks that the work is complete."""
        self._ask(lambda: self._store.set("complete", "yes"))

    def is_complete(self) -> bool:
        """Return True if rank 0 has said that the work is complete."""
        return bool(self._ask(lambda: self._store.check(["complete"])))

    def pause(self) -> None:
        """Sleep for a moment."""
        self.check()
        time.sleep(_POLL_S)

    def check(self) -> None:
        """End this rank by a ReportedError if another has ended the work, or the launcher was killed."""
        if self._launcher and os.getppid() != self._launcher:
            raise ReportedError(EXIT_STOPPED)
        if self.place.ranks > 1 and self._ask(lambda: self._store.check(["ended"])):
            status, self.stopped_by = json.loads(self._ask(lambda: self._store.get("ended")))
            raise ReportedError(status)

    def _leave(self) -> None:
        """Wait until all ranks are about to leave, but not for long: one may be lost. Rank 0 leaves last."""
        deadline = time.monotonic() + _LEAVE_S
        with suppress(RuntimeError):  # the store is gone
            left = self._store.add("leaving", 1)
            while left < self.place.ranks and time.monotonic() < deadline:
                time.sleep(_POLL_S / 4)
                left = self._store.add("leaving", 0)
            self.ended_together = left >= self.place.ranks
            if self.place.rank == 0 and self.place.ranks > 1:
                time.sleep(_POLL_S)

    def _ask(self, request: Callable[[], T]) -> T:
        """Make a request to the store, which may be gone with the rank or the launcher that hosted it."""
        try:
            return request()
        except RuntimeError as error:  # the connection was closed
            if self.place.local_rank == 0:
                logger.error("rank 0, or the launcher, has ended; start the same command again to resume")
            raise ReportedError(EXIT_RANK_LOST) from error


class _OwnStore:
    """The store of a single rank; its methods are those of torch's stores."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> str:
        return self._values[key]

    def add(self, key: str, count: int) -> int:
        self._values[key] = str(int(self._values.get(key, "0")) + count)
        return int(self._values[key])

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _status(error: BaseException) -> int:
    """Return the exit status with which all ranks end after an error on one."""
    if isinstance(error, ReportedError):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return EXIT_STOPPED
    return EXIT_USER_ERROR if isinstance(error, UserError) else 1


def run_workers(target: Callable[[T], int], argument: T, workers: int) -> int:
    """Run a function, of a module that can be imported, as several ranks on this host, and return their exit status.

    If one of them fails, or this process is asked to stop, the others are stopped, too.
    """
    store = local_store()  # of this process, as of an agent of torchrun: no other program can take its port
    environment = {
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers))),
    }
    # A forked process could not use torch's threads.
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    try:
        for rank in range(workers):
            words = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=_work, args=(words, target, argument), name=f"worker {rank}"))
            processes[-1].start()
        return _supervise(processes)
    except KeyboardInterrupt:
        _stop(processes)
        statuses = {process.exitcode for process in processes} - {0}
        if statuses <= {EXIT_STOPPED}:
            return EXIT_STOPPED if statuses else 0
        raise
    finally:
        _stop(processes)


def local_store() -> Any:
    """Make a TCP store for processes of this host. torch's own would listen on all interfaces."""
    import torch.distributed as dist

    listening = socket.create_server(("127.0.0.1", 0))
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _work(environment: dict[str, str], target: Callable[[T], int], argument: T) -> None:
    os.environ.update(environment)
    sys.exit(target(argument))


def _supervise(processes: Sequence[Any]) -> int:
    while True:
        codes = {process: process.exitcode for process in processes}  # once: a worker can end at any moment
        for process, code in codes.items():
            if code is not None and code < 0:
                name, by = process.name, signal.Signals(-code).name
                how = "start again to resume, with fewer if memory has run out"
                logger.error("stopped: %s of %d was killed by %s; %s", name, len(codes), by, how)
                return EXIT_RANK_LOST
        if any(codes.values()):
            _stop(processes, ask=False)
            # The first to fail has a reason, and those that it ended have its status.
            return int(next(filter(None, codes.values())))
        running = [process.sentinel for process, code in codes.items() if code is None]
        if not running:
            return 0
        wait(running)


def _stop(processes: Sequence[Any], ask: bool = True) -> None:
    """Ask workers to end, or let them end by themselves because one of them has, and kill those that are late."""
    started = [process for process in processes if process.pid is not None]
    if ask:
        for process in started:
            with suppress(ProcessLookupError):
                process.terminate()
    deadline = time.monotonic() + _STOP_S
    for process in started:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
