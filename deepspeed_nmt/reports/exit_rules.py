"""Fit of the rules by which a model stops at one of its exits, sentence by sentence, from translations at each exit.

A rule and its threshold are a point of BLEU and time beside the fixed depths. The time of a sentence is the sum over
the exits that its rule climbs, each with its measured time for the text divided by the number of sentences; the
encoder, which :mod:`deepspeed_nmt.search.choosing_exits` runs once, is counted at each exit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import get_args

from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.choosing_exits import StoppingRule, accepts

_SHARES = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
"""Thresholds of the agreement that are tried; those of the confidence are its quantiles."""


@dataclass(frozen=True)
class ExitRule:
    """A rule, the decoder stages that it climbs, and what is expected of it: seconds, and sentences by stage."""

    rule: StoppingRule
    exits: tuple[int, ...]
    threshold: float
    bleu: float
    seconds: float
    sentences: Mapping[int, int]

    def write(self, file: Path) -> None:
        """Write the file that `translate --choose-exits` takes."""
        atomic_write_text(file, json.dumps(asdict(self), indent=1))

    def __str__(self) -> str:
        at = ", ".join(f"{number}: {count}" for number, count in self.sentences.items())
        return (
            f"{self.rule} of {self.threshold:.4g} or more: BLEU {self.bleu:.2f}, {self.seconds:.1f} s expected; "
            f"sentences by exit {at}"
        )


def climb(
    rule: StoppingRule, threshold: float, exits: Sequence[int], proposed: Mapping[int, Sequence[Translation]]
) -> list[int]:
    """Return the exit at which a rule stops, for each sentence, given the translations at each exit."""
    stops = []
    for number in range(len(proposed[exits[0]])):
        before = None
        for exit in exits:
            here = proposed[exit][number]
            if exit == exits[-1] or accepts(rule, threshold, here, before):
                break
            before = here
        stops.append(exit)
    return stops


def rules(
    proposed: Mapping[int, Sequence[Translation]],
    seconds: Mapping[int, float],
    bleu: Callable[[list[str]], float],
) -> Iterator[ExitRule]:
    """Yield all rules that are tried: those that climb all exits, and those of one exit and the deepest.

    Args:
        proposed: translations of all sentences by exit, two exits at least.
        seconds: time to translate all sentences by exit.
        bleu: function of the translations of all sentences.
    """
    every = sorted(proposed)
    sets = dict.fromkeys([tuple(every), *((exit, every[-1]) for exit in every[:-1])])
    for exits in sets:
        means = [one.log_prob / (len(one.tokens) + 1) for exit in exits[:-1] for one in proposed[exit]]
        confidences = quantiles(means, n=20, method="inclusive") if len(means) > 1 else means
        thresholds = {"confidence": confidences, "agreement": _SHARES}
        for rule in get_args(StoppingRule):
            if rule == "agreement" and len(exits) < 3:  # the deepest exit has translated before any can agree
                continue
            for threshold in sorted(set(thresholds[rule])):
                stops = climb(rule, threshold, exits, proposed)
                texts = [proposed[exit][number].text for number, exit in enumerate(stops)]
                costs = {exit: sum(seconds[lower] for lower in exits if lower <= exit) for exit in exits}
                expected = sum(costs[exit] for exit in stops) / len(stops)
                counts = Counter(stops)
                yield ExitRule(rule, exits, threshold, bleu(texts), expected, {exit: counts[exit] for exit in exits})


def fastest(tried: Sequence[ExitRule], least_bleu: float) -> ExitRule:
    """Return the fastest rule with at least this BLEU; without any, that of the best BLEU."""
    enough = [rule for rule in tried if rule.bleu >= least_bleu]
    return min(enough, key=lambda rule: rule.seconds) if enough else max(tried, key=lambda rule: rule.bleu)
