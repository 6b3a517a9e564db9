"""Scores of translation files: reading, warnings, and a report on each hypothesis.

There are two kinds of BLEU. Plain text is tokenised by sacreBLEU, so scores with one signature are comparable.
Tokenised BLEU is the ``multi-bleu.perl`` score of older papers, on text that is tokenised already: it varies by a
point or more with the tokeniser, so its label differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sacrebleu.metrics.base import Metric as SacreBleuMetric
from sacrebleu.metrics.bleu import BLEUScore

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, DataError, did_you_mean, shown
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, ScoredFiles, check_programs
from deepspeed_nmt.evaluate.metrics import METRICS, Metric, TextMetric, in_language, warn_of_spaces
from deepspeed_nmt.files import open_text, raw_lines, shown_name
from deepspeed_nmt.text import Kind, looks_plain, looks_tokenised

LABELS = {"bleu": "sacreBLEU", "bleu_tokenised": "tokenised BLEU (not comparable with sacreBLEU)", "chrf": "chrF2"}
"""Names in print of the metrics that need no --metrics."""
_JSON_NAMES = {"bleu_tokenised": "tokenised_bleu"}
_RESAMPLES, _SEED = 1000, 12345
"""Resampled test sets of a paired bootstrap test, and the seed of its draws: those of sacreBLEU."""
_MANY_COPIES = 0.1
"""Share of copied lines that causes a warning. Names and numbers are legitimate copies."""
_MANY_CASED_LINES = 0.3
"""Share of a reference's lines with upper case that causes a warning of translations without any."""


@dataclass(frozen=True)
class ScoreInputs:
    """Sentences of aligned files, by the names that the user gave. A hypothesis may be given twice.

    BLEU has the tokenizer of the target ``language``, which is None if it is not known.
    """

    hypotheses: Sequence[tuple[str, list[str]]]
    references: Mapping[str, list[str]]
    source: list[str] | None
    language: str | None = None


@dataclass(frozen=True)
class Score:
    """Score of translations by a metric.

    ``detail`` are components of a BLEU: n-gram precisions in percent, brevity penalty, lengths in tokens.
    """

    metric: Metric
    value: float
    signature: str
    detail: BLEUScore | None = None


def corpus_score(
    metric: TextMetric, hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False
) -> Score:
    """Score translations, ignoring case if ``lowercase``; each of ``references`` is a list aligned with them."""
    if not hypotheses or not references:
        raise DataError(f"{len(hypotheses)} hypotheses and {len(references)} references; give at least one of both")
    for number, reference in enumerate(references, 1):  # sacreBLEU would silently truncate them to the shortest
        if len(reference) != len(hypotheses):
            raise DataError(
                f"{len(hypotheses):,} hypotheses and {len(reference):,} lines in reference {number}; give files of "
                "the same sentences"
            )
    scorer = metric.make(lowercase)
    score = scorer.corpus_score(hypotheses, references)
    detail = score if isinstance(score, BLEUScore) else None
    return Score(metric, float(score.score), str(scorer.get_signature()), detail)


@dataclass(frozen=True)
class Comparison:
    """Comparison of a system with the first one, the baseline.

    Attributes:
        difference: score of the system minus that of the baseline.
        p_value: probability that equally good systems differ as much, by chance.
        interval: 95% confidence interval of the difference.
        signature: of the test, with its number of resamples and its seed.
        metric: name of the metric that is compared.
    """

    difference: float
    p_value: float
    interval: tuple[float, float]
    signature: str = ""
    metric: str = ""


