"""Measurement of BLEU and time at the depths of one run with many exits, or of many runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel, exit_name
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.curves import run_names
from deepspeed_nmt.evaluate.depths import Depth, Oracle, System, oracle
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.parallel_text import ParallelText
from deepspeed_nmt.search import translate as search
from deepspeed_nmt.search.requests import LineInputs

_WARM_UP_SENTENCES = 8
"""Number of sentences translated at each depth before it is timed: the first batch has start-up costs."""

Pair = tuple[int, int]
"""Numbers of stages of the encoder and of the decoder."""


@dataclass(frozen=True)
class Measurement:
    """Settings of a measurement.

    Attributes:
        checkpoint: best, last, average, or a path.
        max_tokens: batch size: sentences x longest source.
        repeat: times to measure; the median counts.
        oracle: True to choose the best depth for each sentence.
    """

    checkpoint: str
    max_tokens: int
    repeat: int
    oracle: bool


@dataclass(frozen=True)
class Members:
    """A system to measure.

    Attributes:
        name: of the system.
        pairs: depths to measure of each run.
    """

    name: str
    pairs: Sequence[tuple[Run, Sequence[Pair]]]


def systems_of(runs: Sequence[Run]) -> list[Members]:
    """Divide runs into systems: each run with many trained exits is one, the others together are one.

    A run alone is a system with all its exits, trained or not.

    Raises:
        ConfigError: if a run has no exits n-m, a run alone has a single one, or two models have the same depth.
    """
    names = run_names([run.path for run in runs])
    systems: list[Members] = []
    single: dict[str, tuple[Run, Sequence[Pair]]] = {}
    for name, run in zip(names, runs, strict=True):
        stages = _stages(run, alone=len(runs) == 1)
        pairs = [(n, m) for n in range(1, stages[0] + 1) for m in range(1, stages[1] + 1)]
        trained = [pair for pair in pairs if run.trained_at(exit_name(*pair), stages)]
        if len(runs) > 1 and len(trained) == 1:
            single[name] = (run, trained)
            continue
        if len(trained) < len(pairs):
            logger.warning(
                "%s was trained at only %d of its %d depths (%s); expect bad translations at the others",
                run.path,
                len(trained),
                len(pairs),
                ", ".join(exit_name(*pair) for pair in trained),
            )
        systems.append(Members(name, [(run, pairs)]))
    if single:
        ordered = sorted(single.values(), key=lambda member: member[1][-1])
        _check_depths(ordered)
        systems.insert(0, Members(f"{len(single)} models" if len(single) > 1 else next(iter(single)), ordered))
    return systems


def _stages(run: Run, *, alone: bool) -> Pair:
    stages = run.config.model.exit_stages()
    totals = (1, 1) if stages is None else (stages[0].total, stages[1].total)
    if stages is None or (alone and totals == (1, 1)):
        named = run.config.model.named_exits
        what = f"has the exits {' and '.join(named)}; translate with --exit" if named else "has one exit"
        raise ConfigError(
            "report depths needs a run with several stages (layers, or loops over shared layers), but "
            f"{run.path} {what}"
        )
    return totals


def _check_depths(members: Sequence[tuple[Run, Sequence[Pair]]]) -> None:
    found: dict[Pair, Run] = {}
    for run, (pair,) in members:
        if pair in found:
            raise ConfigError(
                f"runs of one depth each must have different ones, but {found[pair].path} and {run.path} both have "
                f"{exit_name(*pair)}; give one of them"
            )
        found[pair] = run


def measure(system: Members, text: ParallelText, scorer: Scorer, how: Measurement) -> System:
    """Translate a text at every depth of a system.

    Args:
        system: runs and their depths.
        text: the test set.
        scorer: of its translations by all runs.
        how: how to measure.

    Raises:
        CheckpointError: if a run has no such checkpoint.
    """
    members = [(run, [_Measured(pair) for pair in pairs]) for run, pairs in system.pairs]
    for repetition in range(how.repeat):
        # All pairs in turn, so that a change of the machine's load affects them alike.
        for run, pairs in members:
            _measure_run(run, pairs, text, scorer, how, warn=repetition == 0)
    measured = [each for _, pairs in members for each in pairs]
    depths = [each.depth for each in measured]
    if not how.oracle:
        return System(system.name, depths)
    translations = [each.hypotheses for each in measured]
    sentences, chosen = oracle(depths, translations, [scorer.sentence_bleus(each) for each in translations])
    return System(system.name, depths, Oracle(sentences, scorer.first(chosen)))


@dataclass
class _Measured:
    """Measurements of one pair of a run.

    Attributes:
        pair: depth of both sides.
        hypotheses: translations of all sentences.
        bleu: BLEU of the translations.
        seconds: time to translate, of each repetition.
        loading: time to make and load the model, of each repetition.
    """

    pair: Pair
    hypotheses: list[str] = field(default_factory=list)
    bleu: float = math.nan
    seconds: list[float] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)

    @property
    def depth(self) -> Depth:
        """Result, with the medians of times."""
        return Depth(*self.pair, self.bleu, median(self.seconds), median(self.loading))


def _measure_run(
    run: Run, pairs: Sequence[_Measured], text: ParallelText, scorer: Scorer, how: Measurement, *, warn: bool
) -> None:
    """Measure each pair of a run once more.

    Args:
        run: the run.
        pairs: its pairs; the measurements are added.
        text: the test set.
        scorer: of its translations.
        how: how to measure.
        warn: True to warn of the text.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    model = run.model(how.checkpoint).to(device)
    loading = time.monotonic() - started
    for number, each in enumerate(pairs):
        name = exit_name(*each.pair)
        shallower = model.at_exit(name)
        _translate(run, shallower, text.sources[:_WARM_UP_SENTENCES], how)
        started = time.monotonic()
        hypotheses = _translate(run, shallower, text.sources, how, warn=warn and number == 0)
        each.seconds.append(time.monotonic() - started)
        each.loading.append(loading)
        if not each.hypotheses:
            each.hypotheses, each.bleu = hypotheses, scorer.first(hypotheses)
        logger.info("%s: BLEU %.2f, %.1f s", name, each.bleu, each.seconds[-1])


def _translate(
    run: Run, model: TranslationModel, lines: list[str], how: Measurement, warn: bool = False
) -> list[str]:
    found = search.translate_lines(
        model,
        run.tokenizer,
        lines,
        run.config.search,
        how.max_tokens,
        device=next(model.parameters()).device,
        max_source_tokens=run.max_source_tokens,
        warn=warn,
        inputs=LineInputs(tags=run.tags),
    )
    return [best[0].text for best in found]
