"""Saving of checkpoints: training waits for a copy in host memory, and a thread of rank 0 writes it.

One checkpoint is written at a time. The next one waits for it, as do the end of training, a stop and a rollback. A
checkpoint has its name only once it is complete, so a process that is killed meanwhile resumes from the one before.
All ranks learn whether a checkpoint was written when they next wait for it. Room on disk is checked before training
begins.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.engine.contract import Engine, EngineScalars, ParameterState
from deepspeed_nmt.engine.transfer import HostBuffer
from deepspeed_nmt.errors import ConfigError, shown_bytes
from deepspeed_nmt.files import made
from deepspeed_nmt.parallel.collectives import await_ranks, fail_together, from_main
from deepspeed_nmt.parallel.hardware import host_memory
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.configuration import Save, TrainingConfig
from deepspeed_nmt.train.events import NO_EVENTS, Events
from deepspeed_nmt.train.progress import LogState, Progress

_SHARE = 0.5
"""Largest share of the available host memory that the copy takes. On a CPU, the optimizer's states and gradients
are still to come when it is allocated, and they are as large."""


class Saver:
    """Writer of a run's checkpoints. All ranks build it and call its methods together.

    A context manager, which waits at its end for the checkpoint that is being written.

    Attributes:
        saved_at: update of the newest checkpoint that all ranks know to be written; 0 for none.
    """

    def __init__(
        self,
        store: CheckpointStore,
        engine: Engine,
        world: World,
        watchdog: Watchdog,
        config: TrainingConfig,
        size: int,
        saved_at: int,
        events: Events = NO_EVENTS,
    ) -> None:
        self.saved_at = saved_at
        self._store, self._engine, self._world, self._watchdog = store, engine, world, watchdog
        self._size, self._events = size, events
        self._pending: int | None = None
        self._is_first, self._reported = True, False
        self._problem: str | Future[str] = ""
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._buffer = _buffer(config.save, size, engine) if world.is_main else None
        self._in_background: bool = from_main(self._buffer is not None, world)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        """Wait on this rank until nothing is written any more, and release the copy."""
        self._thread.shutdown()
        if self._buffer is not None:
            self._buffer.close()

    def save(self, progress: Progress, log: Sequence[LogState] = (), *, must: bool) -> None:
        """Take a checkpoint after waiting for the one before, and write it.

        If it ``must`` be written, return afterwards; otherwise an error is logged, and training continues.

        Raises:
            OSError: if it cannot be written, and must be.
        """
        self.finish()
        self._watchdog.at(f"saving update {progress.update}", slow=True)
        self._pending = progress.update
        scalars = self._engine.scalars()
        if not self._world.is_main:
            for _ in self._engine.state(copy=False):
                pass
        elif self._buffer is None:
            self._problem = self._write(progress, log, scalars, self._engine.state(), must)
        else:
            self._buffer.begin()
            states = list(self._engine.state(buffer=self._buffer))
            await_ranks(self._buffer.wait)
            self._problem = self._thread.submit(self._write, progress, log, scalars, states, must)
        if must or not self._in_background:
            problem = self.finish()
            if must and problem:
                with fail_together(self._world):
                    raise OSError(self._failure(progress.update, problem))

    def finish(self) -> str:
        """Wait until the newest checkpoint is written, and return the problem if it could not be."""
        if self._pending is None:
            return ""
        self._watchdog.at(f"writing the checkpoint of update {self._pending} to {self._store.directory}", slow=True)
        own = self._problem.result() if isinstance(self._problem, Future) else self._problem
        problem: str = from_main(own, self._world)
        if not problem:
            self.saved_at = self._pending
        self._pending = None
        return problem

    def _write(
        self,
        progress: Progress,
        log: Sequence[LogState],
        scalars: EngineScalars,
        states: Iterable[ParameterState],
        must: bool,
    ) -> str:
        """Write a checkpoint, and return the problem if there is one; in a thread, or while training waits."""
        since, update = time.monotonic(), progress.update
        try:
            self._store.save(progress, scalars, states, log)
        except OSError as error:
            if not must:
                failure = self._failure(update, str(error))
                logger.error("%s; training continues", failure)
                if not self._reported:
                    self._reported = True
                    self._events.record("unsaved", update, failure)
            return str(error)
        self._reported = False
        if self._is_first:
            self._is_first = False
            if not self.saved_at:
                self._events.record("saved", update, f"the first checkpoint is that of update {update}")
            took = time.monotonic() - since
            logger.info("checkpoint of update %d: %s, written in %.1f s", update, shown_bytes(self._size), took)
        return ""

    def _failure(self, update: int, problem: str) -> str:
        last = f"the last good one is of update {self.saved_at}" if self.saved_at else "there is none yet"
        return (
            f"the checkpoint of update {update} could not be written to {self._store.directory} ({problem}); {last}. "
            "Free some space or lower training.keep_last"
        )


def _buffer(save: Save, size: int, engine: Engine) -> HostBuffer | None:
    """Return the memory for the copy; None if training waits for the writing instead."""
    if save == "blocking":
        return None
    available = host_memory().available
    if size <= _SHARE * available:
        with suppress(RuntimeError):  # how torch reports that there is none
            return HostBuffer(size // 4, engine.device)
    logger.warning(
        "training waits while checkpoints are written: for the background, their copy of %s may take half of the "
        "available host memory, but that is %s",
        shown_bytes(size),
        shown_bytes(available),
    )
    return None


_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_can_save(directory: Path, size: int, config: TrainingConfig, present: int) -> None:
    """Check that checkpoints can be written: by a file, by the free space, and by reserving the room of two of them.

    Reserving finds quotas, which the free space of a disk does not show. Some file systems cannot reserve.

    The directory is made while it is checked. ``size`` is that of a checkpoint, ``present`` the number that exist, of
    which old ones are removed as new ones come.

    Raises:
        ConfigError: if the directory cannot be written to, or has no room.
    """
    count = 2 if config.keep_last + config.keep_best > present else 1
    try:
        with made(directory):
            free, within_quota = shutil.disk_usage(directory).free, True
            if free >= count * size:  # otherwise reserving would take all of it for a moment
                with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                    within_quota = _reserve(file.fileno(), count * size)
                    if within_quota:
                        file.write(b"written")
                        os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written to ({error.strerror or error}), so the run could not be saved; correct "
            "that, or give another --run"
        ) from error
    if free < count * size or not within_quota:
        quota = "" if within_quota else ", of which a quota leaves less"
        raise ConfigError(
            f"the disk of {directory} has {shown_bytes(free)} free{quota}, and {count} more "
            f"checkpoint{'s' * (count > 1)} of {shown_bytes(size)} are to come; free some space, give another --run, "
            "or lower training.keep_last"
        )


def _reserve(descriptor: int, size: int) -> bool:
    """Reserve disk space for a file, and return False if there is not enough.

    glibc's ``posix_fallocate`` would write into every block where the file system cannot reserve.
    """
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):  # not Linux with glibc
        return True
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return fallocate(descriptor, 0, 0, max(1, size)) == 0 or ctypes.get_errno() not in _FULL
