"""Inspection and copying of the text files that a data directory is made from."""

from __future__ import annotations

import hashlib
import os
import shutil
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_nmt.console import progress
from deepspeed_nmt.data.directory import InputRecord
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import check_text, without_byte_order_mark

Paths = tuple[Path, ...]

_BLOCK_BYTES = 1 << 20


def inspect_inputs(files: Mapping[str, tuple[Paths, Paths]]) -> dict[str, tuple[InputRecord, ...]]:
    """Hash and count all input files.

    Args:
        files: source and target files of each split.

    Returns:
        Records of the files by ``<split>.<side>``.

    Raises:
        DataError: if files are missing or not aligned, all of them at once.
    """
    sides = {
        f"{split}.{side}": paths
        for split, both in files.items()
        for side, paths in zip(("source", "target"), both, strict=True)
    }
    missing = [path for paths in sides.values() for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            "every input must be an existing text file, but "
            + "; ".join(f"{path} {'is not a file' if path.exists() else 'does not exist'}" for path in missing)
            + "; check the paths"
        )
    work = [(name, path) for name, paths in sides.items() for path in paths]
    records: dict[str, list[InputRecord]] = {name: [] for name in sides}
    for name, path in progress(work, "checking", "files", total=len(work)):
        records[name].append(_inspect(path))
    unaligned = [
        f"{source.path} has {source.lines} lines and {target.path} has {target.lines}"
        for split in files
        for source, target in zip(records[f"{split}.source"], records[f"{split}.target"], strict=True)
        if source.lines != target.lines
    ]
    if unaligned:
        raise DataError(
            f"source and target must have the same number of lines, but {'; '.join(unaligned)}; find where one lost "
            "or gained lines (only \\n ends a line here)"
        )
    return {name: tuple(found) for name, found in records.items()}


def copy_text(paths: Sequence[Path], destination: Path) -> None:
    """Concatenate files byte for byte, but without byte order marks, and with a line end between any two."""
    with destination.open("wb") as file:
        for number, path in enumerate(paths):
            with path.open("rb") as part:
                if part.read(len(BOM_UTF8)) != BOM_UTF8:
                    part.seek(0)
                shutil.copyfileobj(part, file)
                if number < len(paths) - 1 and part.tell():
                    part.seek(-1, os.SEEK_END)
                    if part.read(1) != b"\n":
                        file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def _inspect(path: Path) -> InputRecord:
    check_text(path)
    digest = hashlib.sha256()
    size = lines = 0
    last = b"\n"
    try:
        with path.open("rb") as file:
            without_byte_order_mark(file.read(len(BOM_UTF8)), str(path))
            file.seek(0)
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
                last = block[-1:]
    except OSError as error:
        raise DataError(f"{path} must be readable, but is not ({error.strerror or error})") from error
    return InputRecord(path=str(path), bytes=size, lines=lines + (last != b"\n"), sha256=digest.hexdigest())
