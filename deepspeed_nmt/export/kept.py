"""Exports that are translated with: those that a run keeps, and those that a user has made. Nothing imports torch.

A run keeps exports in its directory `exports`. One is trusted if its certificate is passed, its files are as the
certificate records them, and the run's checkpoints are those of its time. Otherwise the run is exported first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.export.info import ExportInfo
from deepspeed_nmt.files import atomic_write_text, hidden, parse_json, sha256_of
from deepspeed_nmt.locks import exclusive
from deepspeed_nmt.manifest import MANIFEST_FILE

EXPORTS = "exports"
"""Directory of a run with the exports that translation has made."""
STAMP_FILE = "stamp.json"
"""File beside an export with hashes of the run's manifests when it was last compared with the run."""
EXPORTER = "ctranslate2"
"""Format of the exports that are translated with."""
_PATIENCE_S = 86_400.0
"""Seconds to wait for another process that exports the same run."""
Make = Callable[[Path], Certificate]
"""Exports the run into a directory, and returns the certificate."""


def stamp_of(run: Path, checkpoint: str) -> dict[str, str]:
    """Return hashes from which follows that a run's checkpoint and settings are the same.

    Args:
        run: run directory.
        checkpoint: best, last, average, or a path.
    """
    places = [run, *sorted((run / "checkpoints").glob("*/")), Path(checkpoint)]
    manifests = [place / MANIFEST_FILE for place in places]
    return {str(file): sha256_of(file) for file in manifests if file.is_file()}


def place_of(run: Path, checkpoint: str, exit: str | None, precision: str) -> Path:
    """Return the directory of an export that a run keeps.

    Args:
        run: run directory.
        checkpoint: best, last, average, or a path.
        exit: of the model; None for the top.
        precision: of the matrices.
    """
    key = hashlib.sha256(json.dumps([checkpoint, exit]).encode()).hexdigest()[:8]
    return run / EXPORTS / f"{EXPORTER}-{precision}-{key}"


def given(place: Path, precision: str) -> Certificate:
    """Return the certificate of an export that the user has made, whose files it describes.

    Args:
        place: directory of the export.
        precision: that the user asks for; auto for that of the export.

    Raises:
        ConfigError: if it is for another program, of another precision, or its certificate is not passed.
        DataError: if it is no export, or a file was changed.
    """
    if not place.is_dir():
        raise ConfigError(f"--export must be a directory made by `export`, but {place} does not exist")
    certificate = _read(place)
    if certificate.exporter != EXPORTER:
        raise ConfigError(
            f"--export must be an export for CTranslate2, but {place} is one for {certificate.exporter}; export with "
            f"--format {EXPORTER}"
        )
    if precision not in ("auto", certificate.precision):
        raise ConfigError(
            f"--precision must be that of the export, which is {certificate.precision}, but is {precision}; leave it "
            "out, or export again"
        )
    if not certificate.passed:
        raise ConfigError(
            f"{place} must translate as its run does, but {'; '.join(certificate.problems)}; translate with the run"
        )
    return certificate


def ensure(
    place: Path, run: Path, checkpoint: str, make: Make, is_current: Callable[[Certificate], bool]
) -> Certificate:
    """Make sure that an export is there, current, as its certificate says, and that this is passed.

    Args:
        place: directory of the export.
        run: run directory.
        checkpoint: best, last, average, or a path.
        make: exports the run, after :func:`check_place`.
        is_current: returns True if a certificate is of the run's settings and weights of now.

    Returns:
        The certificate.

    Raises:
        ConfigError: if the certificate is not passed.
    """
    certificate = _current(place, run, checkpoint, is_current)
    if certificate is None:
        with _alone(run, place):
            # Another process may have exported it meanwhile.
            certificate = _current(place, run, checkpoint, is_current, warn=True)
            if certificate is None:
                stamp = stamp_of(run, checkpoint)
                certificate = make(place)
                _write_stamp(place, stamp)
    if not certificate.passed:
        raise ConfigError(
            f"the export of {run} must translate as the run does, but {'; '.join(certificate.problems)}; translate "
            f"with --runtime torch (the certificate is in {place})"
        )
    return certificate


def _current(
    place: Path, run: Path, checkpoint: str, is_current: Callable[[Certificate], bool], warn: bool = False
) -> Certificate | None:
    """Return the certificate of an export that can be used as it is; None if the run must be exported."""
    if not place.is_dir():
        return None
    stamp = stamp_of(run, checkpoint)
    try:
        certificate = _read(place)
    except DataError as error:
        if warn:
            logger.warning("%s; the run is exported again", str(error).rpartition("; ")[0])
        return None
    if _recorded_stamp(place) == stamp:
        return certificate
    if not is_current(certificate):
        return None
    _write_stamp(place, stamp)
    return certificate


def _read(place: Path) -> Certificate:
    """Read the certificate of an export, and compare its files.

    Raises:
        DataError: if a file was changed, or is of another version.
    """
    certificate = Certificate.read(place)
    ExportInfo.read(place)
    return certificate


def check_place(place: Path, run: Path) -> None:
    """Check that an export can be written into its run.

    Args:
        place: directory of the export.
        run: run directory.

    Raises:
        ConfigError: if it cannot.
    """
    try:
        place.parent.mkdir(exist_ok=True)
        with TemporaryFile(dir=place.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{run} must be writable for its export, but is not ({error.strerror or error}); export it to another "
            f"directory by `export --format {EXPORTER} --out DIR`, and give that by --export DIR"
        ) from error


@contextmanager
def _alone(run: Path, place: Path) -> Iterator[None]:
    """Hold the right to make an export, for which other processes wait."""
    lock = hidden(run / place.name, "making")
    refusal = f"{place} must not be in use, but {{holder}} is making it; wait for it"
    with ExitStack() as held:
        try:
            held.enter_context(exclusive(lock, refusal))
        except DataError:
            logger.info("waits for another process, which makes %s", place)
            held.enter_context(exclusive(lock, refusal, _PATIENCE_S))
        yield


def _stamp_file(place: Path) -> Path:
    return place.with_name(f"{place.name}.{STAMP_FILE}")


def _recorded_stamp(place: Path) -> object:
    """Return the stamp of an export; None if it cannot be read."""
    try:
        return parse_json(_stamp_file(place).read_bytes())
    except (OSError, ValueError):
        return None


def _write_stamp(place: Path, stamp: dict[str, str]) -> None:
    with suppress(OSError):  # only costs time: the export is compared with the run again
        atomic_write_text(_stamp_file(place), json.dumps(stamp, indent=1))
