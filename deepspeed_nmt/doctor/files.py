"""Checks of the file system of the run directory, and of directories for temporary files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, gib, ok, warning

_LEAST_BYTES, _FEW_BYTES = 2**30, 20 * 2**30
"""Free bytes below which a run cannot save any model, and below which it cannot save many large ones."""
_LEAST_FILES = 1000
_WRITTEN_BYTES = 64 * 2**20
"""Bytes that are written to measure the speed."""
_SLOW = 50e6
"""Bytes a second below which checkpoints take minutes."""
_PREFIX = ".doctor-"
_MOUNTS = Path("/proc/self/mounts")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_VOLATILE = ("tmpfs", "ramfs")


@contextlib.contextmanager
def scratch(directory: Path, name: str) -> Iterator[Path]:
    """Yield the path of a file to write in a directory; it is removed at the end.

    Args:
        directory: where to write.
        name: of the file, after the prefix that all of the examination have.
    """
    path = directory / f"{_PREFIX}{name}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def directory(context: JobContext) -> list[Finding]:
    """Check that the run directory can be written and locked, has room, and is fast."""
    place, name = context.directory, f"{context.host}-{os.getpid()}"
    kind = _file_system(place)
    with scratch(place, name) as path:
        try:
            path.write_bytes(b"x")
        except OSError as error:
            return [
                fault(
                    f"the run directory must be writable, but {place} is not ({error.strerror}); "
                    f"{'free some space' if error.errno in _FULL else 'change its permissions'}, or give another one "
                    "by --run"
                )
            ]
        found = [*_room(place), *_lock(path), *_speed(path)]
    if kind in _VOLATILE:
        found.append(
            warning(f"the run directory should outlast a restart of the host, but {place} is in memory ({kind})")
        )
    return [ok(f"{place} is writable ({kind or 'unknown file system'})"), *found]


def _room(place: Path) -> list[Finding]:
    """Return what is wrong with the room of a directory."""
    state = os.statvfs(place)
    free = state.f_bavail * state.f_frsize
    if state.f_files and state.f_favail < _LEAST_FILES:
        return [
            fault(f"{place} must have room for {_LEAST_FILES:,} files, but has for {state.f_favail:,}; remove some")
        ]
    if free < _LEAST_BYTES:
        return [
            fault(
                f"the run directory must have {gib(_LEAST_BYTES)} free for checkpoints, but {place} has {gib(free)}; "
                "free some space, or give another one by --run"
            )
        ]
    if free < _FEW_BYTES:
        return [
            warning(
                f"the run directory should have {gib(_FEW_BYTES)} free, but {place} has {gib(free)}; `deepspeed-nmt "
                "plan` counts what a run needs"
            )
        ]
    return [ok(f"{gib(free)} free")]


def _lock(path: Path) -> list[Finding]:
    """Return what is wrong with locks on a file."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return [
                warning(
                    f"the run directory should be on a file system with locks, but {path.parent} has none "
                    f"({error.strerror}), so nothing prevents a second training of a run; mount it with locks "
                    "(Lustre: -o flock)"
                )
            ]
    return []


def _speed(path: Path) -> list[Finding]:
    """Measure the speed of writing to a file, and return it, or what is wrong."""
    state = os.statvfs(path.parent)
    size = min(_WRITTEN_BYTES, state.f_bavail * state.f_frsize // 4)
    block = os.urandom(2**20)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        path.write_bytes(b"")
    except OSError as error:
        return [
            fault(f"{path.parent} must take what is written, but does not ({error.strerror}); check quota and disk")
        ]
    if size < 2**20:
        return []
    rate = size / seconds
    if rate < _SLOW:
        return [
            warning(
                f"the run directory should take {_SLOW / 1e6:.0f} MB/s, but {path.parent} takes {rate / 1e6:.0f}, "
                f"{12e9 / rate / 60:.0f} minutes for a checkpoint of 12 GB; use a faster file system, or save less "
                "often (training.save_every)"
            )
        ]
    return [ok(f"{rate / 1e6:,.0f} MB/s written and synchronised")]


def _file_system(place: Path) -> str:
    """Return the type of the file system of a directory; "" if it is not known."""
    best, kind = "", ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
        real = str(place.resolve())
    except OSError:
        return ""
    for line in lines:
        words = line.split()
        mount = words[1].replace("\\040", " ")
        if len(mount) >= len(best) and f"{real}/".startswith(f"{mount.rstrip('/')}/"):
            best, kind = mount, words[2]
    return kind


def temporary(context: JobContext) -> list[Finding]:
    """Check the directories in which torch, Triton and DeepSpeed compile."""
    found = []
    home = Path(context.environment.get("HOME", "/"))
    caches = {
        "TMPDIR": Path(tempfile.gettempdir()),
        "TRITON_CACHE_DIR": Path(context.environment.get("TRITON_CACHE_DIR", home / ".triton/cache")),
    }
    for variable, place in caches.items():
        place = existing(place)
        if not os.access(place, os.W_OK):
            found.append(
                fault(f"kernels are compiled in {place}, which must be writable, but is not; set {variable}")
            )
    return found or [ok(f"temporary files in {caches['TMPDIR']}")]


def existing(path: Path) -> Path:
    """Return a directory, or the nearest parent of it that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def write_token(directory: Path, name: str, token: str) -> None:
    """Write a token that other hosts look for.

    Raises:
        OSError: if it cannot be written.
    """
    path = directory / f"{_PREFIX}{name}"
    with path.open("w", encoding="utf-8") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())


def sees_token(directory: Path, name: str, token: str, within_s: float) -> bool:
    """Return True if another host's token appears in a directory in time. Network file systems show it late."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            list(directory.iterdir())  # has NFS look anew
            if (directory / f"{_PREFIX}{name}").read_text(encoding="utf-8") == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def can_lock(directory: Path, name: str) -> bool | None:
    """Return True if a file that another host has locked can be locked here, None if locks do not work at all."""
    try:
        with (directory / f"{_PREFIX}{name}").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
