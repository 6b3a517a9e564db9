"""Significance of the difference of two systems, by paired bootstrap resampling with a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest, Result

_RESAMPLES, _SEED = 1000, 12345


def p_value(metric: Metric, hypotheses: Sequence[str], baseline: Sequence[str], references: Sequence[str]) -> float:
    """Return the probability that two equally good systems differ as much in a metric of sacreBLEU.

    It takes about 40 KB of memory for a sentence.

    Args:
        metric: sacreBLEU's object.
        hypotheses: translations of one system.
        baseline: those of the other one.
        references: the same number of references.
    """
    systems: list[tuple[str, Sequence[str]]] = [("baseline", baseline), ("system", hypotheses)]
    _, table = PairedTest(systems, {"metric": metric}, [references], test_type="bs")()
    before, result = next(column for name, column in table.items() if name != "System")
    assert isinstance(before, Result) and isinstance(result, Result) and result.p_value is not None
    if result.score == before.score:  # for which the test would find the smallest probability
        return 1.0
    return float(result.p_value)


def p_value_of_scores(scores: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the probability that two equally good systems differ as much in the mean of their sentences' scores.

    Args:
        scores: of each sentence by one system.
        baseline: of the same sentences by the other one.
    """
    differences = np.asarray(scores, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    if differences.mean() == 0.0:
        return 1.0
    draws = np.random.default_rng(_SEED)
    count = len(differences)
    found = np.array([differences[draws.integers(count, size=count)].mean() for _ in range(_RESAMPLES)])
    # The mean of |resampled| stands for chance, as in sacreBLEU's test and the script of Moses that it follows.
    chance = np.abs(found) - np.abs(found).mean()
    return float((np.sum(chance > abs(differences.mean())) + 1) / (_RESAMPLES + 1))
