"""A lock on a run directory: one training at a time."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError


class RunLock:
    """Lock against a second training in a run directory; released when the process ends, however it ends.

    Args:
        path: run directory; made if it does not exist.
        patience_s: time limit in seconds of waiting for another holder. A network file system may release the lock of
            a lost host late.

    Raises:
        ConfigError: if another process holds the lock.
    """

    def __init__(self, path: Path, patience_s: float = 0.0) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--run must be a directory, but {path} is a file; give another name")
        path.mkdir(parents=True, exist_ok=True)
        self._file = (path / ".lock").open("a+", encoding="utf-8")
        try:
            self._lock(path, patience_s)
        except BlockingIOError as error:
            holder = self._holder()
            self._file.close()
            raise ConfigError(
                f"--run must not be in use, but {holder} is training in {path}; wait for it, or stop it (`kill "
                "-USR1` to that process lets all its ranks save and stop)"
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s); do not start the same run twice", path, error.strerror)
            return
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}")
        self._file.flush()

    def release(self) -> None:
        """Release the lock."""
        self._file.close()

    def _lock(self, path: Path, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0.0:
                    raise
                logger.info("%s is still locked by %s; waiting, %.0f s at most", path, self._holder(), left)
                time.sleep(min(left, 10.0))

    def _holder(self) -> str:
        self._file.seek(0)
        return self._file.read().strip() or "another process"
