"""Minimum Bayes risk decoding with samples (Eikema and Aziz, "Is MAP Decoding All You Need?", 2020).

Samples of the model's distribution are both the candidates and the evidence. The expected utility of a candidate is
its mean utility with each sample as the reference, itself included; the candidate of the highest one wins. The random
choices are those of sampling with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.search.base import Hypothesis, Request
from deepspeed_nmt.search.sampling import Sampling, SamplingSettings
from deepspeed_nmt.search.utility import UtilityName, pairwise


class MinimumBayesRiskConfig(SamplingSettings):
    """Settings of minimum Bayes risk decoding."""

    name: Literal["mbr"] = "mbr"
    samples: int = Field(default=32, ge=1, le=MAX_HYPOTHESES, description="translations drawn for each sentence")
    utility: UtilityName = Field(default="chrf", description="similarity of two translations, by sacreBLEU")


class MinimumBayesRisk(Sampling):
    """Minimum Bayes risk decoding with one model; see :class:`Sampling` for its arguments."""

    config: MinimumBayesRiskConfig

    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Return all samples of each sentence, in the order in which they were drawn, for :meth:`rank`."""
        return self.samples(source_BS, padded, requests)

    def rank(self, hypotheses: Sequence[Hypothesis], texts: Sequence[str]) -> list[tuple[Hypothesis, str]]:
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
        expected = pairwise(self.config.utility, list(counts)) @ weights
        ranked = [
            (Hypothesis(best[text].tokens, float(utility), best[text].log_prob, {"samples": float(count)}), text)
            for (text, count), utility in zip(counts.items(), expected, strict=True)
        ]
        # Sums of equal numbers in another order differ by rounding, which must not decide.
        return sorted(ranked, key=lambda pair: (-round(pair[0].score, 9), -pair[0].log_prob))
