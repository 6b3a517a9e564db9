"""Replacement and removal of directories as a whole."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from deepspeed_nmt.files import hidden


def replace_directory(path: Path, new: Path) -> None:
    """Move a directory to ``path``, and remove the one that was there.

    If ``path`` is a symbolic link, it is replaced, and what it leads to stays.

    Args:
        path: which need not exist.
        new: the directory to move.

    Raises:
        OSError: if it cannot be moved; ``path`` is then unchanged.
    """
    old = hidden(path, "old.tmp")
    remove(old)
    replaces = path.is_symlink() or path.is_dir()
    try:
        if replaces:
            path.rename(old)
        new.rename(path)
    finally:
        if replaces and not path.exists():
            old.rename(path)
        remove(old)


def remove_directory(path: Path) -> None:
    """Remove a directory, or the symbolic link that leads to it; errors are ignored.

    It is renamed first, so that a process that is killed does not leave a part of it under its name.
    """
    old = hidden(path, "old.tmp")
    remove(old)
    with suppress(OSError):
        path.rename(old)
        remove(old)


def remove(path: Path) -> None:
    """Remove a directory, a file or a symbolic link, if it exists; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
