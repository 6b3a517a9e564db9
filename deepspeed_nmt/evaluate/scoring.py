"""Scores of translation files: reading, warnings, and a report on each hypothesis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.bleu import (
    BleuDetail,
    Comparison,
    Scores,
    TokenisedBleu,
    corpus_scores,
    paired_bootstrap,
    tokenised_bleu,
)
from deepspeed_nmt.evaluate.chosen_metrics import ChosenMetrics, MetricScore
from deepspeed_nmt.files import open_text, raw_lines, shown_name
from deepspeed_nmt.text import looks_plain, looks_tokenised

COPIES_WORTH_A_WARNING = 0.1
"""Share of copied lines that causes a warning. Names and numbers are legitimate copies."""
CASED_LINES_WORTH_A_WARNING = 0.3
"""Share of a reference's lines with upper case that causes a warning of translations without any."""
MAX_LINES_OF_A_TEST = 50_000
"""Bound on a significance test: the resamples of more lines would not fit into the memory of a common machine."""


@dataclass(frozen=True)
class ScoreInputs:
    """Sentences of aligned files, by the names that the user gave.

    Attributes:
        hypotheses: name and translations of each file to score; a file may be given twice.
        references: reference translations.
        source: source text; None if it is not given.
    """

    hypotheses: Sequence[tuple[str, list[str]]]
    references: Mapping[str, list[str]]
    source: list[str] | None


@dataclass(frozen=True)
class ScoreReport:
    """Scores of one hypothesis file, and signs that they are doubtful.

    Attributes:
        hypothesis: name of the file.
        lines: number of its lines.
        scores: its scores; those of metrics that the user chose as a list.
        empty: number of empty lines.
        copies: number of copies of the source; None without a source.
        comparison: comparison with the first hypothesis; None for the first, and without a test.
    """

    hypothesis: str
    lines: int
    scores: Scores | TokenisedBleu | list[MetricScore]
    empty: int
    copies: int | None
    comparison: Comparison | None


def read_sentences(name: str) -> list[str]:
    """Read the sentences of a file. Only a line feed ends one: text may hold other Unicode line breaks.

    Raises:
        DataError: if the file cannot be read, is compressed, not UTF-8, or empty.
    """
    with open_text(name) as stream:
        data = b"".join(raw_lines(stream, name))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{shown_name(name)} must be UTF-8, but line {line:,} holds the invalid byte "
            f"0x{data[error.start]:02x}; convert it, for example with iconv, or fix that line"
        ) from error
    if not text.strip():
        raise DataError(f"{shown_name(name)} must hold one sentence a line, but is empty; check the path")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def score_files(
    inputs: ScoreInputs, tokenised: bool, lowercase: bool, chosen: ChosenMetrics | None = None
) -> list[ScoreReport]:
    """Score every hypothesis, and compare the later ones with the first in BLEU.

    Args:
        inputs: sentences of the files.
        tokenised: True for tokenised text.
        lowercase: True to ignore case.
        chosen: metrics that the user chose; None for BLEU, and of plain text chrF.

    Raises:
        MetricError: if a program gives no number.
    """

    def score(sentences: Sequence[str]) -> Scores | TokenisedBleu | list[MetricScore]:
        if chosen is not None:
            return chosen.scores(sentences, references, inputs.source)
        return (tokenised_bleu if tokenised else corpus_scores)(sentences, references, lowercase=lowercase)

    systems = [sentences for _, sentences in inputs.hypotheses]
    references = list(inputs.references.values())
    comparisons: list[Comparison | None] = [None] * len(systems)
    if len(systems) > 1 and (chosen is None or chosen.has_bleu):
        if len(systems[0]) <= MAX_LINES_OF_A_TEST:
            comparisons[1:] = paired_bootstrap(systems, references, tokenised=tokenised, lowercase=lowercase)
        else:
            logger.warning(
                "no significance test: it takes at most %s lines, but there are %s; give a part of them",
                f"{MAX_LINES_OF_A_TEST:,}",
                f"{len(systems[0]):,}",
            )
    return [
        ScoreReport(
            hypothesis=name,
            lines=len(sentences),
            scores=score(sentences),
            empty=sum(not sentence.strip() for sentence in sentences),
            copies=_copies(sentences, inputs.source),
            comparison=comparison,
        )
        for (name, sentences), comparison in zip(inputs.hypotheses, comparisons, strict=True)
    ]


def _copies(sentences: list[str], source: list[str] | None) -> int | None:
    """Count hypotheses that equal their source sentence; None without a source."""
    if source is None:
        return None
    pairs = zip(sentences, source, strict=True)
    return sum(bool(sentence.strip()) and sentence.strip() == original.strip() for sentence, original in pairs)


