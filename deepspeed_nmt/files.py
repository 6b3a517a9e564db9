"""Hashing, reading, locking and atomic writing of files and directories.

A file is written under a temporary name beside it, then renamed. A process that is killed leaves its temporary file
behind. The next one that writes the same file removes it: a living process holds a lock on its temporary file, which
the kernel releases when the process ends, however it ends.

A directory is filled under a hidden name beside the old one, which is moved away and then removed. A process that is
killed leaves one of them, or both: :func:`restore_directory` brings the old one back if nothing has its name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import time
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, TextIO

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.text import text_of

_BLOCK_BYTES = 1 << 20
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors that writing has and reading has not."""
_NUMBER = "[0-9a-f]{8}"
_LEFT = rf"(?:partial|old)-{_NUMBER}"
"""End of the hidden name of a directory that is written, or moved away."""
MAX_LINE_BYTES = 1 << 26
"""Bound of a line of text, far above any sentence: a device can be one line without an end."""
ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60)))
"""First bytes of data of Zstandard: of a frame, or of one that readers skip, with which pzstd begins."""
_NOT_PLAIN = {
    b"\x1f\x8b": ("compressed with gzip", "gunzip -k"),
    b"BZh": ("compressed with bzip2", "bunzip2 -k"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unxz -k"),
    **dict.fromkeys(ZSTD, ("compressed with zstd", "unzstd")),
    b"PK\x03\x04": ("compressed with zip", "unzip"),
    BOM_UTF16_LE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    BOM_UTF16_BE: ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
}
"""First bytes of files that are not UTF-8 text, with what they are and the command that makes text of them."""


def open_regular(path: Path) -> BufferedReader[Any]:
    """Open a file to read. A pipe or a device in its place is an error, since reading it may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is opened without waiting for its writer
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")  # noqa: PTH123
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device; put a file in its place", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file."""
    with open_regular(path) as file:
        return file.read()


def system_lines(file: Path | str) -> list[str]:
    """Return the lines of a file of the operating system, such as /proc/cpuinfo; none if it has no such file."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file in hexadecimal."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def open_text(name: Path | str) -> Iterator[BufferedReader]:
    """Open text to read: a file, a pipe, or standard input (``-``); raise a DataError if it is missing or unreadable.

    A pipe can be opened and read only once. So its first bytes are examined by :func:`text_lines`, when it is read.
    """
    if str(name) == "-":
        yield sys.stdin.buffer  # type: ignore[misc]  # typed as BinaryIO, which has no peek()
        return
    try:
        stream = Path(name).open("rb")  # noqa: SIM115
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist; check the path") from error
    except IsADirectoryError as error:
        raise DataError(f"{name} is a directory; give a file in it") from error
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from error
    with stream:
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            check_plain(stream, name)
        yield stream


def check_plain(stream: BufferedReader[Any], name: Path | str) -> None:
    """Check the first bytes of a stream, which are left in it."""
    start = stream.peek(max(map(len, _NOT_PLAIN)))
    for magic, (kind, command) in _NOT_PLAIN.items():
        if start.startswith(magic):
            command = f"{command} {name}" if Path(name).is_file() else command.removesuffix(" -k")
            raise DataError(f"{shown_name(name)} is {kind}; run `{command}` first")


def skip_byte_order_mark(stream: BufferedReader[Any]) -> bool:
    """Skip a byte order mark at the beginning of a stream, which is not text, and return True if it has one."""
    marked = stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8)
    if marked:
        stream.read(len(BOM_UTF8))
    return marked


def shown_name(name: Path | str) -> str:
    """Return the name of a text for messages."""
    return "standard input" if str(name) == "-" else str(name)


def text_lines(stream: BufferedReader[Any], name: Path | str = "the text") -> Iterator[str]:
    """Yield lines of UTF-8 text, without their ends, and without a byte order mark at the beginning.

    Only line feeds end a line; other line breaks of Unicode are part of the text. Bytes that are not UTF-8 become
    U+FFFD, so no line is lost; such a line is a :class:`~deepspeed_nmt.text.DamagedLine`.
    """
    return map(text_of, raw_lines(stream, name))


def raw_lines(stream: BufferedReader[Any], name: Path | str) -> Iterator[bytes]:
    """Yield lines of text with their ends, and without a byte order mark at the beginning.

    A stream that is compressed or UTF-16, or a line of more than :data:`MAX_LINE_BYTES`, is a DataError.
    """
    check_plain(stream, name)
    skip_byte_order_mark(stream)
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"line {number:,} of {shown_name(name)} has more than {MAX_LINE_BYTES >> 20} MiB; check the path"
            )
        yield line


def sync_directory(path: Path) -> None:
    """Flush a directory to disk, so that files created, renamed or removed in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_json(text: bytes | str) -> Any:
    """Parse JSON from a file that may be damaged."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the nesting is too deep") from error


def append_line(file: Path, line: str) -> None:
    """Append a line by one write. A line that a process died in is ended first, so that it damages no other."""
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, ("\n" * torn + line + "\n").encode("utf-8", "replace"))
    finally:
        os.close(descriptor)


def is_replaceable(path: Path) -> bool:
    """Return True if a path is that of a file, or of none yet; pipes, devices and open descriptors are written to."""
    return _descriptor(path) is None and (path.is_file() or not path.exists())


def replaces(path: Path, stream: IO[Any]) -> bool:
    """Return True if writing to ``path`` replaces the file that a stream reads, under whatever name it was opened."""
    if _descriptor(path) is not None:
        return False
    try:
        old, read = path.stat(), os.fstat(stream.fileno())
    except OSError:  # a new file, or a stream that is none
        return False
    return stat.S_ISREG(old.st_mode) and os.path.samestat(old, read)


def check_utf8_name(path: Path | str, name: str) -> None:
    """Check that a path can be recorded in JSON, and opened by libraries that take UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        with suppress(UnicodeDecodeError):
            decoded = os.fsencode(path).decode()
            locale = sys.getfilesystemencoding()
            raise DataError(
                f"the name of {name}, {decoded}, is UTF-8, but the locale's encoding is {locale}; set LC_ALL=C.UTF-8"
            ) from None
        shown = str(path).encode(errors="backslashreplace").decode()
        raise DataError(f"the name of {name} is not UTF-8: {shown}; rename it") from error


def resolved(path: Path) -> Path:
    """Return a path without symbolic links; it need not exist."""
    try:
        return path.resolve()
    except RuntimeError as error:  # of Python before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def hidden(path: Path, suffix: str) -> Path:
    """Return the path of a hidden file beside ``path``, whose name is cut if it would be too long."""
    short = path.name.encode("utf-8", errors="ignore")[:200].decode("utf-8", errors="ignore")
    return path.with_name(f".{short}.{suffix}")


def _hidden_beside(path: Path, suffix: str) -> list[Path]:
    """Return the hidden files beside ``path`` that belong to it and end in ``suffix``, a regular expression."""
    pattern = re.compile(re.escape(hidden(path, "").name) + suffix)
    return [other for other in path.parent.iterdir() if pattern.fullmatch(other.name)]


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file; see :func:`atomic_writer`."""
    with atomic_writer(path) as file:
        file.write(data)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace the content of a file by UTF-8 text; see :func:`atomic_writer`."""
    atomic_write_bytes(path, text.encode())


@contextmanager
def atomic_writer(path: Path, mode: str = "wb") -> Iterator[Any]:
    """Open a file that replaces ``path`` when the block ends without an error; otherwise ``path`` is unchanged.

    After a crash it has either the old or the new content. A file that exists keeps its permissions. If ``path`` is a
    symbolic link, the file that it leads to is replaced. Pipes, devices and open descriptors (``/dev/stdout``,
    ``/dev/fd/3``) are written to directly. ``mode`` is "wb" for bytes, "w" for text in UTF-8.
    """
    options: dict[str, Any] = {} if mode == "wb" else {"encoding": "utf-8", "newline": "\n"}
    if not is_replaceable(path):
        descriptor = _descriptor(path)
        # A descriptor is written to where it stands: opened by its path, a file would be truncated.
        with open(path if descriptor is None else os.dup(descriptor), mode, **options) as file:  # noqa: PTH123
            yield file
        return
    path = resolved(path)
    _remove_orphans(_hidden_beside(path, rf"{_NUMBER}\.tmp"))
    old = path.stat() if path.is_file() else None
    temporary, descriptor = _create_locked(path, 0o666 if old is None else 0o600)
    try:
        # It is renamed before it is closed, which releases the lock.
        with open(descriptor, mode, **options) as file:  # noqa: PTH123
            yield file
            file.flush()
            if old is not None:
                copy_permissions(old, descriptor)
            os.fsync(descriptor)
            temporary.replace(path)
    except OSError as error:
        if error.errno in _OF_WRITING and error.filename is None:
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _descriptor(path: Path) -> int | None:
    """Return the open descriptor that a path names; None if it names none."""
    named = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
    if match := re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path)):
        return int(match[1])
    return named.get(str(path))


