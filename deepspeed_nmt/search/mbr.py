"""Minimum Bayes risk decoding with samples (Eikema and Aziz, "Is MAP Decoding All You Need?", 2020).

Samples of the model's distribution are both the candidates and the evidence. The expected utility of a candidate is
its mean utility with each sample as the reference, itself included; the candidate of the highest one wins. The random
choices are those of sampling with the same seed.

The utility is sentence chrF2 with sacreBLEU's defaults. Legend: N texts, G n-grams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.search.base import Hypothesis
from deepspeed_nmt.search.sampling import SampledSentence, Sampling, SamplingSettings

Matrix = NDArray[np.float64]


def _matches(counters: Sequence[Counter[Hashable]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of n-grams that each pair of texts shares, and the number of n-grams of each.

    Shape: -> (N,N), (N,)
    """
    index = {ngram: column for column, ngram in enumerate(set().union(*counters))}
    counts_NG = np.zeros((len(counters), len(index)), dtype=np.int64)
    for row, counter in enumerate(counters):
        for ngram, count in counter.items():
            counts_NG[row, index[ngram]] = count
    shared_NN = np.stack([np.minimum(counts_G, counts_NG).sum(axis=1) for counts_G in counts_NG])
    return shared_NN, counts_NG.sum(axis=1)


def pairwise(texts: Sequence[str]) -> Matrix:
    """Return the utility (0 to 100) of each text (row) with each text (column) as its reference. Shape: -> (N,N)."""
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    metric = CHRF()
    ngrams = [extract_all_char_ngrams(text, metric.char_order, metric.whitespace) for text in texts]
    precision, recall, orders = (np.zeros((len(texts), len(texts))) for _ in range(3))
    for order in range(metric.char_order):
        shared_NN, total_N = _matches([counters[order] for counters in ngrams])
        counts = (total_N[:, None] > 0) & (total_N[None, :] > 0)
        precision += np.where(counts, shared_NN / np.maximum(total_N[:, None], 1), 0.0)
        recall += np.where(counts, shared_NN / np.maximum(total_N[None, :], 1), 0.0)
        orders += counts
    precision, recall = precision / np.maximum(orders, 1), recall / np.maximum(orders, 1)
    factor = metric.beta**2
    below = factor * precision + recall
    score: Matrix = 100.0 * (1 + factor) * precision * recall / np.where(below > 0, below, 1.0)
    return score


class MinimumBayesRiskConfig(SamplingSettings):
    """Settings of minimum Bayes risk decoding."""

    name: Literal["mbr"] = "mbr"
    samples: int = Field(default=32, ge=1, le=MAX_HYPOTHESES, description="translations drawn for each sentence")


class MinimumBayesRisk(Sampling):
    """Minimum Bayes risk decoding with one model; see :class:`Sampling` for its arguments."""

    def finish(self, sentence: SampledSentence) -> list[Hypothesis]:
        """Return all samples of a sentence, in the order in which they were drawn, for :meth:`rank`."""
        return self.in_order(sentence)

    def rank(self, hypotheses: Sequence[Hypothesis], texts: Sequence[str]) -> list[Hypothesis]:
        """Rank different texts by expected utility, their score; see :meth:`RanksTexts.rank`.

        Of samples with the same text, the most probable one is returned. The feature ``samples`` is their number.
        """
        counts: dict[str, int] = {}
        best: dict[str, Hypothesis] = {}
        for hypothesis, text in zip(hypotheses, texts, strict=True):
            counts[text] = counts.get(text, 0) + 1
            if text not in best or hypothesis.log_prob > best[text].log_prob:
                best[text] = hypothesis
        weights = np.array(list(counts.values())) / len(texts)
        expected = pairwise(list(counts)) @ weights
        ranked = [
            replace(best[text], score=float(utility), features={"samples": float(count)})
            for (text, count), utility in zip(counts.items(), expected, strict=True)
        ]
        # Sums of equal numbers in another order differ by rounding, which must not decide.
        return sorted(ranked, key=lambda one: (-round(one.score, 9), -one.log_prob))
