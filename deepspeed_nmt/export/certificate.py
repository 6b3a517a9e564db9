"""Certificates of exports: what another program translates, compared with this one, and records of all inputs.

A certificate lies in the export as JSON, with a hash beside it, and as a table. An export is trusted only if its
certificate is passed and all its files are as recorded.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.table import cell, text_table
from deepspeed_nmt.manifest import DamagedRecordError, FileRecord, read_record, write_record
from deepspeed_nmt.registry import Config

CERTIFICATE_FILE = "certificate.json"
TABLE_FILE = "certificate.txt"
SENTENCES = 1000
"""Sentences that are translated by both programs."""
LEAST_IDENTICAL = 0.99
"""Share of identical translations that an export in fp32 must reach."""
_SHOWN = 20
"""Differences of a beam size in the table."""
AT_LIMIT = "hypotheses at the length limit"
LEFT_OUT = "hypotheses left out by the program's own length penalty"
"""Kinds of differences that follow from other rules of the program, and are no near-ties."""
MOST_BLEU_LOST = 0.3
"""BLEU that an export in int8 may lose."""


class Difference(Config):
    """A sentence that the two programs translate differently.

    Attributes:
        line: number of the sentence, from 1.
        here: translation of this program.
        there: translation of the other program.
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
    """Translations of both programs with one beam size.

    Attributes:
        beam: beam size.
        sentences: number of sentences.
        identical: number of those with the same tokens.
        score_difference: largest difference of scores among identical translations; None if the other program gives
            none.
        tolerance: largest margin of a near-tie.
        differences: all sentences that differ.
        bleu_here: of this program; None without references.
        bleu_there: of the other program.
        seconds_here: time of this program on one device.
        seconds_there: time of the other program.
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
    def of_rules(self) -> int:
        """Number of differences that other rules of the program explain."""
        return sum(each.margin is None for each in self.differences)

    @property
    def unexplained(self) -> int:
        """Number of differences that nothing explains."""
        return sum(not each.explained for each in self.differences)


class Certificate(Config):
    """The content of ``certificate.json``.

    Attributes:
        format: version of this file.
        exporter: format of the export.
        precision: of its matrices.
        versions: of the programs, by name.
        run: run directory.
        checkpoint: name of the checkpoint.
        exit: exit of the model; "" for the top.
        update: number of the checkpoint's update.
        hashes: SHA-256 of the run's config, of its vocabulary, of the weights, and of the text.
        text: description of the text.
        metric: name of the metric; "" without references.
        signature: of the metric.
        length_penalty: of both searches.
        logit_difference: largest difference of log-probabilities of tokens of this program's translations; None if
            the other program gives none.
        comparisons: one for each beam size.
        weights_bytes: size of the run's weights.
        export_bytes: size of the export.
        files: records of the export's files.
        problems: reasons why it is not passed; empty if it is.
    """

    format: int = 1
    exporter: str
    precision: str
    versions: dict[str, str]
    run: str
    checkpoint: str
    exit: str
    update: int
    hashes: dict[str, str]
    text: str
    metric: str
    signature: str
    length_penalty: str
    logit_difference: float | None = None
    comparisons: tuple[Comparison, ...]
    weights_bytes: int
    export_bytes: int
    files: dict[str, FileRecord]
    problems: tuple[str, ...] = Field(default=())

    @property
    def passed(self) -> bool:
        """True if the export is what it must be."""
        return not self.problems

    def write(self, directory: Path) -> None:
        """Write the certificate and its table into an export.

        Raises:
            OSError: if a file cannot be written.
        """
        (directory / TABLE_FILE).write_text(self.table() + "\n", encoding="utf-8")
        write_record(directory / CERTIFICATE_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def read(cls, directory: Path) -> Certificate:
        """Read the certificate of an export, and compare the export's files with it.

        Raises:
            DataError: if it is missing or damaged, or a file is not as recorded.
        """
        where = directory / CERTIFICATE_FILE
        try:
            content, hashed = read_record(where)
            if not hashed:
                raise DamagedRecordError(f"the hash of {where} is missing")
            certificate = cls.model_validate_json(content)
        except (DamagedRecordError, ValidationError) as error:
            what = str(error) if isinstance(error, DamagedRecordError) else "its content is wrong"
            raise DataError(
                f"{directory} must be an export with its certificate, but {what}; export again"
            ) from error
        for name, record in certificate.files.items():
            if problem := record.problem(directory / name):
                raise DataError(f"{directory / name} must be as it was exported, but {problem}; export again")
        return certificate

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
        rows = [[*head, "BLEU", "BLEU there", "sentences/s", "there"]]
        for each in self.comparisons:
            rows.append(
                [
                    str(each.beam),
                    cell(each.sentences),
                    f"{100.0 * each.share:.2f}%",
                    cell(len(each.differences) - each.of_rules - each.unexplained),
                    cell(each.of_rules),
                    cell(each.unexplained),
                    "-" if each.score_difference is None else f"{each.score_difference:.1e}",
                    cell(each.bleu_here, 2),
                    cell(each.bleu_there, 2),
                    cell(each.sentences / max(each.seconds_here, 1e-9), 1),
                    cell(each.sentences / max(each.seconds_there, 1e-9), 1),
                ]
            )
        lines += ["", text_table(rows)]
        for each in self.comparisons:
            # Those that are no near-ties first.
            for one in sorted(each.differences, key=lambda one: (one.explained, one.line))[:_SHOWN]:
                why = one.kind
                if one.margin is not None:
                    within = "within" if one.explained else "above"
                    why = f"margin {one.margin:.1e} between {one.kind}, {within} the tolerance of"
                    why += f" {each.tolerance:.1e}"
                lines += [
                    "",
                    f"beam {each.beam}, line {one.line}: {why}",
                    f"  here   {one.here}",
                    f"  there  {one.there}",
                ]
            if (more := len(each.differences) - _SHOWN) > 0:
                lines += ["", f"beam {each.beam}: {more:,} further differences are in {CERTIFICATE_FILE}"]
        lines += ["", *(f"problem: {problem}" for problem in self.problems)] if self.problems else []
        lines += ["", *(f"sha256 of {name}: {digest}" for name, digest in self.hashes.items())]
        return "\n".join(lines)


def problems_of(comparisons: tuple[Comparison, ...], precision: str) -> tuple[str, ...]:
    """Return the reasons why an export is not what it must be, as sentences.

    Args:
        comparisons: one for each beam size.
        precision: of the export.
    """
    found = []
    for each in comparisons:
        if precision == "fp32":
            if each.share < LEAST_IDENTICAL:
                found.append(
                    f"at least {LEAST_IDENTICAL:.0%} of translations must be identical at beam {each.beam}, but only "
                    f"{each.identical:,} of {each.sentences:,} are"
                )
            if each.unexplained:
                found.append(f"differences must be near-ties, but {each.unexplained:,} at beam {each.beam} are not")
        elif each.bleu_here is not None and each.bleu_there is not None:
            lost = each.bleu_here - each.bleu_there
            if lost > MOST_BLEU_LOST:
                found.append(
                    f"{precision} must lose at most {MOST_BLEU_LOST} BLEU, but loses {lost:.2f} at beam {each.beam}"
                )
    return tuple(found)
