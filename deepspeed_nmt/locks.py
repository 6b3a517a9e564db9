"""Locks between processes."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError


@contextmanager
def exclusive(path: Path, refusal: str, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a lock during the block. It is released when the process ends, however it ends.

    Args:
        path: of the lock file, which is removed at the end.
        refusal: message if another process holds the lock, with ``{holder}`` for that process.
        patience_s: time limit in seconds of waiting for another holder. A network file system may release the lock of
            a lost host late.

    Yields:
        True; False without a lock, because the directory is read-only or the file system has no locks.

    Raises:
        DataError: if another process holds the lock.
    """
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                file = _open_locked(path)
                break
            except BlockingIOError:
                left_s = deadline - time.monotonic()
                if left_s <= 0.0:
                    raise
                logger.info("%s is still locked by %s; waiting, %.0f s at most", path, _holder(path), left_s)
                time.sleep(min(left_s, 10.0))
    except BlockingIOError as error:
        raise DataError(refusal.replace("{holder}", _holder(path))) from error
    except OSError:
        yield False
        return
    with file:
        try:
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield True
        finally:
            path.unlink(missing_ok=True)  # before it is released, so it is still this process's file


def _holder(path: Path) -> str:
    holder = ""
    with suppress(OSError):
        holder = path.read_text(encoding="utf-8").strip()
    return holder or "another process"


def _open_locked(path: Path) -> TextIO:
    """Open and lock a file, which need not exist.

    Raises:
        BlockingIOError: if another process holds the lock.
        OSError: if the file cannot be opened or locked.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # a holder that wrote nothing may have removed it
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError:
            path.unlink(missing_ok=True)
            file.close()
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                file.truncate(0)
                return file
        file.close()  # its holder removed it before this process locked it
