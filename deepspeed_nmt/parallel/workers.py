"""Workers: ranks that a command starts on this host's CPU, and supervises.

They find the same environment variables as under a launcher, so a worker is a rank like any other. This module
imports nothing heavy before a worker has set its number of threads.
"""

from __future__ import annotations

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
from deepspeed_nmt.errors import EXIT_RANK_LOST, EXIT_STOPPED

T = TypeVar("T")
_STOP_S = 30.0
"""Seconds that workers have to end on request before they are killed."""


def run_workers(target: Callable[[T], int], argument: T, workers: int) -> int:
    """Run a function as several ranks on this host, and return their exit status.

    If one of them fails, or this process is asked to stop, the others are stopped, too.

    Args:
        target: function that returns an exit status, of a module that can be imported.
        argument: its argument.
        workers: number of ranks.
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
        codes = [process.exitcode for process in processes]  # once: a worker can end at any moment
        for process, code in zip(processes, codes, strict=True):
            if code is not None and code < 0:
                logger.error(
                    "stopped: %s of %d was killed by %s; start again to resume, with fewer if memory has run out",
                    process.name,
                    len(processes),
                    signal.Signals(-code).name,
                )
                return EXIT_RANK_LOST
        if any(codes):
            _stop(processes, ask=False)
            # The first to fail has a reason, and those that it ended have its status.
            return int(next(filter(None, codes)))
        running = [process.sentinel for process, code in zip(processes, codes, strict=True) if code is None]
        if not running:
            return 0
        wait(running)


def _stop(processes: Sequence[Any], ask: bool = True) -> None:
    """Wait until all workers have ended, and kill those that do not end in time.

    Args:
        processes: the workers.
        ask: True to ask them to end; False if they end by themselves, because one of them has.
    """
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
