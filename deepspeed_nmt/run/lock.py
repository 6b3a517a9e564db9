"""A lock on a run directory: one training at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.directories import made
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.locks import exclusive

LOCK_FILE = ".lock"
"""File that names the process that trains in a run directory."""


@contextmanager
def run_lock(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Lock a run directory against a second training during the block.

    Args:
        path: run directory. It is made if it does not exist, and removed again if nothing is written into it.
        patience_s: time limit in seconds of waiting for another holder. A network file system may release the lock of
            a lost host late.

    Raises:
        ConfigError: if it is a file.
        DataError: if another process holds the lock.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--run must be a directory, but {path} is a file; give another name")
    refusal = (
        f"--run must not be in use, but {{holder}} is training in {path}; wait for it, or stop it (`kill -USR1` to "
        "that process lets all its ranks save and stop)"
    )
    with made(path), exclusive(path / LOCK_FILE, refusal, patience_s) as locked:
        if not locked:
            logger.warning("%s cannot be locked; do not start the same run twice", path)
        yield