def bootstrap(systems: Sequence[ArrayLike], score: Callable[[NDArray[Any]], Any]) -> list[Comparison]:
    """Test the differences of later systems from the first one by paired bootstrap resampling.

    Args:
        systems: what is known of each sentence of the test set, a row for each, by system.
        score: function from the rows of a test set to a score.
    """
    tables = [np.asarray(system) for system in systems]
    draws, count = np.random.default_rng(_SEED), len(tables[0])
    samples = (draws.integers(count, size=count) for _ in range(_RESAMPLES))
    resampled = np.array([[score(table[sample]) for table in tables] for sample in samples])
    comparisons = []
    for number, table in enumerate(tables[1:], 1):
        difference = float(score(table)) - float(score(tables[0]))
        differences = resampled[:, number] - resampled[:, 0]
        # The mean of |resampled| stands for chance, as in sacreBLEU's test and the script of Moses that it follows.
        chance = np.abs(differences) - np.abs(differences).mean()
        p_value = 1.0 if difference == 0.0 else (int(np.sum(chance > abs(difference))) + 1) / (_RESAMPLES + 1)
        low, high = np.quantile(differences, [0.025, 0.975])
        comparisons.append(Comparison(difference, p_value, (float(low), float(high))))
    return comparisons


def paired_bootstrap(
    systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]], metric: SacreBleuMetric
) -> list[Comparison]:
    """Test the differences between each later system and the first one; see :func:`bootstrap`."""
    tables = [sentence_statistics(metric, hypotheses, references) for hypotheses in systems]
    signature = metric.get_signature()
    signature.update("bs", _RESAMPLES)
    signature.update("seed", _SEED)
    compared = bootstrap(tables, partial(score_of_statistics, metric))
    return [replace(comparison, signature=str(signature)) for comparison in compared]


def sentence_statistics(
    metric: SacreBleuMetric, hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[Any]:
    """Return what a metric adds up over a test set, such as lengths and n-grams, a row for each sentence."""
    return np.array(metric._extract_corpus_statistics(hypotheses, references))


def score_of_statistics(metric: SacreBleuMetric, rows: NDArray[Any]) -> float:
    """Return the score of a test set by its :func:`sentence_statistics`."""
    return float(metric._compute_score_from_stats(rows.sum(axis=0).tolist()).score)


@dataclass(frozen=True)
class ScoreReport:
    """Scores of one hypothesis file, and signs that they are doubtful.

    ``copies`` of the source are None without one; the comparison with the first hypothesis is None for that.
    """

    hypothesis: str
    lines: int
    scores: Sequence[Score]
    empty: int
    copies: int | None
    comparison: Comparison | None


def read_sentences(name: str) -> list[str]:
    """Read the sentences of a file. Only a line feed ends one: text may hold other Unicode line breaks."""
    with open_text(name) as stream:
        data = b"".join(raw_lines(stream, name))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{shown_name(name)} is not UTF-8: line {line:,} holds the byte 0x{data[error.start]:02x}; convert it, "
            "for example with iconv, or fix that line"
        ) from error
    if not text.strip():
        raise DataError(f"{shown_name(name)} is empty; give a text of one sentence a line")
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def choose_metrics(values: Sequence[str], kind: Kind, lowercase: bool, for_programs: bool) -> list[Metric]:
    """Return the metrics that ``score --metrics`` names for text of a kind, each once.

    ``for_programs`` is True if there are the source and one reference, which programs (`command:PATH`) need.

    Raises:
        ConfigError: if any is unknown or cannot be called; all problems at once.
    """
    if lowercase:
        raise ConfigError("--metrics gives scores that respect case; leave out --lowercase, or --metrics")
    chosen: dict[str, Metric] = {}
    problems = []
    known = {name: metric for name, metric in METRICS.items() if metric.kind == kind}
    for value in values:
        try:
            metric = CommandMetric.parse(value) or known.get(value)
        except ValueError as error:
            problems.append(f"--metrics {error}")
            continue
        if metric is None:
            problems.append(
                f"--metrics {shown(value)} is none of {', '.join(known)} and command:PATH, which are for {kind} text"
                f"{did_you_mean(value, known)}"
            )
        elif chosen.setdefault(metric.name, metric) != metric:
            problems.append(f"--metrics has two programs of the name {metric.name}; put NAME= in front of one")
        elif isinstance(metric, CommandMetric) and metric.late:
            problems.append(f"--metrics {shown(value)} comes late; give command:{metric.path}")
        elif isinstance(metric, CommandMetric) and not for_programs:
            problems.append(f"the metric {metric.name} needs --source and one --reference; give both")
    if problems:
        raise ConfigError(problems)
    check_programs([metric for metric in chosen.values() if isinstance(metric, CommandMetric)])
    return list(chosen.values())


