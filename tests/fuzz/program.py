"""A command, run in this process and watched: its status, its output, and the files that it changes."""

import io
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from deepspeed_nmt.cli import main

DOCUMENTED = {0, 1, 2}
"""Statuses of a command that no signal stops (docs/launch.md)."""
LIMIT_CPU_S, LIMIT_S = 60.0, 600.0
"""Bounds on a command: seconds of computing, and seconds in all, of which other programs may take most."""
_TICK_S = 2.0
MEMORY_BYTES = 6 << 30
"""Memory that a command may take beyond what the process has."""
LONGEST_MESSAGE = 20_000
JARGON = ("Traceback", "Logging error", "Value error", "validation error", "Input should", "During handling of")
"""Words of libraries that no message may contain."""
DEBRIS = re.compile(r"\.tmp$|\.partial-|\.old-")
SCRATCH = "scratch"
"""Directory for temporary files, in the one of the test."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}
_CACHES = ("__pycache__", "/dev/", "/proc/", "matplotlib", "torchinductor")


@dataclass(frozen=True)
class Outcome:
    """The end of a command."""

    status: int
    out: bytes
    err: str


class Hang(BaseException):
    """A command takes too long. No `except Exception` of the command catches it."""


class Guard:
    """Refuses to change files outside a directory while it is set, and records what was tried."""

    def __init__(self) -> None:
        self.inside: str | None = None
        self.tried: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        inside = self.inside  # another thread may reach this while it is unset
        if inside is None:
            return
        if event == "open":
            paths = [values[0]] if isinstance(values[2], int) and values[2] & _WRITING else []
        else:
            paths = list(values[:2]) if event in _CHANGES else []
        for path in paths:
            if not isinstance(path, str | bytes | os.PathLike):
                continue
            name = os.path.join(inside, os.fsdecode(path))  # noqa: PTH118  (Path would change the name)
            where = os.path.normpath(name)
            if not where.startswith(inside) and not any(cache in where for cache in _CACHES):
                self.tried.append(f"{event} {where}")
                raise PermissionError(13, "outside the directory of the test", where)


_guard = Guard()


def run_program(
    words: Sequence[str], place: Path, may_change: Collection[str] = (), stdin: bytes = b"", named: str = ""
) -> Outcome:
    """Run a command in a directory, and check that it ends as documented.

    Args:
        words: the command line.
        place: working directory. Files outside it must not change.
        may_change: paths that the command may change, with all below them.
        stdin: standard input.
        named: description of the case, for messages.

    Raises:
        AssertionError: if the status, the message or the files changed are not as documented.
    """
    told = f"{named}\ndeepspeed-nmt {' '.join(map(repr, words))}"
    scratch = place / SCRATCH
    scratch.mkdir(exist_ok=True)
    before = snapshot(place)
    streams = [
        io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)), "utf-8", "surrogateescape"),
        io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", write_through=True),
        io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True),
    ]
    out, err = streams[1].buffer, streams[2].buffer
    assert isinstance(out, io.BytesIO) and isinstance(err, io.BytesIO)
    _guard.tried.clear()
    try:
        with _isolated(place, streams):
            status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else -1
    except (Exception, Hang) as error:
        raise AssertionError(told) from error
    said = err.getvalue().decode()
    told = f"{told}\nstatus {status}\n{said[-3000:]}"
    assert not _guard.tried, f"{told}\nchanged outside its directory: {_guard.tried}"
    assert status in DOCUMENTED, told
    assert not [word for word in JARGON if word in said], told
    assert len(said) <= LONGEST_MESSAGE, told
    assert status == 0 or re.search(r"error: |stopped: ", said), told
    after = snapshot(place)
    changed = sorted(before.keys() ^ after.keys())
    changed += [path for path in before.keys() & after.keys() if before[path] != after[path]]
    assert not [path for path in changed if DEBRIS.search(path)], f"{told}\nleft {changed}"
    allowed = [Path(os.path.normpath(path)) for path in may_change]

    def is_covered(path: Path) -> bool:
        """Return True for a path that is allowed, below one, or a directory above one."""
        return any(path == other or other in path.parents or path in other.parents for other in allowed)

    unnamed = [path for path in changed if not is_covered(Path(path)) and not any(c in path for c in _CACHES)]
    assert not unnamed, f"{told}\nchanged {unnamed}"
    return Outcome(status, out.getvalue(), said)


def snapshot(place: Path) -> dict[str, tuple[int, ...]]:
    """Size and time of change of everything in a directory, by relative path."""
    files = {}
    for path in place.rglob("*"):
        status = path.lstat()
        changing = () if path.is_dir() and not path.is_symlink() else (status.st_size, status.st_mtime_ns)
        files[str(path.relative_to(place))] = (status.st_ino, *changing)
    return files


@contextmanager
def _isolated(place: Path, streams: list[io.TextIOWrapper]) -> Iterator[None]:
    """Run the block in a directory with its own streams, and with bounds on time, memory and what it may change."""
    environment, directory, temporary = dict(os.environ), Path.cwd(), tempfile.tempdir
    kept = sys.stdin, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    began = time.monotonic()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(place / SCRATCH)  # otherwise `train` makes one, until the process ends
    os.chdir(place)
    tempfile.tempdir = str(place / SCRATCH)
    sys.stdin, sys.stdout, sys.stderr = streams
    handler = signal.signal(signal.SIGALRM, _deadline())
    left, _ = signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    _guard.inside = str(place)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        _guard.inside = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.1, left - (time.monotonic() - began)))
        for number, previous in handlers.items():
            signal.signal(number, previous)
        sys.stdin, sys.stdout, sys.stderr = kept
        os.chdir(directory)
        tempfile.tempdir = temporary
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)


def _deadline() -> Callable[[int, FrameType | None], None]:
    """Return a handler of the timer's signal that ends a command at its limits."""
    began, computed = time.monotonic(), time.process_time()

    def check(number: int, frame: FrameType | None) -> None:
        seconds, cpu_seconds = time.monotonic() - began, time.process_time() - computed
        if seconds > LIMIT_S or cpu_seconds > LIMIT_CPU_S:
            raise Hang(f"still running after {seconds:.0f} s, {cpu_seconds:.0f} s of computing")

    return check