def warn_of_files(inputs: ScoreInputs, tokenised: bool, lowercase: bool) -> None:
    """Warn of lines that make a score doubtful."""
    if not lowercase:
        _warn_of_case(inputs)
    for name, sentences in {**dict(inputs.hypotheses), **inputs.references}.items():
        file, total = shown_name(name), f"{len(sentences):,}"
        empty = sum(not sentence.strip() for sentence in sentences)
        if empty:
            logger.warning("%s: %s of %s lines are empty", file, f"{empty:,}", total)
        segmented = sum("@@ " in sentence for sentence in sentences)
        if segmented:
            logger.warning("%s: %s of %s lines hold `@@ `; --segmented joins them", file, f"{segmented:,}", total)
        if not tokenised and (periods := looks_tokenised(sentences)):
            logger.warning(
                "%s: %s of %s lines end in ' .' and look tokenised, but sacreBLEU is for plain text; detokenise it, "
                "or give --tokenised for the older papers' BLEU",
                file,
                f"{periods:,}",
                total,
            )
        if tokenised and (stops := looks_plain(sentences)):
            logger.warning(
                "%s: %s of %s lines end in a word with its stop and look like plain text, but multi-bleu is for "
                "tokens; tokenise it as the other files are, or give plain text everywhere, without --tokenised",
                file,
                f"{stops:,}",
                total,
            )


def _warn_of_case(inputs: ScoreInputs) -> None:
    """Warn of hypotheses in lower case, if many lines of a reference have upper case."""
    cased = [(name, _with_upper_case(sentences), len(sentences)) for name, sentences in inputs.references.items()]
    for name, count, total in cased:
        if count < CASED_LINES_WORTH_A_WARNING * total:
            continue
        for hypothesis, sentences in inputs.hypotheses:
            if not _with_upper_case(sentences):
                logger.warning(
                    "%s is in lower case, but %s of %s lines of %s have upper case; give --like RUN if a BERT "
                    "translated, whose tokenizer also splits words, or --lowercase",
                    shown_name(hypothesis),
                    f"{count:,}",
                    f"{total:,}",
                    shown_name(name),
                )


def _with_upper_case(sentences: Sequence[str]) -> int:
    return sum(sentence != sentence.lower() for sentence in sentences)


def warn_of_copies(report: ScoreReport) -> None:
    """Warn of a model that copies its source, or of a wrong file."""
    if report.copies is not None and report.copies >= COPIES_WORTH_A_WARNING * report.lines:
        logger.warning(
            "%s: %s of %s lines are copies of the source; is it the right file, and does the model translate?",
            shown_name(report.hypothesis),
            f"{report.copies:,}",
            f"{report.lines:,}",
        )


def as_text(report: ScoreReport, inputs: ScoreInputs) -> str:
    """Return the report as text: each score with its components, and its signature below it."""
    lines = [shown_name(report.hypothesis)] if len(inputs.hypotheses) > 1 else []
    scores = report.scores
    if isinstance(scores, Scores):
        lines += [f"sacreBLEU = {scores.bleu:.2f} ({scores.bleu_detail})", f"  {scores.bleu_signature}"]
        lines += [f"chrF2 = {scores.chrf:.2f}", f"  {scores.chrf_signature}"]
    elif isinstance(scores, list):
        for each in scores:
            lines += [f"{each.metric.name} = {each.value:.{each.metric.decimals}f}", f"  {each.signature}"]
    else:
        lines += [f"{scores.label} = {scores.bleu:.2f} ({scores.detail})", f"  {scores.signature}"]
    if report.comparison is not None:
        first = shown_name(inputs.hypotheses[0][0])
        lines += [
            f"BLEU against {first}: {report.comparison.difference:+.2f}, 95% interval "
            f"[{report.comparison.interval[0]:+.2f}, {report.comparison.interval[1]:+.2f}] "
            f"(p = {report.comparison.p_value:.4f})",
            f"  {report.comparison.signature}",
        ]
    if report.copies is not None:
        lines.append(f"copies of the source: {report.copies:,} of {report.lines:,} lines")
    return "\n".join(lines)


def as_json(report: ScoreReport, inputs: ScoreInputs) -> str:
    """Return the report as JSON, with unrounded scores; values that were not requested are left out."""
    scores = report.scores
    values: dict[str, object] = {
        "hypothesis": report.hypothesis,
        "references": list(inputs.references),
        "lines": report.lines,
        "empty_lines": report.empty,
    }
    if isinstance(scores, Scores):
        values["bleu"] = _bleu_values(scores.bleu, scores.bleu_detail, scores.bleu_signature)
        values["chrf"] = {"score": scores.chrf, "signature": scores.chrf_signature}
    elif isinstance(scores, list):
        values["metrics"] = {each.metric.name: {"score": each.value, "signature": each.signature} for each in scores}
    else:
        values["tokenised_bleu"] = {
            "label": scores.label,
            **_bleu_values(scores.bleu, scores.detail, scores.signature),
        }
    if report.copies is not None:
        values["source_copies"] = report.copies
    if report.comparison is not None:
        values["comparison"] = {"baseline": inputs.hypotheses[0][0], **asdict(report.comparison)}
    return json.dumps(values, ensure_ascii=False)


def _bleu_values(score: float, detail: BleuDetail, signature: str) -> dict[str, object]:
    return {"score": score, **asdict(detail), "signature": signature}