def score_files(
    inputs: ScoreInputs, tokenised: bool, lowercase: bool, chosen: Sequence[Metric] | None = None
) -> list[ScoreReport]:
    """Score every hypothesis, and compare the later ones with the first by the first metric that is no program.

    The metrics are ``chosen`` by the user, or None for BLEU, and of plain text chrF.
    """
    bleu = in_language(METRICS["bleu_tokenised" if tokenised else "bleu"], inputs.language)
    assert isinstance(bleu, TextMetric)
    metrics: Sequence[Metric] = [bleu] if tokenised else [bleu, METRICS["chrf"]]
    if chosen is not None:
        metrics = [in_language(metric, inputs.language) for metric in chosen]
    for name, sentences in inputs.references.items():
        warn_of_spaces(shown_name(name), sentences, metrics)
    systems = [sentences for _, sentences in inputs.hypotheses]
    comparisons: list[Comparison | None] = [None] * len(systems)
    tested = next((metric for metric in metrics if isinstance(metric, TextMetric)), None)
    if len(systems) > 1 and tested is not None:
        compared = paired_bootstrap(systems, list(inputs.references.values()), tested.make(lowercase))
        comparisons[1:] = [replace(comparison, metric=tested.name) for comparison in compared]
    return [
        ScoreReport(
            hypothesis=name,
            lines=len(sentences),
            scores=[_score(metric, sentences, inputs, lowercase) for metric in metrics],
            empty=sum(not sentence.strip() for sentence in sentences),
            copies=_copies(sentences, inputs.source),
            comparison=comparison,
        )
        for (name, sentences), comparison in zip(inputs.hypotheses, comparisons, strict=True)
    ]


def _score(metric: Metric, hypotheses: Sequence[str], inputs: ScoreInputs, lowercase: bool) -> Score:
    references = list(inputs.references.values())
    if isinstance(metric, TextMetric):
        return corpus_score(metric, hypotheses, references, lowercase=lowercase)
    assert isinstance(metric, CommandMetric) and inputs.source is not None
    with TemporaryDirectory() as scratch:
        names = ("hypothesis.txt", "reference.txt", "source.txt", "sentences")
        files = ScoredFiles(*(Path(scratch, name) for name in names))
        sides = {files.hypothesis: hypotheses, files.reference: references[0], files.source: inputs.source}
        for path, lines in sides.items():
            rows = (line.replace("\r", " ") for line in lines)  # programs that open text take it for a line's end
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")
        value = metric.score(files, math.inf)
    return Score(metric, value, metric.signature())


def _copies(sentences: list[str], source: list[str] | None) -> int | None:
    if source is None:
        return None
    pairs = zip(sentences, source, strict=True)  # Moses' rules for two languages set other spaces
    return sum(bool(words := sentence.split()) and "".join(words) == "".join(own.split()) for sentence, own in pairs)


