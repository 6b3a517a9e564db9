"""Room for checkpoints on disk: checked before training begins, and watched while it runs."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deepspeed_nmt.console import logger
from deepspeed_nmt.directories import made
from deepspeed_nmt.errors import ConfigError, shown_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Rotation:
    """Number of checkpoints of a run that are on disk at once.

    Attributes:
        keep_last: number of newest checkpoints that are kept.
        keep_best: True if the best one is kept besides.
    """

    keep_last: int
    keep_best: bool

    @property
    def most(self) -> int:
        """Largest number at once: those that are kept, and the one being written."""
        return self.keep_last + int(self.keep_best) + 1

    def to_come(self, present: int) -> int:
        """Return the number of checkpoints that are still to be written before one is removed for each.

        Args:
            present: number of checkpoints that exist.
        """
        return max(1, self.most - present)

    def __str__(self) -> str:
        best = " and the best one" if self.keep_best else ""
        return f"training.keep_last={self.keep_last}{best}"


def check_can_save(directory: Path, size: int, rotation: Rotation, present: int) -> None:
    """Check that checkpoints can be written: by a file, by the free space, and by reserving the room of two of them.

    Reserving finds quotas, which the free space of a disk does not show. Some file systems cannot reserve.

    Args:
        directory: of the checkpoints; made while it is checked, if it does not exist.
        size: of a checkpoint in bytes.
        rotation: number of checkpoints that are on disk at once.
        present: number of checkpoints that exist.

    Raises:
        ConfigError: if the directory cannot be written to, or has no room.
    """
    count = min(2, rotation.to_come(present))
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
            f"{directory} must be writable to save the run, but is not ({error.strerror or error}); correct that, or "
            "give another --run"
        ) from error
    if free < count * size or not within_quota:
        remedies = "give another --run, or lower training.keep_last" if present else "or give another --run"
        quota = "" if within_quota else ", of which a quota leaves less"
        raise ConfigError(
            f"{directory} must have room for {count} more checkpoint{'s' * (count > 1)} of {shown_bytes(size)}, but "
            f"its disk has {shown_bytes(free)} free{quota}; free some space, {remedies}"
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


class DiskWatch:
    """Warnings of a disk that has no room for all checkpoints to come.

    Args:
        directory: of the checkpoints.
        rotation: number of checkpoints that are on disk at once.
    """

    def __init__(self, directory: Path, rotation: Rotation) -> None:
        self._directory = directory
        self._rotation = rotation
        self._room: int | None = None

    def __call__(self, size: int, present: int) -> None:
        """Warn if the disk has too little room, unless it has as much as at the warning before.

        Args:
            size: of a checkpoint in bytes.
            present: number of checkpoints that exist.
        """
        free = shutil.disk_usage(self._directory).free
        needed, room = self._rotation.to_come(present), free // max(1, size)
        if room >= needed:
            self._room = None
            return
        if room != self._room:
            logger.warning(
                "the disk of %s is nearly full: it has %s free, room for %d of the %d checkpoints of %s that %s "
                "still need, the one being written included; free some space, or lower training.keep_last",
                self._directory,
                shown_bytes(free),
                room,
                needed,
                shown_bytes(size),
                self._rotation,
            )
        self._room = room
