"""BLEU and chrF by sacreBLEU, with their signatures.

There are two kinds of BLEU. :func:`corpus_scores` scores plain text: sacreBLEU tokenises it, so scores with one
signature are comparable. :func:`tokenised_bleu` computes the ``multi-bleu.perl`` score of older papers on text that
is tokenised already. It varies by a point or more with the tokeniser, so its label differs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from deepspeed_nmt.errors import ConfigError, DataError, did_you_mean

_RESAMPLES, _RESAMPLE_SEED = 1000, 12345

# A translation that ends inside a word leaves `@@` at the end of its line.
_SEGMENT_MARK = re.compile(r"@@(?: |$)")


@dataclass(frozen=True)
class BleuDetail:
    """Components of a BLEU score.

    Attributes:
        precisions: of 1-grams to 4-grams, in percent.
        brevity_penalty: factor on the score, below 1 when the hypothesis is shorter than the reference.
        hypothesis_tokens: length of the hypothesis as BLEU counts it.
        reference_tokens: length of the references, for each sentence the one closest to the hypothesis.
    """

    precisions: tuple[float, ...]
    brevity_penalty: float
    hypothesis_tokens: int
    reference_tokens: int

    @classmethod
    def of(cls, score: BLEUScore) -> BleuDetail:
        """Return the components of a sacreBLEU result."""
        return cls(tuple(score.precisions), float(score.bp), int(score.sys_len), int(score.ref_len))

    def __str__(self) -> str:
        precisions = "/".join(f"{precision:.1f}" for precision in self.precisions)
        return (
            f"{precisions}, BP {self.brevity_penalty:.3f}, "
            f"hypothesis {self.hypothesis_tokens}, reference {self.reference_tokens} tokens"
        )


@dataclass(frozen=True)
class Scores:
    """sacreBLEU and chrF of one system (0 to 100), with the signatures to publish with them."""

    bleu: float
    bleu_detail: BleuDetail
    bleu_signature: str
    chrf: float
    chrf_signature: str


@dataclass(frozen=True)
class TokenisedBleu:
    """BLEU (0 to 100) over the tokens of the text; always print it with its label."""

    label: ClassVar[str] = "tokenised BLEU (not comparable with sacreBLEU)"

    bleu: float
    detail: BleuDetail
    signature: str


@dataclass(frozen=True)
class Comparison:
    """Comparison of a system with the first one, the baseline.

    Attributes:
        difference: BLEU of the system minus BLEU of the baseline.
        p_value: probability of a difference this large if the two were equally good.
        interval: 95% confidence interval of the difference.
        signature: of the test, with its number of resamples and its seed.
    """

    difference: float
    p_value: float
    interval: tuple[float, float]
    signature: str


def corpus_scores(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> Scores:
    """Score plain (detokenised) text.

    Args:
        hypotheses: one translation per sentence.
        references: one list of translations for each reference, each aligned with ``hypotheses``.
        lowercase: ignore case, in BLEU and chrF.
        tokenize: sacreBLEU's name for the tokeniser it applies before BLEU; chrF needs none.

    Raises:
        DataError: if there is nothing to score, or a reference has another number of lines.
        ConfigError: if ``tokenize`` is not one of sacreBLEU's tokenisers.
    """
    _check_aligned(hypotheses, references)
    if tokenize not in BLEU.TOKENIZERS:
        hint = did_you_mean(tokenize, BLEU.TOKENIZERS)
        raise ConfigError(f"`tokenize` must be one of sacreBLEU's tokenisers, but is '{tokenize}'{hint}")
    bleu = plain_bleu(lowercase, tokenize)
    chrf = CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(hypotheses, references)
    chrf_score = chrf.corpus_score(hypotheses, references)
    return Scores(
        bleu=float(bleu_score.score),
        bleu_detail=BleuDetail.of(bleu_score),
        bleu_signature=str(bleu.get_signature()),
        chrf=float(chrf_score.score),
        chrf_signature=str(chrf.get_signature()),
    )


def tokenised_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], *, lowercase: bool = False
) -> TokenisedBleu:
    """Score text that is tokenised already, as ``multi-bleu.perl`` (``-lc``) does.

    Args:
        hypotheses: one translation per sentence, tokens separated by spaces.
        references: one list for each reference, aligned with ``hypotheses`` and tokenised in the same way.
        lowercase: ignore case.

    Raises:
        DataError: if there is nothing to score, or a reference has another number of lines.
    """
    _check_aligned(hypotheses, references)
    metric = multi_bleu(lowercase)
    score = metric.corpus_score(hypotheses, references)
    return TokenisedBleu(bleu=float(score.score), detail=BleuDetail.of(score), signature=str(metric.get_signature()))


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    *,
    tokenised: bool = False,
    lowercase: bool = False,
) -> list[Comparison]:
    """Test the differences in BLEU between systems and the first one by paired bootstrap resampling.

    It takes about 40 KB of memory per line, because sacreBLEU draws all 1000 resamples at once.

    Args:
        systems: hypotheses of two or more systems; the first is the baseline.
        references: as for :func:`corpus_scores`.
        tokenised: compare tokenised BLEU instead of sacreBLEU.
        lowercase: ignore case.

    Returns:
        One comparison for each system but the first.

    Raises:
        DataError: if there is nothing to score, or a system or a reference has another number of lines.
    """
    for hypotheses in systems:
        _check_aligned(hypotheses, references)
    metric = multi_bleu(lowercase) if tokenised else plain_bleu(lowercase)
    named = [(str(number), hypotheses) for number, hypotheses in enumerate(systems)]
    signatures, table = PairedTest(named, {"BLEU": metric}, references, test_type="bs")()
    baseline, *others = [result for result in table["BLEU"] if isinstance(result, Result)]
    resampled = [_resampled_bleu(metric, hypotheses, references) for hypotheses in systems]
    comparisons = []
    for result, scores in zip(others, resampled[1:], strict=True):
        assert result.p_value is not None
        difference = float(result.score - baseline.score)
        low, high = np.quantile(scores - resampled[0], [0.025, 0.975])
        comparisons.append(
            Comparison(difference, float(result.p_value), (float(low), float(high)), str(signatures["BLEU"]))
        )
    return comparisons


def _resampled_bleu(
    metric: BLEU, hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.float64]:
    """Return the BLEU of resampled test sets; the draws are the same for every system."""
    table = sentence_statistics(metric, hypotheses, references)
    draws = np.random.default_rng(_RESAMPLE_SEED)
    return np.array(
        [
            bleu_of_statistics(metric, table[draws.integers(len(table), size=len(table))].sum(axis=0))
            for _ in range(_RESAMPLES)
        ]
    )


def sentence_statistics(
    metric: BLEU, hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> NDArray[np.int64]:
    """Count what BLEU adds up over the sentences of a test set.

    Args:
        metric: of plain or of tokenised text.
        hypotheses: one translation per sentence.
        references: one list for each reference, aligned with ``hypotheses``.

    Returns:
        For each sentence the matching n-grams of each order, all n-grams of each order, and the lengths of hypothesis
        and reference.
    """
    effective_order = metric.effective_order
    metric.effective_order = True  # prevents a warning for each sentence; the scores that it changes are not used
    found = [
        metric.sentence_score(hypothesis, others) for hypothesis, *others in zip(hypotheses, *references, strict=True)
    ]
    metric.effective_order = effective_order
    return np.array([[*each.counts, *each.totals, each.sys_len, each.ref_len] for each in found])


def bleu_of_statistics(metric: BLEU, total: NDArray[np.int64]) -> float:
    """Return the BLEU of a test set from the sum of its :func:`sentence_statistics`."""
    *ngrams, sys_len, ref_len = total.tolist()
    orders = metric.max_ngram_order
    score = metric.compute_bleu(
        ngrams[:orders], ngrams[orders:], sys_len, ref_len, smooth_method=metric.smooth_method
    )
    return float(score.score)


def sentence_bleu(hypothesis: str, reference: str) -> float:
    """Return the sacreBLEU of one sentence, smoothed exponentially, to compare translations of that sentence."""
    return float(BLEU(effective_order=True).sentence_score(hypothesis, [reference]).score)


def join_segments(line: str) -> str:
    """Undo subword-nmt's segmentation: ``er sch@@ läft`` becomes ``er schläft``."""
    return _SEGMENT_MARK.sub("", line)


def plain_bleu(lowercase: bool = False, tokenize: str = "13a") -> BLEU:
    """Return BLEU of plain text, which sacreBLEU tokenises."""
    # `force` disables sacreBLEU's warning about tokenised input, which bypasses our log; `score` has its own.
    return BLEU(lowercase=lowercase, tokenize=tokenize, force=True)


def multi_bleu(lowercase: bool = False) -> BLEU:
    """Return BLEU as multi-bleu defines it: no tokenisation, and 0 instead of smoothing if no n-gram matches."""
    return BLEU(lowercase=lowercase, tokenize="none", smooth_method="none", force=True)


def _check_aligned(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Check that all lists have one length; sacreBLEU would silently truncate them to the shortest."""
    if not hypotheses or not references:
        raise DataError(
            f"scoring needs at least one hypothesis and one reference, but has {len(hypotheses)} hypotheses "
            f"and {len(references)} references; check the files"
        )
    for number, reference in enumerate(references, 1):
        if len(reference) != len(hypotheses):
            raise DataError(
                f"hypotheses and references must be aligned line by line, but there are {len(hypotheses):,} "
                f"hypotheses and {len(reference):,} lines in reference {number}; give files of the same sentences"
            )
