"""Memory of this host, within the limits of the process's control groups: a container, or a job of SLURM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

UNKNOWN = 1 << 62
"""Bytes where the system does not tell: too many to matter."""


class HostMemory(NamedTuple):
    """Memory in bytes.

    Attributes:
        total: of the host, or the lowest limit of a control group if that is less.
        available: what this process can still take; the system can take back its cache of files, so that is included.
        is_limited: True if a control group has less than the host.
    """

    total: int
    available: int
    is_limited: bool


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the memory of this host.

    Args:
        root: root of the file system that describes it.
    """
    sizes = {"MemTotal": UNKNOWN, "MemAvailable": UNKNOWN}
    for line in _lines(root / "proc/meminfo"):
        name, _, size = line.partition(":")
        if name in sizes:
            sizes[name] = int(size.split()[0]) << 10
    groups = list(_groups(root))
    total = min([sizes["MemTotal"], *(limit for limit, _ in groups)])
    available = min([sizes["MemAvailable"], *(limit - used for limit, used in groups)])
    return HostMemory(total, max(0, available), total < sizes["MemTotal"])


def available_bytes() -> int:
    """Return the host memory in bytes that this process can still take."""
    return host_memory().available


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit in bytes of each control group of this process that has one, and what is in use."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:  # version 2
            yield from _around(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _around(root / "sys/fs/cgroup/memory", path, *files)


def _around(top: Path, path: str, limit_file: str, usage_file: str) -> Iterator[tuple[int, int]]:
    """Yield limit and use of a control group and of those around it.

    Inside a container the path may be that of the host; then only the top is there.
    """
    group = top / path.lstrip("/")
    for directory in (group, *group.parents):
        limit, usage = _lines(directory / limit_file), _lines(directory / usage_file)
        if limit and limit[0].isdecimal():
            cached = [
                int(line.split()[1])
                for line in _lines(directory / "memory.stat")
                if line.startswith(("inactive_file ", "total_inactive_file "))  # the second also in groups inside
            ]
            used = int(usage[0]) if usage and usage[0].isdecimal() else 0
            yield int(limit[0]), max(0, used - max(cached, default=0))
        if directory == top:
            return


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
