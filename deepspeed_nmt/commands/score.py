"""Score translations against one or more references.

Plain text is scored with sacreBLEU and chrF, each printed with the signature to publish beside it. Files are UTF-8,
one sentence a line, aligned; `-` stands for standard input. Several hypotheses are scored one after the other, and
each is tested against the first (paired bootstrap resampling).

  deepspeed-nmt score --hypothesis out.de --reference test.de --source test.en
  deepspeed-nmt score --hypothesis out.bpe.de --reference test.bpe.de --segmented --lowercase
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_nmt.console import logger, output
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.bleu import (
    BleuDetail,
    Comparison,
    Scores,
    TokenisedBleu,
    corpus_scores,
    join_segments,
    paired_bootstrap,
    tokenised_bleu,
)

HELP = "score translations: sacreBLEU and chrF with their signatures"

# Names and numbers translate to themselves; more copies than this mean a model that did not translate.
COPIES_WORTH_A_WARNING = 0.1
# Of the lines of a test set; in plain text a full stop follows its word.
TOKENISED_LINES_WORTH_A_WARNING = 0.3
# The resamples of a longer file would not fit into an ordinary machine's memory.
MAX_LINES_OF_A_TEST = 50_000


@dataclass(frozen=True)
class _Inputs:
    """The files as lists of sentences, all of one length; names as the user gave them."""

    hypotheses: Mapping[str, list[str]]
    references: Mapping[str, list[str]]
    source: list[str] | None


@dataclass(frozen=True)
class _Report:
    """All that is said about one hypothesis file."""

    hypothesis: str
    scores: Scores | TokenisedBleu
    empty: int
    copies: int | None
    comparison: Comparison | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--hypothesis", nargs="+", required=True, metavar="F", help="translations to score")
    parser.add_argument("--reference", nargs="+", required=True, metavar="F", help="one or more references")
    parser.add_argument("--source", metavar="F", help="also check alignment with the source and count copies of it")
    parser.add_argument(
        "--tokenised",
        action="store_true",
        help="the text is tokenised: compute the older papers' multi-bleu instead (not comparable with sacreBLEU)",
    )
    parser.add_argument(
        "--segmented",
        action="store_true",
        help="join subword-nmt's `@@ ` segments first; the text is then tokenised, so this implies --tokenised",
    )
    parser.add_argument("--lowercase", action="store_true", help="ignore case")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="put references into the form of translations by this run (or data): lower case, a BERT's spaces. "
        "Scores are then comparable with one another alone",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each hypothesis, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Read the files, score them, and print the scores.

    Raises:
        DataError: a file is missing, empty, not UTF-8, or not aligned with the others.
    """
    inputs = _read(arguments)
    tokenised = arguments.tokenised or arguments.segmented
    _warn_of_files(inputs, tokenised)
    for report in _reports(inputs, tokenised, arguments.lowercase):
        _warn_of_copies(report, len(inputs.hypotheses[report.hypothesis]))
        output(_as_json(report, inputs) if arguments.json else _as_text(report, inputs))
    return 0


def _read(arguments: argparse.Namespace) -> _Inputs:
    """All files of the command line, aligned.

    A file named twice in one role is read once: comparing it with itself tells nothing.
    """
    names = [*dict.fromkeys(arguments.hypothesis), *dict.fromkeys(arguments.reference)]
    names += [arguments.source] if arguments.source else []
    if names.count("-") > 1:
        raise DataError(
            "Standard input (`-`) can be only one of the files, but is given more than once; name the rest."
        )
    # One list for the lines of each name, whatever its role: standard input can be read but once.
    lines = {name: _read_lines(name) for name in dict.fromkeys(names)}
    if len({len(sentences) for sentences in lines.values()}) > 1:
        counts = "\n".join(f"  {len(sentences):>9,}  {_shown(name)}" for name, sentences in lines.items())
        raise DataError(
            "All files must be aligned line by line, but their numbers of lines differ:\n"
            f"{counts}\nGive files of the same sentences; a short hypothesis may be an unfinished translation."
        )
    if arguments.segmented:
        lines = {name: [join_segments(line) for line in sentences] for name, sentences in lines.items()}
    references = {name: lines[name] for name in arguments.reference}
    if arguments.like is not None:
        from deepspeed_nmt.data.directory import open_tokenizer  # its libraries take a while

        tokenizer = open_tokenizer(arguments.like)
        references = {name: [tokenizer.reference(line) for line in each] for name, each in references.items()}
    return _Inputs(
        hypotheses={name: lines[name] for name in arguments.hypothesis},
        references=references,
        source=lines[arguments.source] if arguments.source else None,
    )


