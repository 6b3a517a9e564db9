"""Watchdog that ends all ranks if one of them is lost, stuck or failed.

A thread of each rank writes a heartbeat to a TCP store every few seconds, with the step that the main thread is in.
Rank 0's thread reads the heartbeats of all ranks. It publishes a verdict if

- a rank has sent no heartbeat for ``silent_s`` (killed, stopped, its host lost), or
- the rank that is furthest behind has exceeded the time limit of its step.

A rank that fails publishes the verdict itself. All ranks then exit with
:data:`deepspeed_nmt.errors.EXIT_RANK_LOST`, although their main threads may wait in a collective. Rank 0 hosts the
store. If it does not answer, a request to the store never returns, so a second thread of each rank measures the time
since the last answer.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_RANK_LOST, ReportedError, first_line
from deepspeed_nmt.parallel import collectives
from deepspeed_nmt.parallel.launched import restarts
from deepspeed_nmt.parallel.world import World

_PACKAGE = Path(__file__).parents[1]
_KEY = f"watchdog/{restarts()}"
_VERDICT = f"{_KEY}/verdict"
_GONE = "rank 0, which hosts the TCP store, is gone or stopped: {}"
_GRACE = 1.5
"""Intervals that rank 0 stays after a verdict, so that the other ranks can read it from the store."""
_REPORT_S = 15.0
"""Time limit in seconds for the report of a verdict elsewhere than in the log."""
_MESSAGE = "%s. All ranks stop; start the same command again to resume from the last checkpoint"


class Watchdog:
    """Heartbeats of this rank, and the threads that send and check them: a context manager around the work.

    Args:
        silent_s: seconds without a heartbeat after which a rank is lost; 0 disables the watchdog.
        stuck_s: time limit of a step in seconds.
        slow_s: time limit of a slow step (saving, validating) in seconds.
        failed: called on rank 0 with the verdict, in another thread than the main one, before the process ends.
    """

    def __init__(
        self,
        world: World,
        silent_s: float,
        stuck_s: float,
        slow_s: float,
        failed: Callable[[str], object] = lambda verdict: None,
    ) -> None:
        self._world, self._report_failure = world, failed
        self._silent_s, self._stuck_s, self._slow_s = silent_s, stuck_s, slow_s
        self._interval_s = silent_s / 6
        self._at = ("starting", 0, time.monotonic(), slow_s)
        self._threads: list[threading.Thread] = []
        self._answered = time.monotonic()
        self._ended = threading.Event()
        self._failing = self._lost = False
        self._store: Any = None

    def at(self, what: str, slow: bool = False) -> None:
        """Record the step that the main thread begins."""
        self._at = (what, self._at[1] + 1, time.monotonic(), self._slow_s if slow else self._stuck_s)

    def __enter__(self) -> Watchdog:
        """Start the threads."""
        if self._world.ranks == 1 or self._silent_s <= 0.0:
            return self
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=self._silent_s)
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        self._send(0)
        self._answered = time.monotonic()
        for work in (self._watch, self._guard):
            self._threads.append(threading.Thread(target=work, name="watchdog", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop the threads; publish the error of the block if there is one."""
        if not self._threads:
            return
        if isinstance(error, Exception) and not isinstance(error, ReportedError):
            self._failed(error)
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=self._silent_s)
        if error is None:
            with suppress(Exception):  # the work is done, so errors of the store no longer matter
                self._done()

    def _done(self) -> None:
        """Record that this rank is done; rank 0, which hosts the store, waits until all ranks are."""
        self._store.set(f"{_KEY}/{self._world.rank}", json.dumps({"done": True}))
        deadline = time.monotonic() + self._silent_s
        while self._world.is_main and time.monotonic() < deadline:
            if all(self._heartbeat(rank).get("done") for rank in range(self._world.ranks)):
                return
            time.sleep(0.05)

    def _failed(self, error: Exception) -> None:
        """Publish the error of the main thread as the verdict, unless it is a lost connection to another rank."""
        if _lost_connection(error):
            # The rank that caused it sends no heartbeat, publishes its own error now, or is stuck while this one has
            # waited in a collective to its time limit.
            self._lost = True
            self._ended.wait(self._silent_s + 3 * self._interval_s)
            return
        self._failing = True  # the main thread reports its error and ends the process
        logger.info("failed in %s", self._at[0], exc_info=error)
        self._publish(
            f"rank {self._world.rank} on {socket.gethostname()} failed in {self._at[0]}: {first_line(error)}"
        )
        if self._world.is_main:  # it hosts the store
            self._ended.wait(_GRACE * self._interval_s)

    def _guard(self) -> None:
        while not self._ended.wait(self._interval_s):
            if time.monotonic() - self._answered > self._silent_s + self._interval_s:
                self._stop(_GONE.format(f"no answer for {self._silent_s:.0f} s"))

    def _watch(self) -> None:
        """Send heartbeats and read the verdict; on rank 0, also judge the heartbeats of all ranks."""
        heard = {rank: (-1, time.monotonic(), "") for rank in range(self._world.ranks)}
        beat, main = 0, (-1, time.monotonic())
        while not self._ended.wait(self._interval_s):
            beat += 1
            try:
                self._send(beat)
                verdict = self._store.get(_VERDICT).decode() if self._store.check([_VERDICT]) else ""
                if not verdict and self._world.is_main and (verdict := self._judge(heard)):
                    self._publish(verdict)
                elif not verdict:
                    # The store can still answer when rank 0's own threads have stopped.
                    heartbeat = self._heartbeat(0)
                    if heartbeat.get("done") or heartbeat.get("beat", -1) != main[0]:
                        main = (heartbeat.get("beat", -1), time.monotonic())
                    if time.monotonic() - main[1] > self._silent_s + self._interval_s:
                        verdict = _GONE.format(f"no heartbeat for {self._silent_s:.0f} s")
                self._answered = time.monotonic()
            except Exception as problem:  # the store is gone
                verdict = "" if self._ended.is_set() else _GONE.format(str(problem).split("\n")[0])
            if verdict:
                self._stop(verdict)

    def _heartbeat(self, rank: int) -> dict[str, Any]:
        """Return the last heartbeat of a rank; empty if it has sent none."""
        key = f"{_KEY}/{rank}"
        return dict(json.loads(self._store.get(key))) if self._store.check([key]) else {}

    def _send(self, beat: int) -> None:
        """Write a heartbeat: the step of the main thread, the time it has left, and the line it executes."""
        what, step, since, limit_s = self._at
        left_s = limit_s - (time.monotonic() - since)
        heartbeat = {"beat": beat, "step": step, "at": what, "left": left_s, "host": socket.gethostname()}
        waits, heartbeat["line"] = _main_thread()
        heartbeat["waits"] = waits or self._lost
        self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(heartbeat))

    def _publish(self, text: str) -> None:
        self._store.compare_set(_VERDICT, "", text)

    def _judge(self, heard: dict[int, tuple[int, float, str]]) -> str:
        """Return the verdict on the heartbeats of all ranks; "" if no rank is lost or stuck.

        ``heard`` has each rank's last new heartbeat: its number, time and step; updated in place.
        """
        now = time.monotonic()
        heartbeats = {rank: self._heartbeat(rank) for rank in range(self._world.ranks)}
        silent = []
        for rank, (beat, since, _) in heard.items():
            heartbeat = heartbeats[rank]
            if heartbeat.get("done"):
                continue
            if heartbeat.get("beat", -1) != beat:
                heard[rank] = (heartbeat["beat"], now, f"{heartbeat['at']} on {heartbeat['host']}")
            elif now - since > self._silent_s:
                silent.append(rank)
        if silent:
            first = min(silent)
            step = f"; it was last in {heard[first][2]}" if heard[first][2] else ""
            more = f", as are {len(silent) - 1} more" if len(silent) > 1 else ""
            return f"rank {first} is gone or stopped{more}: no heartbeat for {self._silent_s:.0f} s{step}"
        at_work = {rank: last for rank, last in heartbeats.items() if last and not last.get("done")}
        if len(at_work) < self._world.ranks:
            return ""
        # Of the ranks in the earliest step, those that do not wait in a collective hold up the others.
        order = {rank: (heartbeat["step"], heartbeat["waits"]) for rank, heartbeat in at_work.items()}
        behind = [rank for rank in sorted(order) if order[rank] == min(order.values())]
        heartbeat = at_work[behind[0]]
        if heartbeat["left"] >= 0.0:
            return ""
        where = "; ".join(f"rank {rank} on {at_work[rank]['host']} in {at_work[rank]['line']}" for rank in behind[:8])
        who = f"rank {behind[0]}" if len(behind) == 1 else f"one of {len(behind)} ranks"
        return f"{who} is stuck in {heartbeat['at']}, which exceeds its time limit ({where})"

    def _stop(self, verdict: str) -> None:
        """Log the verdict and end the process, unless this rank's main thread is failing already."""
        if self._failing:
            return
        # Rank 0 exits last, because it hosts the store. The timer ends the process even if logging blocks.
        stay_s = _GRACE * self._interval_s if self._world.is_main else 0.0
        report_s = _REPORT_S if self._world.is_main else 0.0
        threading.Timer(stay_s + report_s + 5.0, os._exit, [EXIT_RANK_LOST]).start()
        reporting = threading.Thread(target=self._report_failure, args=[verdict], daemon=True)
        if self._world.is_main:
            reporting.start()
        # One rank of each host reports; if rank 0 is gone, another rank of its host.
        reports = self._world.local_rank in ((0, 1) if verdict.startswith("rank 0") else (0,))
        logger.log(logging.ERROR if reports else logging.INFO, _MESSAGE, verdict)
        time.sleep(stay_s)
        if self._world.is_main:
            reporting.join(report_s)
        os._exit(EXIT_RANK_LOST)


def _main_thread() -> tuple[bool, str]:
    """Return True if the main thread waits in a collective, and the line of this package that it executes.

    Only Python frames are visible: a wait is recognised by the library that calls a collective, or by the file of
    collectives, which has also the waits for what a GPU has yet to receive.
    """
    waits, line = False, "no line of this program"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        is_collective = file == collectives.__file__
        waits = waits or is_collective or "/torch/distributed/" in file or "/deepspeed/comm/" in file
        if file.startswith(f"{_PACKAGE}{os.sep}") and not is_collective:
            line = f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    return waits, line


def _lost_connection(error: Exception) -> bool:
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "timed out", "socket", "nccl", "gloo")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
