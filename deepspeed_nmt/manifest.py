"""Records of files: their sizes and SHA-256, in JSON files that are themselves checked against a hash beside them."""

from __future__ import annotations

import builtins
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_write_bytes, read_regular, resolved, sha256_of
from deepspeed_nmt.registry import Config

MANIFEST_FILE = "manifest.json"
HASH_SUFFIX = ".sha256"
"""Ending of the file with the hash of a record, in the format of the program ``sha256sum``."""

_RECORDS = (MANIFEST_FILE + HASH_SUFFIX, "meta.json" + HASH_SUFFIX, "deepspeed_nmt.json")
"""Files of which a run, a checkpoint, a data directory or an export has one."""

PlainName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a file in the directory of its record: no path, no hidden file."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def recorded_directory(path: Path) -> Path | None:
    """Return the run, checkpoint, data or export directory that a path lies in; None outside of them."""
    parents = resolved(path).parents
    return next((parent for parent in parents if any((parent / name).is_file() for name in _RECORDS)), None)


class FileRecord(Config):
    """Size and hash of a file."""

    bytes: int = Field(ge=0, lt=1 << 63)
    sha256: Sha256

    @classmethod
    def of(cls, content: Path | builtins.bytes) -> FileRecord:
        """Return the record of a file, or of the content of one."""
        if isinstance(content, builtins.bytes):
            return cls(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        return cls(bytes=content.stat().st_size, sha256=sha256_of(content))

    def problem(self, file: Path, verify: bool = True) -> str | None:
        """Return the predicate of a message, such as "is missing", for a file that is not as recorded, else None.

        Without ``verify`` only sizes are compared.
        """
        if not file.is_file():
            return "is missing"
        size = file.stat().st_size
        if size != self.bytes:
            return f"has {size} bytes instead of {self.bytes}"
        return "has other content than was written" if verify and sha256_of(file) != self.sha256 else None


class _Files(BaseModel):
    files: dict[PlainName, FileRecord]


class DamagedRecordError(Exception):
    """A record does not match the hash beside it; the message is a clause such as "meta.json is missing"."""


def write_record(path: Path, content: bytes) -> None:
    """Replace a record and its hash; after a crash at any moment the record matches its hash.

    While the record is replaced, the hash file lists the old and the new hash.
    """
    hashes = [FileRecord.of(content).sha256]
    if path.is_file():
        hashes.append(sha256_of(path))
    _write_hashes(path, hashes)
    atomic_write_bytes(path, content)
    if len(hashes) > 1:
        _write_hashes(path, hashes[:1])


def read_record(path: Path) -> bytes:
    """Read a record, and compare it with its hash; a difference is a DamagedRecordError."""
    hash_file = path.with_name(path.name + HASH_SUFFIX)
    try:
        content, hashes = read_regular(path), read_regular(hash_file).decode("ascii", errors="replace")
    except FileNotFoundError as error:
        what = f"the hash of {path}" if error.filename == str(hash_file) else str(path)
        raise DamagedRecordError(f"{what} is missing") from error
    except OSError as error:
        raise DamagedRecordError(f"{error.filename} cannot be read ({error.strerror})") from error
    if FileRecord.of(content).sha256 not in {line.partition(" ")[0] for line in hashes.splitlines()}:
        raise DamagedRecordError(f"{path} does not match its hash in {hash_file.name}")
    return content


def read_files(path: Path) -> dict[str, FileRecord]:
    """Return the files that a record of any kind lists, by name; see :func:`read_record`."""
    content = read_record(path)
    try:
        return _Files.model_validate_json(content).files
    except ValidationError as error:
        raise DamagedRecordError(f"{path} lists no files") from error


def check_own(
    directory: Path, record: str, option: str, *, beside: Mapping[str, bytes] | None = None, verify: bool = True
) -> None:
    """Check that nothing is lost if a directory is replaced: all its files are as their record lists them.

    This is the rule of every command that replaces or removes a directory; a mere name proves nothing. It was given
    by ``option``, and ``beside`` is the content, by name, of files that the record does not list.
    """
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise DataError(f"{option} {directory} is a file; choose another {option}")
    if os.path.ismount(directory):
        raise DataError(
            f"{option} {directory} is a mount point, which cannot be replaced; give a directory inside it"
        )
    records, reason = {name: FileRecord.of(content) for name, content in (beside or {}).items()}, ""
    names = {path.name for path in directory.iterdir()}
    try:
        if record in names:
            records |= read_files(directory / record)
            names -= {record, record + HASH_SUFFIX}
    except DamagedRecordError as error:
        reason = f" ({error})"
    own = (name for name in names if name in records and records[name].problem(directory / name, verify) is None)
    if foreign := sorted(names - set(own)):
        named = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise DataError(
            f"{option} {directory} has {named}, which this program did not write, or which was changed{reason}; move "
            f"the directory or these files away, or choose another {option}"
        )


def _write_hashes(path: Path, hashes: Iterable[str]) -> None:
    lines = "".join(f"{digest}  {path.name}\n" for digest in hashes)
    atomic_write_bytes(path.with_name(path.name + HASH_SUFFIX), lines.encode())
