"""Metrics that the user chooses for translation files: those of sacreBLEU, and programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, ScoredFiles, check_programs
from deepspeed_nmt.evaluate.metrics import METRICS, Metric
from deepspeed_nmt.text import Kind


@dataclass(frozen=True)
class MetricScore:
    """Score of a hypothesis by a metric.

    Attributes:
        metric: the metric.
        value: the score.
        signature: version and settings of the metric.
    """

    metric: Metric
    value: float
    signature: str


@dataclass(frozen=True)
class ChosenMetrics:
    """Metrics by which files are scored.

    Attributes:
        metrics: the metrics, each once.
    """

    metrics: tuple[Metric, ...]

    @classmethod
    def parse(cls, values: Sequence[str], kind: Kind, lowercase: bool, for_programs: bool) -> ChosenMetrics:
        """Return the metrics that ``score --metrics`` names.

        Args:
            values: names of metrics, and programs as `command:PATH`.
            kind: kind of the text.
            lowercase: True if case is ignored.
            for_programs: True if there are the source and one reference, which programs need.

        Raises:
            ConfigError: if one is unknown, is for other text, comes late, or cannot be called; all of them at once.
        """
        if lowercase:
            raise ConfigError("--metrics gives scores that respect case; leave out --lowercase, or --metrics")
        found: dict[str, Metric] = {}
        problems = []
        known = {name: metric for name, metric in METRICS.items() if metric.kind == kind}
        for value in values:
            try:
                metric = CommandMetric.parse(value) or known.get(value)
            except ValueError as error:
                problems.append(f"--metrics {error}")
                continue
            if metric is None:
                other = "; that is for text of the other kind (--tokenised)" if value in METRICS else ""
                problems.append(
                    f"--metrics must be of {', '.join(known)} and command:PATH for {kind} text, but has "
                    f"{shown(value)}{other or did_you_mean(value, known)}"
                )
            elif isinstance(metric, CommandMetric) and metric.late:
                problems.append(f"--metrics has no late results, but has {shown(value)}; give command:{metric.path}")
            elif found.setdefault(metric.name, metric) != metric:
                problems.append(f"--metrics must have each name once, but has {metric.name} twice; use NAME=")
            elif isinstance(metric, CommandMetric) and not for_programs:
                problems.append(
                    f"the metric {metric.name} needs the source and one reference; give --source and one --reference"
                )
        if problems:
            raise ConfigError(problems)
        check_programs([metric for metric in found.values() if isinstance(metric, CommandMetric)])
        return cls(tuple(found.values()))

    @property
    def has_bleu(self) -> bool:
        """True if BLEU is among them."""
        return any(metric.name in ("bleu", "bleu_tokenised") for metric in self.metrics)

    def scores(
        self, hypotheses: Sequence[str], references: Sequence[Sequence[str]], source: Sequence[str] | None
    ) -> list[MetricScore]:
        """Score translations.

        Args:
            hypotheses: one translation of each sentence.
            references: lists of the same length; one list for programs.
            source: the sentences, for programs.

        Raises:
            MetricError: if a program gives no number.
        """
        found = []
        for metric in self.metrics:
            if isinstance(metric, CommandMetric):
                value = _called(metric, hypotheses, references[0], source or [])
                found.append(MetricScore(metric, value, metric.signature()))
            else:
                scorer = METRICS[metric.name].make()
                value = float(scorer.corpus_score(hypotheses, references).score)
                found.append(MetricScore(metric, value, str(scorer.get_signature())))
        return found


def _called(
    metric: CommandMetric, hypotheses: Sequence[str], references: Sequence[str], source: Sequence[str]
) -> float:
    with TemporaryDirectory() as scratch:
        hypothesis, reference, original, sentences = (
            Path(scratch, name) for name in ("hypothesis.txt", "reference.txt", "source.txt", "sentences")
        )
        for path, lines in ((hypothesis, hypotheses), (reference, references), (original, source)):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        return metric.score(ScoredFiles(hypothesis, reference, original, sentences), math.inf)
