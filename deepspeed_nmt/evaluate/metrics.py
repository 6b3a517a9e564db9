"""Metrics of translations, by name, and scores of a set of translations.

A metric is an object with a name, a direction, a signature, and the kind of text that it scores. Those of
:data:`METRICS`, the only table of them, are functions of translations and references; those of
:mod:`deepspeed_nmt.evaluate.command_metrics` are programs. sacreBLEU is imported by the first score.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from deepspeed_nmt.text import Kind, TextForm

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as SacreBleuMetric

AUTO: Mapping[str, tuple[str, ...]] = {
    "raw": ("bleu",),
    "moses": ("bleu", "bleu_tokenised"),
    "tokenised": ("bleu_tokenised",),
    "unknown": ("bleu",),
}
"""Metrics of `auto`, by the form of the text; the first one chooses the best checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Metric(ABC):
    """A measure of translations against references.

    Attributes:
        name: name in settings, and in tags.
        kind: kind of text that it scores.
        higher_is_better: direction.
        decimals: number of printed decimals; values that are equal in them are equally good.
        least: value below which matches are chance, so that only losses are compared.
    """

    name: str
    kind: Kind
    higher_is_better: bool = True
    decimals: int = 2
    least: float = -math.inf

    @abstractmethod
    def signature(self) -> str:
        """Return the version and the settings of the metric, to be published with its scores."""


@dataclass(frozen=True, kw_only=True)
class TextMetric(Metric):
    """A metric that is a function of translations and references."""

    @abstractmethod
    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        """Score translations.

        Args:
            hypotheses: one translation of each sentence; text of :attr:`kind`.
            references: the same number of references.
        """

    @abstractmethod
    def p_value(self, hypotheses: Sequence[str], baseline: Sequence[str], references: Sequence[str]) -> float:
        """Return the probability that two equally good systems differ as much, by paired bootstrap resampling.

        Args:
            hypotheses: translations of one system; text of :attr:`kind`.
            baseline: those of the other one.
            references: the same number of references.
        """


@dataclass(frozen=True, kw_only=True)
class SacreBleu(TextMetric):
    """A metric of sacreBLEU.

    Attributes:
        make: function that makes sacreBLEU's object.
    """

    make: Callable[[], SacreBleuMetric]

    @override
    def signature(self) -> str:
        metric = self.make()
        metric.corpus_score(["a"], [["a"]])  # some signatures have the number of references, known from a score
        return str(metric.get_signature())

    @override
    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        return float(self.make().corpus_score(hypotheses, [references]).score)

    @override
    def p_value(self, hypotheses: Sequence[str], baseline: Sequence[str], references: Sequence[str]) -> float:
        from deepspeed_nmt.evaluate.significance import p_value

        return p_value(self.make(), hypotheses, baseline, references)


def _bleu() -> SacreBleuMetric:
    from deepspeed_nmt.evaluate.bleu import plain_bleu

    return plain_bleu()


def _multi_bleu() -> SacreBleuMetric:
    from deepspeed_nmt.evaluate.bleu import multi_bleu

    return multi_bleu()


def _chrf() -> SacreBleuMetric:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def _ter() -> SacreBleuMetric:
    from sacrebleu.metrics.ter import TER

    return TER()


METRICS: Mapping[str, SacreBleu] = {
    metric.name: metric
    for metric in (
        # So few words match by chance, while a model learns its first ones.
        SacreBleu(name="bleu", kind="plain", least=1.0, make=_bleu),
        SacreBleu(name="bleu_tokenised", kind="tokenised", least=1.0, make=_multi_bleu),
        SacreBleu(name="chrf", kind="plain", make=_chrf),
        SacreBleu(name="ter", kind="plain", higher_is_better=False, make=_ter),
    )
}
"""All metrics that are no programs, by name."""


def validation_tag(name: str, of: str = "") -> str:
    """Return the tag under which a value of a validation set is logged.

    Args:
        name: of the value: a metric, loss, nll or ppl.
        of: name of the set; "" for that of the training data.
    """
    return f"valid/{of}/{name}" if of else f"valid/{name}"


class Scorer:
    """Scores of translations of one set of sentences.

    Args:
        metrics: metrics to compute; programs, which take files, are left out.
        text: form of references and translations.
        references: one reference of each sentence.

    Raises:
        ConfigError: if the text cannot be brought into the form that a metric requires.
    """

    def __init__(self, metrics: Sequence[Metric], text: TextForm, references: Sequence[str]) -> None:
        self.metrics = tuple(metric for metric in metrics if isinstance(metric, TextMetric))
        self._text = text
        self._references = {kind: text.convert(kind, references) for kind in self._kinds}

    @property
    def _kinds(self) -> set[Kind]:
        return {metric.kind for metric in self.metrics}

    def __call__(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Return the value of each metric by name.

        Args:
            hypotheses: one translation for each reference.
        """
        converted = {kind: self._text.convert(kind, hypotheses) for kind in self._kinds}
        return {
            metric.name: metric.score(converted[metric.kind], self._references[metric.kind])
            for metric in self.metrics
        }

    def first(self, hypotheses: Sequence[str]) -> float:
        """Return the value of the first metric."""
        kind = self.metrics[0].kind
        return self.metrics[0].score(self._text.convert(kind, hypotheses), self._references[kind])

    def scores_as(self, other: Scorer) -> bool:
        """Return True if another scorer has the same metrics and references."""
        return self.metrics == other.metrics and self._references == other._references

    def sentence_bleus(self, hypotheses: Sequence[str]) -> list[float]:
        """Return the smoothed BLEU of each sentence, to compare translations of it; of text of the first metric."""
        from deepspeed_nmt.evaluate.bleu import sentence_bleu

        kind = self.metrics[0].kind
        pairs = zip(self._text.convert(kind, hypotheses), self._references[kind], strict=True)
        return [sentence_bleu(hypothesis, reference) for hypothesis, reference in pairs]
