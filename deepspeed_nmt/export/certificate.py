"""Records of exports, and the trust in them. Nothing here imports torch.

An export lies in a directory with a description (``deepspeed_nmt.json``) and a certificate: what another program
translates, compared with this one, and records of all inputs and files. It is trusted only if its certificate is
passed and all its files are as recorded. A run keeps exports in its directory `exports`; one of them is also compared
with the run's checkpoint of now, and made again if that is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from deepspeed_nmt.console import cell, logger, table
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.export.ctranslate2_search import RULES, ExportBeamSettings
from deepspeed_nmt.files import atomic_write_bytes, exclusive, hidden, read_regular, sha256_of
from deepspeed_nmt.manifest import (
    MANIFEST_FILE,
    DamagedRecordError,
    FileRecord,
    PlainName,
    Sha256,
    check_own,
    read_record,
    write_record,
)
from deepspeed_nmt.registry import Config, problems_of
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm

INFO_FILE = "deepspeed_nmt.json"
CERTIFICATE_FILE = "certificate.json"
TABLE_FILE = "certificate.txt"
SENTENCES = 1000
"""Sentences that are translated by both programs."""
LEAST_IDENTICAL = 0.99
"""Share of identical translations that an export in fp32 must reach."""
MOST_BLEU_LOST = 0.3
"""BLEU that an export in int8 may lose."""
AT_LIMIT = "hypotheses at the length limit"
LEFT_OUT = "hypotheses left out by the program's own length penalty"
"""Kinds of differences that follow from other rules of the program, and are no near-ties."""
_SHOWN = 20
"""Differences of a beam size in the table."""
EXPORTS = "exports"
"""Directory of a run with the exports that translation has made."""
EXPORTER = "ctranslate2"
"""Format of the exports that are translated with."""
_PATIENCE_S = 86_400.0
"""Seconds to wait for another process that exports the same run."""
_READ_FILES = ("config.json", "model.bin")
"""Files that CTranslate2 reads besides the vocabularies, whose hash is recorded."""
MAX_POSITIONS = 1 << 30
Precision = Annotated[str, Field(pattern="^(fp32|int8)$")]
Hashed = Annotated[str, Field(pattern=r"^(config\.yaml|vocabulary|weights|text)$")]
RuleName = Annotated[str, Field(pattern=f"^({'|'.join(RULES)})$")]


class ExportInfo(Config):
    """The content of ``deepspeed_nmt.json``, for the programs that translate with an export.

    Attributes:
        longest: positions of the longest sentence.
        longest_line: default bound of a source line, in tokens without EOS.
        search_name: of the search that decodes the run at this exit; ``search`` are its settings that a beam search
            has, and ``rules`` its rules of the next token, which other programs lack.
    """

    format: Literal[1] = 1
    exporter: str
    precision: Precision
    longest: int = Field(ge=1, le=MAX_POSITIONS)
    longest_line: int = Field(ge=1, le=MAX_POSITIONS)
    search_name: str
    search: ExportBeamSettings
    rules: Mapping[RuleName, Any]
    text: TextForm
    tags: Tags = NO_TAGS
    model: Mapping[str, Any]

    @property
    def left_out(self) -> dict[str, Any]:
        """Settings of the run's search that the beam search of another program lacks."""
        name = {} if self.search_name == "beam" else {"name": self.search_name}
        return {**name, **self.rules}

    def write(self, directory: Path) -> None:
        """Write the file into an export."""
        content = self.model_dump(mode="json")
        (directory / INFO_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ExportInfo:
        """Read the file of an export, or raise a DataError."""
        try:
            return cls.model_validate_json(read_regular(directory / INFO_FILE), strict=True)
        except (OSError, ValidationError) as error:
            why = problems_of(error, whole="it")[0] if isinstance(error, ValidationError) else error
            raise DataError(f"{directory / INFO_FILE} cannot be read ({why}); export again") from error


class Difference(Config):
    """A sentence that the two programs translate differently, the ``line``-th, from 1.

    Attributes:
        margin: difference of log-probabilities (nats), or of scores, by which this program decided: the smallest one
            of `kind`; None if another rule of the program explains the difference.
        kind: of the decision: between the two translations, between their first different tokens, or between
            hypotheses of the beam; or AT_LIMIT or LEFT_OUT.
        explained: True if it is a near-tie, whose margin is within the tolerance, or another rule explains it.
    """

    line: int
    here: str
    there: str
    margin: float | None
    kind: str
    explained: bool


class Comparison(Config):
    """Translations of both programs with one beam size; BLEU is None without references.

    Attributes:
        score_difference: largest difference of scores among identical translations; None if one program gives none.
        tolerance: largest margin of a near-tie.
    """

    beam: int
    sentences: int
    identical: int
    score_difference: float | None
    tolerance: float
    differences: tuple[Difference, ...]
    bleu_here: float | None
    bleu_there: float | None
    seconds_here: float
    seconds_there: float

    @property
    def share(self) -> float:
        """Share of identical translations."""
        return self.identical / self.sentences

    @property
    def unexplained(self) -> int:
        """Number of differences that nothing explains."""
        return sum(not difference.explained for difference in self.differences)

    def problems(self, precision: str) -> Iterator[str]:
        """Yield the reasons why an export of a precision is not what it must be."""
        if precision == "fp32":
            if self.share < LEAST_IDENTICAL:
                share = f"{self.identical:,} of {self.sentences:,} translations are identical"
                yield f"at beam {self.beam} only {share}, fewer than {LEAST_IDENTICAL:.0%}"
            if self.unexplained:
                yield f"at beam {self.beam} {self.unexplained:,} differences are no near-ties"
        elif self.bleu_here is not None and self.bleu_there is not None:
            lost = self.bleu_here - self.bleu_there
            if lost > MOST_BLEU_LOST:
                yield f"{precision} loses {lost:.2f} BLEU at beam {self.beam}, more than {MOST_BLEU_LOST}"

    def row(self) -> list[str]:
        """Return the cells of the certificate's table."""
        of_rules = sum(difference.margin is None for difference in self.differences)
        return [
            str(self.beam),
            cell(self.sentences),
            f"{100.0 * self.share:.2f}%",
            cell(len(self.differences) - of_rules - self.unexplained),
            cell(of_rules),
            cell(self.unexplained),
            "-" if self.score_difference is None else f"{self.score_difference:.1e}",
            cell(self.bleu_here, 2),
            cell(self.bleu_there, 2),
            cell(self.sentences / max(self.seconds_here, 1e-9), 1),
            cell(self.sentences / max(self.seconds_there, 1e-9), 1),
        ]

    def listing(self) -> Iterator[str]:
        """Yield lines of text on the differences, those that nothing explains first."""
        ordered = sorted(self.differences, key=lambda difference: (difference.explained, difference.line))
        for difference in ordered[:_SHOWN]:
            why = difference.kind
            if difference.margin is not None:
                within = "within" if difference.explained else "above"
                why = f"margin {difference.margin:.1e} between {why}, {within} the tolerance of {self.tolerance:.1e}"
            yield from ("", f"beam {self.beam}, line {difference.line}: {why}")
            yield from (f"  here   {difference.here}", f"  there  {difference.there}")
        if (more := len(ordered) - _SHOWN) > 0:
            yield from ("", f"beam {self.beam}: {more:,} further differences are in {CERTIFICATE_FILE}")


class Certificate(Config):
    """The content of ``certificate.json``.

    Attributes:
        exit: exit of the model; "" for the top.
        hashes: SHA-256 of the run's config, of its vocabulary, of the weights, and of the text; all of them.
        metric: name of the metric; "" without references.
        logit_difference: largest difference of log-probabilities of tokens of this program's translations.
        problems: reasons why it is not passed; empty if it is.
    """

    format: Literal[1] = 1
    exporter: str
    precision: Precision
    versions: dict[str, str]
    run: str
    checkpoint: str
    exit: str
    update: int
    hashes: dict[Hashed, Sha256] = Field(min_length=4)
    text: str
    metric: str
    signature: str
    length_penalty: str
    logit_difference: float | None = None
    comparisons: tuple[Comparison, ...]
    weights_bytes: int
    export_bytes: int
    files: dict[PlainName, FileRecord]
    problems: tuple[str, ...] = Field(default=())

    @property
    def passed(self) -> bool:
        """True if the export is what it must be."""
        return not self.problems

    def write(self, directory: Path) -> None:
        """Write the certificate and its table into an export."""
        (directory / TABLE_FILE).write_text(self.table() + "\n", encoding="utf-8")
        write_record(directory / CERTIFICATE_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> Certificate:
        """Read the certificate of an export, and compare the export's files with it; a difference is a DataError."""
        path = directory / CERTIFICATE_FILE
        try:
            certificate = cls.model_validate_json(read_record(path), strict=True)
        except DamagedRecordError as error:
            raise DataError(f"{directory} is no trusted export: {error}; export again") from error
        except ValidationError as error:
            raise DataError(
                f"{path} has wrong content ({problems_of(error, whole='it')[0]}); export again"
            ) from error
        for name in (INFO_FILE, *(_READ_FILES if certificate.exporter == EXPORTER else ())):
            if name not in certificate.files:
                raise DataError(f"{path} has no record of {name}; export again")
        for name, record in certificate.files.items():
            file = directory / name
            if file.is_symlink() and not file.resolve().is_relative_to(directory.resolve()):
                raise DataError(f"{file} is a link out of the export; export again")
            if problem := record.problem(file):
                raise DataError(f"{file} {problem}; export again")
        return certificate

    @classmethod
    def check_own(cls, directory: Path) -> None:
        """Check that nothing but an export is replaced; see :func:`deepspeed_nmt.manifest.check_own`."""
        beside = {}
        with suppress(DamagedRecordError, ValidationError):
            certificate = cls.model_validate_json(read_record(directory / CERTIFICATE_FILE))
            beside[TABLE_FILE] = f"{certificate.table()}\n".encode()
        check_own(directory, CERTIFICATE_FILE, "--out", beside=beside)

    def table(self) -> str:
        """Return the certificate as text."""
        exit = f" at exit {self.exit}" if self.exit else ""
        lines = [
            f"{self.run} ({self.checkpoint}, update {self.update:,}){exit} as {self.exporter}, {self.precision}: "
            + ("passed" if self.passed else "NOT PASSED"),
            f"text: {self.text}",
            f"size: {self.export_bytes:,} bytes, the weights of the run {self.weights_bytes:,}",
            f"length penalty: {self.length_penalty}",
        ]
        lines += [f"{self.metric}: {self.signature}"] if self.metric else []
        if self.logit_difference is not None:
            lines.append(f"largest difference of a token's log-probability: {self.logit_difference:.1e}")
        head = ["beam", "sentences", "identical", "near-ties", "other rules", "unexplained", "score +-"]
        head += ["BLEU", "BLEU there", "sentences/s", "there"]
        lines += ["", table([head, *(comparison.row() for comparison in self.comparisons)])]
        lines += [line for comparison in self.comparisons for line in comparison.listing()]
        lines += ["", *(f"problem: {problem}" for problem in self.problems)] if self.problems else []
        lines += ["", *(f"sha256 of {name}: {digest}" for name, digest in self.hashes.items())]
        return "\n".join(lines)


def given_export(place: Path, precision: str) -> Certificate:
    """Return the certificate, which must be passed, of an export that the user has made; precision auto takes any."""
    if not place.is_dir():
        raise ConfigError(f"no directory {place}; give --export one that `export` has made")
    certificate = Certificate.read(place)
    if certificate.exporter != EXPORTER:
        raise ConfigError(f"{place} is an export for {certificate.exporter}; export with --format {EXPORTER}")
    if precision not in ("auto", certificate.precision):
        raise ConfigError(
            f"{place} is an export in {certificate.precision}, not in {precision}; leave out --precision, or export "
            "again"
        )
    if not certificate.passed:
        raise ConfigError(f"the certificate of {place} is not passed: {'; '.join(certificate.problems)}")
    return certificate


class KeptExport:
    """The export of a checkpoint at an exit (None for the top) that a run keeps in its directory `place`."""

    def __init__(self, run: Path, checkpoint: str, exit: str | None, precision: str) -> None:
        key = hashlib.sha256(json.dumps([checkpoint, exit]).encode()).hexdigest()[:8]
        self.place = run / EXPORTS / f"{EXPORTER}-{precision}-{key}"
        self._run, self._checkpoint = run, checkpoint
        self._stamp_file = self.place.with_name(f"{self.place.name}.stamp")

    def ensure(self, make: Callable[[Path], Certificate], is_current: Callable[[Certificate], bool]) -> Certificate:
        """Make the export if it is not there, or not current, and return its certificate, which must be passed."""
        certificate = self._current(is_current)
        if certificate is None:
            refusal = f"{{holder}} is making {self.place}; wait for it"
            with exclusive(hidden(self._run / self.place.name, "making"), refusal, _PATIENCE_S):
                # Another process may have exported it meanwhile.
                certificate = self._current(is_current, warn=True)
                if certificate is None:
                    stamp = self._stamp()
                    certificate = make(self.place)
                    self._write(stamp)
        if not certificate.passed:
            raise ConfigError(
                f"the export of {self._run} does not translate as the run: {'; '.join(certificate.problems)}; "
                f"translate with --runtime torch (the certificate is in {self.place})"
            )
        return certificate

    def check_writable(self) -> None:
        """Check that the export can be written into its run, or raise a ConfigError."""
        try:
            self.place.parent.mkdir(exist_ok=True)
            with TemporaryFile(dir=self.place.parent):
                pass
        except OSError as error:
            raise ConfigError(
                f"{self._run} cannot be written, so that it keeps no export ({error.strerror or error}); export it "
                f"by `export --format {EXPORTER} --out DIR`, and give that by --export DIR"
            ) from error

    def _current(self, is_current: Callable[[Certificate], bool], warn: bool = False) -> Certificate | None:
        """Return the certificate of an export that can be used as it is; None if the run must be exported."""
        if not self.place.is_dir():
            return None
        stamp = self._stamp()
        try:
            certificate = Certificate.read(self.place)
            ExportInfo.read(self.place)
        except DataError as error:
            if warn:
                aside = self.place.rename(self.place.with_name(f"{self.place.name}.{token_hex(4)}.aside"))
                reason = str(error).rpartition("; ")[0]
                logger.warning("%s; the run is exported again, and the old export kept as %s", reason, aside.name)
            return None
        with suppress(OSError):
            if read_regular(self._stamp_file) == stamp:
                return certificate
        if not is_current(certificate):
            return None
        self._write(stamp)
        return certificate

    def _stamp(self) -> bytes:
        """Return hashes from which follows that the run's checkpoint and settings are the same."""
        checkpoints = self._run / "checkpoints"
        places = [self._run, *sorted(checkpoints.glob("*/")), Path(self._checkpoint)]
        # `choose-best` makes another checkpoint the best one without a new checkpoint.
        files = [checkpoints / "chosen.json", *(place / MANIFEST_FILE for place in places)]
        return b"".join(
            f"{sha256_of(file)}  ".encode() + os.fsencode(file) + b"\n" for file in files if file.is_file()
        )

    def _write(self, stamp: bytes) -> None:
        with suppress(OSError):  # only costs time: the export is compared with the run again
            atomic_write_bytes(self._stamp_file, stamp)
