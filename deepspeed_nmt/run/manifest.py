"""The manifest of a run: hashes of the files that decide its outputs, with their verification and restoration.

The manifest records ``config.yaml``, ``data.json`` and ``vocabulary.*``. A file that is lost or damaged is restored
where that is possible: the vocabulary from the data directory, settings and ``data.json`` from the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from deepspeed_nmt.config import validate
from deepspeed_nmt.console import logger
from deepspeed_nmt.data.directory import VOCABULARY_FILES, DataDirectory
from deepspeed_nmt.errors import DataError, UserError
from deepspeed_nmt.files import atomic_write_bytes, parse_json
from deepspeed_nmt.manifest import (
    MANIFEST_FILE,
    DamagedRecordError,
    FileRecord,
    PlainName,
    read_record,
    write_record,
)
from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.checkpoint import RunRecord
from deepspeed_nmt.train.store import CheckpointStore

CONFIG_FILE, DATA_FILE, CHECKPOINTS = "config.yaml", "data.json", "checkpoints"
LONGEST_SOURCE = "longest_source"
"""Entry of DATA_FILE: tokens of the longest source sentence that the run is trained on, without EOS."""


class RunManifest(Config):
    """The content of ``manifest.json`` of a run.

    Attributes:
        format: version of the format.
        files: the run's files.
        before: records of files that were being replaced when the manifest was written: a file may match either.
    """

    format: Literal[1] = 1
    files: dict[PlainName, FileRecord]
    before: dict[PlainName, FileRecord] = Field(default={})

    def problems(self, path: Path) -> dict[str, str]:
        """Return the predicate of a message for each file that is not as recorded, by name."""
        found = {}
        for name, record in self.files.items():
            problem = record.problem(path / name)
            if problem and not (name in self.before and self.before[name].problem(path / name) is None):
                found[name] = problem
        return found

    def write(self, path: Path) -> None:
        """Write the manifest and its hash."""
        write_record(path / MANIFEST_FILE, self.model_dump_json(indent=1).encode())


def replace_files(path: Path, contents: Mapping[str, bytes]) -> None:
    """Replace files of a run; after a crash at any moment they match the manifest.

    Args:
        path: run directory.
        contents: new contents by name. Other files of the manifest stay.

    Raises:
        OSError: if a file cannot be written.
    """
    try:
        old = _read(path)
    except (DamagedRecordError, ValidationError):
        old = RunManifest(files={})
    new = {**old.files, **{name: FileRecord.of(content) for name, content in contents.items()}}
    changed = [name for name in contents if old.files.get(name) != new[name] or new[name].problem(path / name)]
    if not changed and not old.before:
        return
    damaged = old.problems(path)
    before = {name: FileRecord.of(path / name) for name in changed if name in old.files and name not in damaged}
    RunManifest(files=new, before=before).write(path)
    for name in changed:
        atomic_write_bytes(path / name, contents[name])
    if before:
        RunManifest(files=new).write(path)


def verify_run(path: Path) -> dict[str, FileRecord]:
    """Compare a run's files with its manifest, and restore what is lost. A run of an older version is adopted.

    Args:
        path: run directory.

    Returns:
        Records of its files by name.

    Raises:
        DataError: if a file is lost or damaged and cannot be restored.
    """
    problems: dict[str, str] = {}
    for _ in range(2):  # a start of `train` may replace the files between the two readings
        try:
            manifest = _read(path)
        except (DamagedRecordError, ValidationError) as error:
            return _adopt(path, error)
        if not (problems := manifest.problems(path)):
            return manifest.files
    restored = _restored(path, manifest.files, problems)
    try:
        replace_files(path, restored)
    except OSError as error:
        raise _not_writable(path, restored, error) from error
    return {**manifest.files, **{name: FileRecord.of(content) for name, content in restored.items()}}


def _read(path: Path) -> RunManifest:
    content, hashed = read_record(path / MANIFEST_FILE)
    if not hashed:
        raise DamagedRecordError(f"the hash of {path / MANIFEST_FILE} is missing")
    return RunManifest.model_validate_json(content)


def _adopt(path: Path, error: Exception) -> dict[str, FileRecord]:
    """Write the manifest of a run that has none, or whose manifest is damaged, and return the records of its files.

    The vocabulary is compared with the newest checkpoint's record, or else with the data directory.

    Raises:
        DataError: if a file is lost or damaged and cannot be restored.
    """
    record = CheckpointStore(path / CHECKPOINTS).record()
    expected = record.vocabulary if record is not None else _vocabulary_of_data(path)
    names = {CONFIG_FILE, DATA_FILE, *expected, *(name for name in VOCABULARY_FILES if (path / name).is_file())}
    problems = {name: "is missing" for name in names if not (path / name).is_file()}
    problems |= {name: found for name, each in expected.items() if (found := each.problem(path / name))}
    if record is not None:
        logger.warning("%s; %s is compared with its newest checkpoint instead", _clause(error), path)
    else:
        logger.warning(
            "%s has no %s, because an older version wrote it; its files are checked from now on", path, MANIFEST_FILE
        )
    contents = {name: (path / name).read_bytes() for name in names - problems.keys()}
    restored = _restored(path, expected, problems)
    contents |= restored
    try:
        replace_files(path, contents)
    except OSError as problem:
        if restored:
            raise _not_writable(path, restored, problem) from problem
        logger.warning("%s could not be written (%s)", path / MANIFEST_FILE, problem.strerror or problem)
    return {name: FileRecord.of(content) for name, content in contents.items()}


def _restored(path: Path, files: Mapping[str, FileRecord], problems: Mapping[str, str]) -> dict[str, bytes]:
    """Return the contents of lost or damaged files.

    Settings that exist are not replaced: they may be the user's work.

    Args:
        path: run directory.
        files: records of the run's files.
        problems: predicate of a message for each lost or damaged file.

    Raises:
        DataError: if a file cannot be restored; it names the way out.
    """
    record = CheckpointStore(path / CHECKPOINTS).record()
    restored: dict[str, bytes] = {}
    for name, problem in sorted(problems.items()):
        source = "the newest checkpoint"
        if name == CONFIG_FILE and record is not None and not (path / name).exists():
            restored[name] = validate(record.config).to_yaml().encode()
        elif name == DATA_FILE and record is not None:
            restored[name] = data_record(record.data, record.fingerprint, record.longest_source)
        elif (file := _in_data(path, record, name, files.get(name))) is not None:
            restored[name], source = file.read_bytes(), str(file.parent)
        else:
            remedy = _remedy(path, name, record)
            raise DataError(f"{path / name} must be as `train` wrote it, but it {problem}; {remedy}")
        logger.warning("%s %s; it is restored from %s", path / name, problem, source)
    return restored


def _remedy(path: Path, name: str, record: RunRecord | None) -> str:
    if name == CONFIG_FILE and record is not None:
        return (
            "delete it to restore it from the newest checkpoint; change settings on the command line of `train`, "
            "as section.key=value"
        )
    if name in (CONFIG_FILE, DATA_FILE):
        return (
            "restore it from a copy, or start a new run with another --run directory (--init-from takes over the "
            "weights of a run whose files are complete)"
        )
    return f"restore it from a copy, or bring back the data directory that {path} was trained on"


def _not_writable(path: Path, restored: Mapping[str, bytes], error: OSError) -> DataError:
    return DataError(
        f"{path} must be writable, because {' and '.join(restored)} must be restored, but is not "
        f"({error.strerror or error}); make it writable, or work with a copy of it"
    )


def _clause(error: Exception) -> str:
    return str(error) if isinstance(error, DamagedRecordError) else f"{MANIFEST_FILE} is not what `train` writes"


def data_record(path: str, fingerprint: str, longest_source: int = 0) -> bytes:
    """Return the content of DATA_FILE.

    Args:
        path: path of the data directory.
        fingerprint: fingerprint of the data.
        longest_source: tokens of its longest source sentence; 0 if that is not known.
    """
    return json.dumps({"path": path, "fingerprint": fingerprint, LONGEST_SOURCE: longest_source}).encode()


def _vocabulary_of_data(path: Path) -> dict[str, FileRecord]:
    """Return the records of the vocabulary in the data directory of a run, if that is unchanged."""
    try:
        recorded = parse_json((path / DATA_FILE).read_bytes())
        data = DataDirectory.open(Path(recorded["path"]))
        if data.fingerprint != recorded["fingerprint"]:
            return {}
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return {}
    return data.vocabulary


def _in_data(path: Path, record: RunRecord | None, name: str, wanted: FileRecord | None) -> Path | None:
    """Return a file of the vocabulary in the run's data directory, if it is the one wanted."""
    directories: list[str] = []
    with suppress(OSError, ValueError, KeyError, TypeError):
        directories.append(str(parse_json((path / DATA_FILE).read_bytes())["path"]))
    directories += [record.data] if record is not None else []
    files = [Path(directory) / name for directory in directories]
    return next((file for file in files if wanted is not None and wanted.problem(file) is None), None)
