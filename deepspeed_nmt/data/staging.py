"""Replacement of a directory as a whole, by one process at a time.

The new directory is filled under a hidden name beside the old one. A crash leaves either of them: the next call of
:func:`replacing` restores the old directory if it was moved away, and removes what is left of the new one.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import copy_permissions, hidden, hidden_beside, sync_directory
from deepspeed_nmt.locks import exclusive

_NEW, _OLD, _NUMBER = "partial-", "old-", "[0-9a-f]{8}"


@contextmanager
def replacing(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[None]:
    """Hold the right to replace a directory during the block, once what killed processes left is cleared away.

    Args:
        path: of the directory, which need not exist; directories above it are made.
        is_whole: returns True for a directory that may be restored.

    Raises:
        DataError: if another process is replacing it.
        OSError: if the directories above it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"--out must not be in use, but {{holder}} is writing {path}; wait for it, or choose another --out"
    with exclusive(hidden(path, "lock"), refusal) as locked:
        if locked:  # without a lock, the others may be alive
            _clear(path, is_whole)
        yield


def _clear(path: Path, is_whole: Callable[[Path], bool]) -> None:
    for old in hidden_beside(path, _OLD + _NUMBER):
        if not path.exists() and is_whole(old):
            old.rename(path)
            logger.warning("%s is restored: a killed `prepare` had moved it away to replace it", path)
    for orphan in hidden_beside(path, f"({_NEW}|{_OLD}){_NUMBER}"):
        shutil.rmtree(orphan, ignore_errors=True)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Make a directory that replaces ``path`` when the block ends without an error.

    Args:
        path: of the directory, inside :func:`replacing`.

    Yields:
        The path of the new directory, which is removed if the block fails.

    Raises:
        OSError: if it cannot be made or renamed; ``path`` is then unchanged.
    """
    number = uuid.uuid4().hex[:8]
    new, old = hidden(path, _NEW + number), hidden(path, _OLD + number)
    try:
        new.mkdir()
        yield new
        sync_directory(new)
        if path.exists():
            copy_permissions(path.stat(), new)
            path.rename(old)
        new.rename(path)
        sync_directory(path.parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        for rest in (new, old):
            shutil.rmtree(rest, ignore_errors=True)