def copy_permissions(old: os.stat_result, new: int | Path) -> None:
    """Give a file the mode of an older one, and its owner and group as far as this user may."""
    for owner in (old.st_uid, -1):
        with suppress(PermissionError):
            os.chown(new, owner, old.st_gid)
            break
    os.chmod(new, stat.S_IMODE(old.st_mode))  # noqa: PTH101


def _create_locked(path: Path, mode: int) -> tuple[Path, int]:
    """Create a temporary file for ``path`` and lock it, and return its path and descriptor."""
    while True:
        temporary = hidden(path, f"{token_hex(4)}.tmp")
        try:
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            with suppress(OSError):  # a file system without locks, where orphans stay
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return temporary, descriptor
        except BaseException:  # such as a signal
            temporary.unlink(missing_ok=True)
            raise
        os.close(descriptor)  # taken for an orphan, and removed, before it was locked


def remove_orphans(directory: Path) -> None:
    """Remove the temporary files in a directory whose processes have ended."""
    pattern = re.compile(rf"\..*\.{_NUMBER}\.tmp", re.DOTALL)
    _remove_orphans(path for path in directory.glob(".*.tmp") if pattern.fullmatch(path.name))


def _remove_orphans(temporary: Iterable[Path]) -> None:
    for path in temporary:
        with suppress(OSError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def exclusive(path: Path, refusal: str, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a lock during the block. It is released when the process ends, however it ends.

    If another process holds it after ``patience_s``, ``refusal`` is a DataError, in which {holder} is its name. Yield
    False without a lock, because the directory is read-only or the file system has no locks.
    """
    deadline = time.monotonic() + patience_s
    try:
        while (file := _open_locked(path)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise DataError(refusal.replace("{holder}", _holder(path)))
            logger.info("%s is still locked by %s; waiting, %.0f s at most", path, _holder(path), left_s)
            time.sleep(min(left_s, 10.0))
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
        holder = read_regular(path).decode(errors="replace").strip()
    return holder or "another process"


def _open_locked(path: Path) -> TextIO | None:
    """Open and lock a file, which need not exist; return None if another process holds it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # a holder that wrote nothing may have removed it
        # No link is followed: a run from elsewhere would have its target emptied.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        file = os.fdopen(number, "a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if isinstance(error, BlockingIOError):
                return None
            path.unlink(missing_ok=True)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                file.truncate(0)
                return file
        file.close()  # its holder removed it before this process locked it


@contextmanager
def made(path: Path) -> Iterator[None]:
    """Make a directory and those above it; remove those that are empty at the end of the block."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, and so are those above it
            for directory in missing:
                directory.rmdir()


@contextmanager
def replacing(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[None]:
    """Hold the right to replace a directory during the block, once what killed processes left is cleared away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"{{holder}} is writing {path}; wait for it, or choose another --out"
    with exclusive(hidden(path, "lock"), refusal) as locked:
        if locked:  # without a lock, the others may be alive
            restore_directory(path, is_whole, clear=True)
        yield


def restore_directory(path: Path, is_whole: Callable[[Path], bool], *, clear: bool) -> None:
    """Restore a directory that a killed process had moved away to replace it, if nothing has its name.

    With ``clear``, what else is left of it is removed, which no living process may be writing.
    """
    for rest in _hidden_beside(path, _LEFT):
        if rest.suffix.startswith(".old-") and not os.path.lexists(path) and is_whole(rest):
            with suppress(FileNotFoundError):  # another rank has restored it
                rest.rename(path)
                logger.warning("%s is restored: a killed process had moved it away to replace it", path)
        elif clear:
            remove(rest)


def restore_directories(directory: Path, names: str, is_whole: Callable[[Path], bool], *, clear: bool) -> None:
    """Restore those directories in another one whose names match a pattern; see :func:`restore_directory`."""
    pattern = re.compile(rf"\.({names})\.{_LEFT}")
    for name in {match[1] for path in directory.glob(".*") if (match := pattern.fullmatch(path.name))}:
        restore_directory(directory / name, is_whole, clear=clear)


@contextmanager
def staged(path: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Make a directory that replaces ``path`` when the block ends without an error; yield its path.

    Only one process may replace it at a time. If ``path`` is a symbolic link, it is replaced, and what it leads to
    stays. ``check`` is called last of all; it raises an error if ``path`` must not be replaced.
    """
    number = token_hex(4)
    new, old = hidden(path, f"partial-{number}"), hidden(path, f"old-{number}")
    try:
        new.mkdir()
        mode = new.stat().st_mode  # as the umask leaves it
        new.chmod(stat.S_IMODE(mode) | stat.S_IRWXU)
        yield new
        for file in new.iterdir():  # some libraries make files that only this user can read
            if file.is_file():
                file.chmod(mode & 0o666)
        sync_directory(new)
        check()
        if path.exists():
            copy_permissions(path.stat(), new)
        if path.is_symlink() or path.is_dir():
            path.rename(old)
        new.rename(path)
        sync_directory(path.parent)
    finally:
        if os.path.lexists(old) and not os.path.lexists(path):
            old.rename(path)
        for rest in (new, old):
            remove(rest)


def remove_directory(path: Path) -> None:
    """Remove a directory, or the symbolic link that leads to it; errors are ignored."""
    # Renamed first, so that a process that is killed does not leave a part of it under its name.
    rest = hidden(path, f"partial-{token_hex(4)}")
    with suppress(OSError):
        path.rename(rest)
        remove(rest)


def remove(path: Path) -> None:
    """Remove a directory, a file or a symbolic link, if it exists; errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