def _read_lines(name: str) -> list[str]:
    """The sentences of a file. Only a line feed ends one: text may hold other characters Unicode counts as breaks."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise DataError(
            f"{_shown(name)} must be a text file to read, but: {error.strerror}; check the path."
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{_shown(name)} must be UTF-8, but line {line:,} holds the invalid byte "
            f"0x{data[error.start]:02x}; convert it, for example with iconv, or mend that line."
        ) from error
    if not text.strip():
        raise DataError(f"{_shown(name)} must hold one sentence a line, but is empty; nothing can be scored.")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _reports(inputs: _Inputs, tokenised: bool, lowercase: bool) -> list[_Report]:
    """Score every hypothesis, and compare the later ones with the first."""
    score = tokenised_bleu if tokenised else corpus_scores
    systems = list(inputs.hypotheses.values())
    references = list(inputs.references.values())
    comparisons: list[Comparison | None] = [None] * len(systems)
    if len(systems) > 1:
        if len(systems[0]) <= MAX_LINES_OF_A_TEST:
            comparisons[1:] = paired_bootstrap(systems, references, tokenised=tokenised, lowercase=lowercase)
        else:
            logger.warning(
                "no significance test: it takes at most %s lines, but there are %s; give a part of them",
                f"{MAX_LINES_OF_A_TEST:,}",
                f"{len(systems[0]):,}",
            )
    return [
        _Report(
            hypothesis=name,
            scores=score(sentences, references, lowercase=lowercase),
            empty=sum(not sentence.strip() for sentence in sentences),
            copies=_copies(sentences, inputs.source),
            comparison=comparison,
        )
        for (name, sentences), comparison in zip(inputs.hypotheses.items(), comparisons, strict=True)
    ]


def _copies(sentences: list[str], source: list[str] | None) -> int | None:
    """How many hypotheses are their source sentence, character by character; None without a source."""
    if source is None:
        return None
    pairs = zip(sentences, source, strict=True)
    return sum(bool(sentence.strip()) and sentence.strip() == original.strip() for sentence, original in pairs)


def _warn_of_files(inputs: _Inputs, tokenised: bool) -> None:
    """Say on the log what in the files makes a score doubtful."""
    for name, sentences in {**inputs.hypotheses, **inputs.references}.items():
        file, total = _shown(name), f"{len(sentences):,}"
        empty = sum(not sentence.strip() for sentence in sentences)
        if empty:
            logger.warning("%s: %s of %s lines are empty", file, f"{empty:,}", total)
        segmented = sum("@@ " in sentence for sentence in sentences)
        if segmented:
            logger.warning("%s: %s of %s lines hold `@@ `; --segmented joins them", file, f"{segmented:,}", total)
        periods = sum(sentence.endswith(" .") for sentence in sentences)
        if not tokenised and periods >= TOKENISED_LINES_WORTH_A_WARNING * len(sentences):
            logger.warning(
                "%s: %s of %s lines end in ' .' and look tokenised, but sacreBLEU is for plain text; detokenise it, "
                "or give --tokenised for the older papers' BLEU",
                file,
                f"{periods:,}",
                total,
            )


def _warn_of_copies(report: _Report, lines: int) -> None:
    """Say on the log that a model did not translate, or that the wrong file was scored."""
    if report.copies is not None and report.copies >= COPIES_WORTH_A_WARNING * lines:
        logger.warning(
            "%s: %s of %s lines are copies of the source; is it the right file, and does the model translate?",
            _shown(report.hypothesis),
            f"{report.copies:,}",
            f"{lines:,}",
        )


def _as_text(report: _Report, inputs: _Inputs) -> str:
    """What a reader sees: each score, its detail, and its signature below it."""
    lines = [_shown(report.hypothesis)] if len(inputs.hypotheses) > 1 else []
    scores = report.scores
    if isinstance(scores, Scores):
        lines += [f"sacreBLEU = {scores.bleu:.2f} ({scores.bleu_detail})", f"  {scores.bleu_signature}"]
        lines += [f"chrF2 = {scores.chrf:.2f}", f"  {scores.chrf_signature}"]
    else:
        lines += [f"{scores.label} = {scores.bleu:.2f} ({scores.detail})", f"  {scores.signature}"]
    if report.comparison is not None:
        first = _shown(next(iter(inputs.hypotheses)))
        lines += [
            f"BLEU against {first}: {report.comparison.difference:+.2f}, 95% interval "
            f"[{report.comparison.interval[0]:+.2f}, {report.comparison.interval[1]:+.2f}] "
            f"(p = {report.comparison.p_value:.4f})",
            f"  {report.comparison.signature}",
        ]
    if report.copies is not None:
        sentences = len(inputs.hypotheses[report.hypothesis])
        lines.append(f"copies of the source: {report.copies:,} of {sentences:,} lines")
    return "\n".join(lines)


def _as_json(report: _Report, inputs: _Inputs) -> str:
    """The report for programs: scores unrounded, and keys only for what was asked for."""
    scores = report.scores
    values: dict[str, object] = {
        "hypothesis": report.hypothesis,
        "references": list(inputs.references),
        "lines": len(inputs.hypotheses[report.hypothesis]),
        "empty_lines": report.empty,
    }
    if isinstance(scores, Scores):
        values["bleu"] = _bleu_values(scores.bleu, scores.bleu_detail, scores.bleu_signature)
        values["chrf"] = {"score": scores.chrf, "signature": scores.chrf_signature}
    else:
        values["tokenised_bleu"] = {
            "label": scores.label,
            **_bleu_values(scores.bleu, scores.detail, scores.signature),
        }
    if report.copies is not None:
        values["source_copies"] = report.copies
    if report.comparison is not None:
        values["comparison"] = {"baseline": next(iter(inputs.hypotheses)), **asdict(report.comparison)}
    return json.dumps(values, ensure_ascii=False)


def _bleu_values(score: float, detail: BleuDetail, signature: str) -> dict[str, object]:
    return {"score": score, **asdict(detail), "signature": signature}


def _shown(name: str) -> str:
    """A file's name for messages."""
    return "standard input" if name == "-" else name
