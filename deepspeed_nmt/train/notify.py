"""The command that a run notifies of its events (``training.notify``).

It runs in the background on rank 0, one event after another, in a session of its own. Its words are split as a shell
splits them, but no shell runs it: nothing in an event can become a command. It gets the event as one line of JSON on
stdin, and in environment variables. It never delays training, and whatever it does, a run goes on.
"""

from __future__ import annotations

import os
import queue
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, shown

LIMIT_S = 60.0
"""Time limit of the command for one event."""
CLOSE_S = 10.0
"""Seconds for which the end of training waits for the command."""
_MAX_WAITING = 100
_RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "DEEPSPEED_NMT_STOP", "DEEPSPEED_NMT_STATUS"),
)
"""Variables by which a program that the command starts would take itself for a rank of this run."""


class _Notice(NamedTuple):
    line: str
    environment: dict[str, str]


def words_of(command: str) -> list[str]:
    """Split a command into words as a shell does.

    Raises:
        ValueError: if a quotation is not closed.
    """
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"must be a command whose quotations are closed, but is {command!r} ({error})") from None


def check_notify(command: str) -> None:
    """Check that the program of a command exists.

    Raises:
        ConfigError: if it does not, or cannot be run.
    """
    words = words_of(command)
    if words and shutil.which(words[0]) is None:
        raise ConfigError(
            f"training.notify must begin with a program that exists, but {shown(words[0])} does not; check its path "
            "and permissions"
        )


class Notifier:
    """Runs a command for some events, in a thread.

    Args:
        command: the command and its arguments; empty for none.
        events: names of the events that it runs for.
        limit_s: time limit of the command, in seconds.
    """

    def __init__(self, command: str, events: Sequence[str], limit_s: float = LIMIT_S) -> None:
        self._words = words_of(command)
        self._events = frozenset(events)
        self._limit_s = limit_s
        self._waiting: queue.Queue[_Notice | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = self._warned = False

    def notify(self, event: str, line: str, run: Path, update: int, text: str) -> None:
        """Run the command for an event, in the background.

        Args:
            event: name of the event.
            line: the event in JSON.
            run: the run directory.
            update: number of updates made.
            text: of the event.
        """
        if not self._words or event not in self._events or self._ending:
            return
        if self._waiting.qsize() >= _MAX_WAITING:
            self._warn(f"is {_MAX_WAITING} events behind")
            return
        variables = {"EVENT": event, "RUN": str(run.absolute()), "UPDATE": str(update), "TEXT": text}
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        environment |= {f"DEEPSPEED_NMT_{name}": value.replace("\0", "") for name, value in variables.items()}
        self._waiting.put(_Notice(line + "\n", environment))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Wait for the command until it has run for all events, at most ``wait_s`` seconds; then kill it."""
        if self._thread is None or self._ending:
            return
        self._waiting.put(None)
        self._thread.join(wait_s)
        self._ending = True
        if self._thread.is_alive():
            self._warn(f"was still running {wait_s:g} s after training had ended, and was killed")
            self._kill()
            self._thread.join(1.0)

    def _work(self) -> None:
        while (notice := self._waiting.get()) is not None and not self._ending:
            try:
                self._run(notice)
            except (OSError, ValueError) as error:
                self._warn(f"could not be run ({error})")

    def _run(self, notice: _Notice) -> None:
        """Run the command once. Files instead of pipes: a process that it leaves behind holds up nothing."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as complaints:
            given.write(notice.line.encode("utf-8", "replace"))
            given.seek(0)
            self._process = subprocess.Popen(
                self._words,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                env=notice.environment,
                start_new_session=True,  # Ctrl-C in the terminal stops the training, not the command
            )
            if self._ending:  # close() had no process to kill
                self._kill()
            try:
                status = self._process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait()
                self._warn(f"took longer than {self._limit_s:g} s, and was killed")
                return
            if status and not self._ending:
                complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - 400))
                said = complaints.read().decode("utf-8", "replace").strip().splitlines()
                self._warn(f"ended with status {status}{f' ({said[-1].strip()})' if said else ''}")

    def _kill(self) -> None:
        """Kill the command and the processes that it started."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _warn(self, what: str) -> None:
        """Warn of a failure, the first one only."""
        if not self._warned:
            self._warned = True
            logger.warning("training.notify: the command %s; training is not affected", what)
