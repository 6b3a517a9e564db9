"""Replacement and removal of directories as a whole.

The new directory is filled under a hidden name beside the old one, which is moved away and then removed. A process
that is killed leaves one of them, or both: :func:`restore_directory` brings the old one back if nothing has its name,
and :func:`clear_hidden` removes the rest.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import copy_permissions, hidden, hidden_beside, sync_directory
from deepspeed_nmt.locks import exclusive

_PARTIAL, _OLD, _NUMBER = "partial-", "old-", "[0-9a-f]{8}"
_LEFT = rf"(?:(?:{_PARTIAL}|{_OLD}){_NUMBER}|(?:old\.)?tmp)"
"""Ends of hidden names, those of older versions among them."""


@contextmanager
def made(path: Path) -> Iterator[None]:
    """Make a directory, and those above it. At the end of the block, those of them that are empty are removed again.

    Args:
        path: of the directory; one that exists stays.

    Raises:
        OSError: if it cannot be made.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, and so are those above it
            for each in missing:
                each.rmdir()


@contextmanager
def replacing(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[None]:
    """Hold the right to replace a directory during the block, once what killed processes left is cleared away.

    Args:
        path: of the directory, given by ``--out``, which need not exist; directories above it are made.
        is_whole: returns True for a directory that may be restored.

    Raises:
        DataError: if another process is replacing it.
        OSError: if the directories above it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"--out must not be in use, but {{holder}} is writing {path}; wait for it, or choose another --out"
    with exclusive(hidden(path, "lock"), refusal) as locked:
        if locked:  # without a lock, the others may be alive
            restore_directory(path, is_whole)
            clear_hidden(path)
        yield


def restore_directory(path: Path, is_whole: Callable[[Path], bool]) -> None:
    """Restore a directory that a killed process had moved away to replace it, if nothing has its name.

    Args:
        path: of the directory.
        is_whole: returns True for a directory that may be restored.
    """
    for old in hidden_beside(path, _OLD + _NUMBER):
        if not _exists(path) and is_whole(old):
            with suppress(FileNotFoundError):  # another rank has restored it
                old.rename(path)
                logger.warning("%s is restored: a killed process had moved it away to replace it", path)


def clear_hidden(path: Path) -> None:
    """Remove what killed processes left of a directory under hidden names."""
    for rest in hidden_beside(path, _LEFT):
        remove(rest)


def restore_directories(directory: Path, names: str, is_whole: Callable[[Path], bool], *, clear: bool) -> None:
    """Restore those directories in another one that killed processes had moved away to replace them.

    Args:
        directory: that they are in.
        names: regular expression of their names.
        is_whole: returns True for a directory that may be restored.
        clear: True to remove what else is left of them, which no living process may be writing.

    Raises:
        OSError: if one cannot be restored.
    """
    pattern = re.compile(rf"\.({names})\.{_LEFT}")
    found = filter(None, (pattern.fullmatch(path.name) for path in directory.glob(".*")))
    for name in sorted({match[1] for match in found}):
        restore_directory(directory / name, is_whole)
        if clear:
            clear_hidden(directory / name)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Make a directory that replaces ``path`` when the block ends without an error.

    Only one process may replace it at a time. If ``path`` is a symbolic link, it is replaced, and what it leads to
    stays.

    Args:
        path: of the directory, which need not exist.

    Yields:
        The path of the new directory, which is removed if the block fails.

    Raises:
        OSError: if it cannot be made or renamed; ``path`` is then unchanged.
    """
    number = uuid.uuid4().hex[:8]
    new, old = hidden(path, _PARTIAL + number), hidden(path, _OLD + number)
    try:
        new.mkdir()
        yield new
        sync_directory(new)
        if path.exists():
            copy_permissions(path.stat(), new)
        if path.is_symlink() or path.is_dir():
            path.rename(old)
        new.rename(path)
        sync_directory(path.parent)
    finally:
        if _exists(old) and not _exists(path):
            old.rename(path)
        for rest in (new, old):
            remove(rest)


def remove_directory(path: Path) -> None:
    """Remove a directory, or the symbolic link that leads to it; errors are ignored.

    It is renamed first, so that a process that is killed does not leave a part of it under its name.
    """
    rest = hidden(path, _PARTIAL + uuid.uuid4().hex[:8])
    with suppress(OSError):
        path.rename(rest)
        remove(rest)


def remove(path: Path) -> None:
    """Remove a directory, a file or a symbolic link, if it exists; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def _exists(path: Path) -> bool:
    """Return True if there is anything of this name, even a symbolic link that leads nowhere."""
    return path.is_symlink() or path.exists()