def warn_of_files(inputs: ScoreInputs, tokenised: bool, lowercase: bool) -> None:
    """Warn of lines that make a score doubtful."""

    def warn(name: str, sentences: Sequence[str], lines: int, words: str, *further: str) -> None:
        if lines:
            text = f"%s: %s of %s lines {words}"
            logger.warning(text, shown_name(name), f"{lines:,}", f"{len(sentences):,}", *further)

    for name, sentences in {**dict(inputs.hypotheses), **inputs.references}.items():
        warn(name, sentences, sum(not sentence.strip() for sentence in sentences), "are empty")
        warn(name, sentences, sum("@@ " in sentence for sentence in sentences), "hold `@@ `; --segmented joins them")
        if tokenised:
            text = "end in a word with its stop and look like plain text, but multi-bleu is for tokens; tokenise it"
            warn(name, sentences, looks_plain(sentences), f"{text} as the other files are, or leave out --tokenised")
        else:
            text = "end in ' .' and look tokenised, but sacreBLEU is for plain text; detokenise it, or give"
            warn(name, sentences, looks_tokenised(sentences), f"{text} --tokenised for the older papers' BLEU")
    lower = [name for name, sentences in inputs.hypotheses if not _with_upper_case(sentences)]
    for name, sentences in inputs.references.items():
        cased = _with_upper_case(sentences)
        if lower and not lowercase and cased >= _MANY_CASED_LINES * len(sentences):
            text = "have upper case, but %s is in lower case; give --like RUN if a BERT translated, or --lowercase"
            warn(name, sentences, cased, text, ", ".join(map(shown_name, lower)))
    for name, sentences in inputs.hypotheses:
        copies = _copies(sentences, inputs.source) or 0
        if copies >= _MANY_COPIES * len(sentences):
            text = "are copies of the source; is it the right file, and does the model translate?"
            warn(name, sentences, copies, text)


def _with_upper_case(sentences: Sequence[str]) -> int:
    return sum(sentence != sentence.lower() for sentence in sentences)


def as_text(report: ScoreReport, inputs: ScoreInputs, by_name: bool) -> str:
    """Return the report as text, with names of metrics if the user named them: ``by_name``."""
    lines = [shown_name(report.hypothesis)] if len(inputs.hypotheses) > 1 else []
    for score in report.scores:
        title, detail = score.metric.name if by_name else LABELS[score.metric.name], ""
        if (bleu := score.detail) is not None:
            precisions = "/".join(f"{precision:.1f}" for precision in bleu.precisions)
            lengths = f"hypothesis {bleu.sys_len}, reference {bleu.ref_len} tokens"
            detail = f" ({precisions}, BP {bleu.bp:.3f}, {lengths})"
        lines += [f"{title} = {score.value:.{score.metric.decimals}f}{detail}", f"  {score.signature}"]
    if (comparison := report.comparison) is not None:
        (first, _), (low, high) = inputs.hypotheses[0], comparison.interval
        difference = f"{comparison.difference:+.2f}, 95% interval [{low:+.2f}, {high:+.2f}]"
        title = comparison.metric if by_name else "BLEU"
        lines.append(f"{title} against {shown_name(first)}: {difference} (p = {comparison.p_value:.4f})")
        lines.append(f"  {comparison.signature}")
    if report.copies is not None:
        lines.append(f"copies of the source: {report.copies:,} of {report.lines:,} lines")
    return "\n".join(lines)


def as_json(report: ScoreReport, inputs: ScoreInputs, by_name: bool) -> str:
    """Return the report as JSON, with unrounded scores, below "metrics" if the user named them: ``by_name``."""
    values: dict[str, object] = {
        "hypothesis": report.hypothesis,
        "references": list(inputs.references),
        "lines": report.lines,
        "empty_lines": report.empty,
    }
    entries: dict[str, dict[str, object]] = {}
    for score in report.scores:
        name, entry = score.metric.name, entries.setdefault(score.metric.name, {"score": score.value})
        if name == "bleu_tokenised":
            entry["label"] = LABELS[name]
        if (bleu := score.detail) is not None:
            entry |= {"precisions": list(bleu.precisions), "brevity_penalty": float(bleu.bp)}
            entry |= {"hypothesis_tokens": int(bleu.sys_len), "reference_tokens": int(bleu.ref_len)}
        entry["signature"] = score.signature
    if by_name:
        values["metrics"] = entries
    else:
        values.update((_JSON_NAMES.get(name, name), entry) for name, entry in entries.items())
    if report.copies is not None:
        values["source_copies"] = report.copies
    if report.comparison is not None:
        values["comparison"] = {"baseline": inputs.hypotheses[0][0], **asdict(report.comparison)}
    return json.dumps(values, ensure_ascii=False)
