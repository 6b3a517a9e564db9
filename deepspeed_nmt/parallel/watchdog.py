"""Ranks that watch one another, so that none waits for long for one that is gone or stuck.

Each rank has a thread that says through a TCP store, every few seconds, what its main thread is at. Rank 0's thread
reads what all say. It passes a verdict when

- a rank gives no sign of life for ``silent_s`` (killed, stopped, its host lost), or
- the rank that is furthest behind has been at one thing longer than that may take.

All ranks then exit with :data:`deepspeed_nmt.errors.EXIT_RANK_LOST`; the main threads, which wait in a collective,
are not asked. Should rank 0 not answer, with whom the store is, the others find out by themselves, with a second
thread: the store lets those who ask it wait for ever.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import EXIT_RANK_LOST, ReportedError
from deepspeed_nmt.parallel.world import World

_PACKAGE = Path(__file__).parents[1]
# Under torchrun a store outlives the ranks that it starts anew.
_KEY = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_GONE = "rank 0, with which all ranks talk, is gone or stopped: {}"
_GRACE = 1.5
"""So many times the others look at the store before rank 0 takes it away."""
_MESSAGE = "%s. All ranks stop; start the same command again to go on from the last checkpoint"


class Watchdog:
    """What this rank is at, and the thread that tells the others. A rank alone watches nothing.

    Args:
        world: all ranks.
        silent_s: seconds after which a rank that gives no sign of life is taken to be gone; 0 watches nothing.
        stuck_s: seconds that a step of the work may take.
        slow_s: the same of steps known to be slow.
        leave: how to end the process.
    """

    def __init__(
        self, world: World, silent_s: float, stuck_s: float, slow_s: float, leave: Callable[[int], Any] = os._exit
    ) -> None:
        self._world, self._silent_s, self._stuck_s, self._slow_s, self._leave = (
            world,
            silent_s,
            stuck_s,
            slow_s,
            leave,
        )
        self._interval_s = silent_s / 6
        self._at = ("starting", 0, time.monotonic(), slow_s)
        self._threads: list[threading.Thread] = []
        self._answered = time.monotonic()
        self._ended = threading.Event()
        self._failing = False
        self._store: Any = None

    def at(self, what: str, slow: bool = False) -> None:
        """Note what the main thread begins."""
        self._at = (what, self._at[1] + 1, time.monotonic(), self._slow_s if slow else self._stuck_s)

    def __enter__(self) -> Watchdog:
        if self._world.ranks == 1 or self._silent_s <= 0.0:
            return self
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=self._silent_s),
        )
        self._tell(0)
        self._answered = time.monotonic()
        for work in (self._watch, self._guard):
            self._threads.append(threading.Thread(target=work, name="watchdog", daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._threads:
            return
        if isinstance(error, Exception) and not isinstance(error, ReportedError):
            self._failed(error)
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=self._silent_s)
        if kind is None:
            with suppress(Exception):  # the work is done, whatever becomes of the store
                self._done()

    def _done(self) -> None:
        """A rank that is done is not silent; rank 0, with whom the store goes, waits for the others."""
        self._store.set(f"{_KEY}/{self._world.rank}", json.dumps({"done": True}))
        deadline = time.monotonic() + self._silent_s
        while self._world.is_main and time.monotonic() < deadline:
            said = [json.loads(self._store.get(f"{_KEY}/{rank}")) for rank in range(self._world.ranks)]
            if all(each.get("done") for each in said):
                return
            time.sleep(0.05)

    def _failed(self, error: Exception) -> None:
        """The main thread has failed. The first to say so is to blame, unless it only lost touch with another."""
        if _lost_touch(error):
            # Who is to blame gives no sign of life, or says so at this moment.
            self._ended.wait(self._silent_s + 3 * self._interval_s)
            return
        self._failing = True  # this rank ends by itself, and says why
        logger.info("failed in %s", self._at[0], exc_info=error)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self._pass_verdict(f"rank {self._world.rank} on {socket.gethostname()} failed in {self._at[0]}: {text}")
        if self._world.is_main:  # the store goes with it
            self._ended.wait(_GRACE * self._interval_s)

    def _guard(self) -> None:
        """See to it that the store answers."""
        while not self._ended.wait(self._interval_s):
            if time.monotonic() - self._answered > self._silent_s + self._interval_s:
                self._stop(_GONE.format(f"no answer for {self._silent_s:.0f} s"))

    def _watch(self) -> None:
        """Tell the others, and hear what is to be done."""
        heard = {rank: (-1, time.monotonic(), "") for rank in range(self._world.ranks)}
        beat, main = 0, (-1, time.monotonic())
        while not self._ended.wait(self._interval_s):
            beat += 1
            try:
                self._tell(beat)
                verdict = self._verdict()
                if not verdict and self._world.is_main and (verdict := self._judge(heard)):
                    self._pass_verdict(verdict)
                elif not verdict:
                    main = self._heard_of_main(main)
                    if time.monotonic() - main[1] > self._silent_s + self._interval_s:
                        verdict = _GONE.format(f"no sign of life for {self._silent_s:.0f} s")
                self._answered = time.monotonic()
            except Exception as problem:  # of the store
                verdict = "" if self._ended.is_set() else _GONE.format(str(problem).split("\n")[0])
            if verdict:
                self._stop(verdict)

    def _heard_of_main(self, before: tuple[int, float]) -> tuple[int, float]:
        """Rank 0's last beat, and when it was new: the store can answer where rank 0 does not."""
        said = json.loads(self._store.get(f"{_KEY}/0")) if self._store.check([f"{_KEY}/0"]) else {}
        if said.get("done") or said.get("beat", -1) != before[0]:
            return said.get("beat", -1), time.monotonic()
        return before

    def _tell(self, beat: int) -> None:
        what, step, since, may_take_s = self._at
        left_s = may_take_s - (time.monotonic() - since)
        said = {"beat": beat, "step": step, "at": what, "left": left_s, "host": socket.gethostname()}
        said["waits"], said["line"] = _main_thread()
        self._store.set(f"{_KEY}/{self._world.rank}", json.dumps(said))

    def _verdict(self) -> str:
        key = f"{_KEY}/verdict"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _pass_verdict(self, text: str) -> None:
        """The first one counts."""
        self._store.compare_set(f"{_KEY}/verdict", "", text)

    def _judge(self, heard: dict[int, tuple[int, float, str]]) -> str:
        now = time.monotonic()
        said: dict[int, dict[str, Any]] = {}
        for rank in range(self._world.ranks):
            key = f"{_KEY}/{rank}"
            if self._store.check([key]):
                said[rank] = json.loads(self._store.get(key))
        silent = []
        for rank, (beat, since, _) in heard.items():
            told = said.get(rank, {})
            if told.get("done"):
                continue
            if told.get("beat", -1) != beat:
                heard[rank] = (told["beat"], now, f"{told['at']} on {told['host']}")
            elif now - since > self._silent_s:
                silent.append(rank)
        if silent:
            first = min(silent)
            last = heard[first][2]
            more = f", and so are {len(silent) - 1} more" if len(silent) > 1 else ""
            return (
                f"rank {first} is gone or stopped{more}: no sign of life for {self._silent_s:.0f} s"
                f"{f'; it was last in {last}' if last else ''}"
            )
        at_work = {rank: told for rank, told in said.items() if not told.get("done")}
        if len(at_work) < self._world.ranks:
            return ""
        # In the same step as others, who does not wait for them is to blame.
        order = {rank: (told["step"], told["waits"]) for rank, told in at_work.items()}
        behind = [rank for rank in sorted(order) if order[rank] == min(order.values())]
        told = at_work[behind[0]]
        if told["left"] >= 0.0:
            return ""
        where = "; ".join(f"rank {rank} on {at_work[rank]['host']} in {at_work[rank]['line']}" for rank in behind[:8])
        if len(behind) == 1:
            return f"rank {behind[0]} is stuck in {told['at']}, which takes longer than it may ({where})"
        more = "" if len(behind) <= 8 else f"; and {len(behind) - 8} more"
        return f"one of {len(behind)} ranks is stuck in {told['at']}, which takes longer than it may ({where}{more})"

    def _stop(self, verdict: str) -> None:
        if self._failing:
            return
        # Rank 0 is the last: the store goes with it. Whatever becomes of the message, the end comes.
        stay_s = _GRACE * self._interval_s if self._world.is_main else 0.0
        threading.Timer(stay_s + 5.0, self._leave, [EXIT_RANK_LOST]).start()
        # One rank of each host speaks; of rank 0's host another, where that is gone.
        speaks = (0, 1) if verdict.startswith("rank 0") else (0,)
        if self._world.local_rank in speaks:
            logger.error(_MESSAGE, verdict)
        else:
            logger.info(_MESSAGE, verdict)
        time.sleep(stay_s)
        self._leave(EXIT_RANK_LOST)


def _main_thread() -> tuple[bool, str]:
    """Whether the main thread is in a collective, as far as Python knows, and which line of ours it carries out."""
    waits, line = False, "no line of this program"
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = frame.f_code.co_filename
        waits = waits or "/torch/distributed/" in file or "/deepspeed/comm/" in file
        if file.startswith(f"{_PACKAGE}{os.sep}"):
            line = f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno}"
            break
        frame = frame.f_back
    return waits, line


def _lost_touch(error: Exception) -> bool:
    """Whether an error says no more than that another rank could not be reached."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "broken pipe", "timed out", "socket", "nccl", "gloo")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
