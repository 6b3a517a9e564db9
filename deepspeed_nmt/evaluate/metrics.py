"""Metrics of translations, by name, and scores of a set of translations.

A metric is an object with a name, a direction, a signature, and the kind of text that it scores. Those of
:data:`METRICS`, the only table of them, are functions of translations and references; those of
:mod:`deepspeed_nmt.evaluate.command_metrics` are programs. sacreBLEU is imported by the first score.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.text import Kind, TextForm, without_spaces

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as SacreBleuMetric
    from sacrebleu.metrics.bleu import BLEU


AUTO: Mapping[str, tuple[str, ...]] = {
    "raw": ("bleu",),
    "moses": ("bleu", "bleu_tokenised"),
    "tokenised": ("bleu_tokenised",),
}
"""Metrics of `auto`, by the form of the text; the first one chooses the best checkpoint."""
TOKENIZERS = ("13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "flores200")
"""Tokenizers of sacreBLEU, each with a metric of its own."""
OF_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "cmn"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya"), "char"),
}
"""Tokenizer of `bleu` by target language, as sacreBLEU chooses it; other languages have 13a, which takes a sentence
without spaces for a word. For Thai, Lao, Khmer and Burmese sacreBLEU has a model that it downloads, flores200."""


PROGRAM_DECIMALS = 4
"""Printed decimals of scores by programs, most of which are fractions."""


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
    """A metric of sacreBLEU, which is a function of translations and references.

    ``make`` makes sacreBLEU's object, given True to ignore case. One of words has a ``tokenizer``.
    """

    make: Callable[[bool], SacreBleuMetric]
    tokenizer: str = ""

    @override
    def signature(self) -> str:
        metric = self.make(False)
        metric.corpus_score(["a"], [["a"]])  # some signatures have the number of references, known from a score
        return str(metric.get_signature())

    def score(self, hypotheses: Sequence[str], references: Sequence[str]) -> float:
        """Score translations, text of :attr:`kind`, by a reference of each."""
        return float(self.make(False).corpus_score(hypotheses, [references]).score)


def _bleu(tokenizer: str, smoothing: str, lowercase: bool) -> BLEU:
    from sacrebleu.metrics.bleu import BLEU

    try:
        # `force` disables sacreBLEU's warning about tokenised input, which bypasses our log; `score` has its own.
        return BLEU(lowercase=lowercase, tokenize=tokenizer, smooth_method=smoothing, force=True)
    except (ImportError, RuntimeError, OSError) as error:  # an extra that is missing, a model that cannot be loaded
        extra = tokenizer.partition("-mecab")[0]
        way = f"pip install 'sacrebleu[{extra}]'" if extra != tokenizer else "let sacreBLEU download its model once"
        raise ConfigError(
            f"sacreBLEU's tokenizer {tokenizer} is not installed; {way}, or choose bleu_char as the metric"
        ) from error


def _named_bleu(name: str, tokenizer: str) -> TextMetric:
    # So few words match by chance, while a model learns its first ones.
    return TextMetric(name=name, kind="plain", least=1.0, make=partial(_bleu, tokenizer, "exp"), tokenizer=tokenizer)


def _chrf(lowercase: bool) -> SacreBleuMetric:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=lowercase)


def _ter(lowercase: bool, without_spaces: bool = False) -> SacreBleuMetric:
    from sacrebleu.metrics.ter import TER

    # It ignores case by default. Chinese and Japanese characters are words of their own only of normalised text.
    return TER(normalized=without_spaces, asian_support=without_spaces)


METRICS: Mapping[str, TextMetric] = {
    metric.name: metric
    for metric in (
        _named_bleu("bleu", "13a"),
        # As multi-bleu defines it: no tokenisation, and 0 instead of smoothing if no n-gram matches.
        TextMetric(
            name="bleu_tokenised", kind="tokenised", least=1.0, make=partial(_bleu, "none", "none"), tokenizer="none"
        ),
        TextMetric(name="chrf", kind="plain", make=_chrf),
        TextMetric(name="ter", kind="plain", higher_is_better=False, make=_ter, tokenizer="none"),
        *(_named_bleu(f"bleu_{tokenizer.replace('-', '_')}", tokenizer) for tokenizer in TOKENIZERS),
    )
}
"""All metrics that are no programs, by name. `bleu` is that of :func:`in_language`."""


def in_language(metric: Metric, language: str | None) -> Metric:
    """Return a metric of translations into a language, of which `bleu` has the tokenizer, and `ter` the words."""
    tokenizer = OF_LANGUAGE.get(re.split("[-_]", language or "")[0].lower())
    if tokenizer in ("zh", "ja-mecab") and metric.name == "ter":
        return replace(METRICS["ter"], make=partial(_ter, without_spaces=True), tokenizer="asian")
    if tokenizer is None or metric.name != "bleu":
        return metric
    return replace(METRICS[f"bleu_{tokenizer.replace('-', '_')}"], name="bleu")


def warn_of_spaces(name: str, references: Sequence[str], metrics: Iterable[Metric]) -> None:
    """Warn if most references have no spaces between words, and a metric's tokenizer divides text at spaces."""
    dividing = [m.name for m in metrics if isinstance(m, TextMetric) and m.tokenizer in ("13a", "intl", "none")]
    if dividing and 2 * (count := sum(map(without_spaces, references))) > len(references):
        text = f"%s: %d of %d lines have no spaces between words, and {dividing[0]} takes them for one word"
        remedy = "name the target language (score --language, prepare --target-lang), or choose bleu_char or chrf"
        logger.warning(f"{text}; {remedy}", name, count, len(references))


def validation_tag(name: str, of: str = "") -> str:
    """Return the tag of a metric, loss, nll or ppl of the validation set ``of``; "" is that of the training data."""
    return f"valid/{of}/{name}" if of else f"valid/{name}"


def decimals_of(tag: str) -> int:
    """Return how many decimals of a measure are printed, by its name or a tag of it; other names are of programs."""
    name = tag.rpartition("/")[2]
    return METRICS[name].decimals if name in METRICS else {"loss": 3, "nll": 3, "ppl": 2}.get(name, PROGRAM_DECIMALS)


class Scorer:
    """Scores of translations of one set of sentences; ``text`` is the form of references and translations.

    Metrics that are programs, which take files, are left out.
    """

    def __init__(self, metrics: Sequence[Metric], text: TextForm, references: Sequence[str]) -> None:
        self.metrics = tuple(metric for metric in metrics if isinstance(metric, TextMetric))
        self._text = text
        self._references = {kind: text.convert(kind, references) for kind in {m.kind for m in self.metrics}}

    def __call__(self, hypotheses: Sequence[str]) -> dict[str, float]:
        """Return the value of each metric by name; there is a translation for each reference."""
        converted = {kind: self._text.convert(kind, hypotheses) for kind in self._references}
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
        """Return the smoothed BLEU of each sentence, to compare its translations, by the first metric's tokens."""
        from sacrebleu.metrics.bleu import BLEU

        kind = self.metrics[0].kind
        metric = BLEU(effective_order=True, tokenize=self.metrics[0].tokenizer, force=True)
        pairs = zip(self._text.convert(kind, hypotheses), self._references[kind], strict=True)
        return [float(metric.sentence_score(hypothesis, [reference]).score) for hypothesis, reference in pairs]
