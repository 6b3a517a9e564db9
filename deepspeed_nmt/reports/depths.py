"""BLEU and time at each depth: measurement, Pareto front, fastest sufficient depth, and oracle over depths.

On request also by how much the translations of a depth rely on the source, and the share of the tokens that its
decoder layers draft which the whole decoder accepts.

A system translates at several depths: one model with many exits, or many models with one depth each.

The rules by which a model stops at one of its exits, sentence by sentence, are fitted on the translations at each. A
rule and its threshold are a point of BLEU and time beside the fixed depths. The time of a sentence is the sum over
the exits that its rule climbs, each with its measured time for the text divided by the number of sentences; the
encoder, which :mod:`deepspeed_nmt.search.choosing_exits` runs once, is counted at each exit.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from deepspeed_nmt.api import Translator
from deepspeed_nmt.console import cell, logger, table
from deepspeed_nmt.core.model import exit_name
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.reports.pictures import picture, plainly
from deepspeed_nmt.reports.run_log import run_names
from deepspeed_nmt.reports.text_scores import ParallelText
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.choosing_exits import StoppingRule, accepts
from deepspeed_nmt.search.lines import SourceCounts
from deepspeed_nmt.search.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize

_WARM_UP_SENTENCES = 8
"""Number of sentences translated at each depth before it is timed: the first batch has start-up costs."""
_SHARES = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
"""Thresholds of the agreement that are tried; those of the confidence are its quantiles."""
Pair = tuple[int, int]
"""Numbers of stages of the encoder and of the decoder."""


@dataclass(frozen=True)
class Depth:
    """Stages of encoder and decoder at one depth, BLEU of the whole file, times to translate it and to load.

    ``reliance`` is the mean over sentences (nats); ``accepted`` the share of the tokens drafted by a lower exit, with
    the whole encoder, that greedy decoding accepts. None: not measured, no such exit, or drafts do not pay at it.
    """

    encoder: int
    decoder: int
    bleu: float
    seconds: float
    loading_seconds: float = 0.0
    reliance: float | None = None
    accepted: float | None = None

    @property
    def name(self) -> str:
        """Name of the exit, n-m."""
        return exit_name(self.encoder, self.decoder)


@dataclass(frozen=True)
class Oracle:
    """Choice of the best depth for each sentence: their number by depth, sorted :func:`by_size`, and their BLEU."""

    sentences: dict[str, int]
    bleu: float

    @property
    def cumulative(self) -> dict[str, float]:
        """Share of sentences that a depth or one before it translates best, by name."""
        sums = list(accumulate(self.sentences.values()))
        return {name: count / sums[-1] for name, count in zip(self.sentences, sums, strict=True)}


@dataclass(frozen=True)
class ExitRule:
    """A rule, the decoder stages that it climbs, and what is expected of it: seconds, and sentences by stage."""

    rule: StoppingRule
    exits: tuple[int, ...]
    threshold: float
    bleu: float
    seconds: float
    sentences: Mapping[int, int]

    def write(self, file: Path, weights: str) -> None:
        """Write the file that `translate --choose-exits` takes, with the digest of the weights that fit it."""
        atomic_write_text(file, json.dumps({**asdict(self), "weights": weights}, indent=1))

    def __str__(self) -> str:
        at = ", ".join(f"{number}: {count}" for number, count in self.sentences.items())
        return (
            f"{self.rule} of {self.threshold:.4g} or more: BLEU {self.bleu:.2f}, {self.seconds:.1f} s expected; "
            f"sentences by exit {at}"
        )


@dataclass(frozen=True)
class System:
    """Results of one system: its depths, in the order of n, then m; the oracle's choice; rules that were tried."""

    name: str
    depths: Sequence[Depth]
    oracle: Oracle | None = None
    rules: Sequence[ExitRule] = ()

    def rule(self, max_loss: float) -> ExitRule:
        """Return the fastest of the rules that lose at most ``max_loss`` BLEU, or else that of the best BLEU."""
        return fastest(self.rules, baseline(self.depths).bleu - max_loss)

    def report(self, max_loss: float) -> dict[str, Any]:
        """Return the report for programs; the cheapest depth may lose ``max_loss`` BLEU."""
        result = {
            "system": self.name,
            "depths": [asdict(depth) for depth in self.depths],
            "pareto_front": [depth.name for depth in pareto_front(self.depths)],
            "cheapest": cheapest(self.depths, max_loss).name,
            "compared_with": baseline(self.depths).name,
            "max_loss": max_loss,
        }
        if self.oracle is not None:
            result["oracle"] = {**asdict(self.oracle), "cumulative": self.oracle.cumulative}
        if self.rules:
            result["rule"] = asdict(self.rule(max_loss))
        return result

    def text(self, max_loss: float) -> str:
        """Return the report for people; the cheapest depth may lose ``max_loss`` BLEU."""
        result = self.report(max_loss)
        has_signs = self.depths[0].reliance is not None
        rows = [["n-m", "BLEU", "seconds", "with loading", *(["reliance", "accepted"] if has_signs else [])]]
        for depth in self.depths:
            times = depth.seconds, depth.seconds + depth.loading_seconds
            rows.append([depth.name, cell(depth.bleu, 2), *(cell(seconds, 1) for seconds in times)])
            if has_signs:
                accepted = "-" if depth.accepted is None else f"{depth.accepted:.1%}"
                rows[-1] += [cell(depth.reliance, 2), accepted]
        compared, full = result["compared_with"], _full_name(self.depths)
        of = "the full depth" if compared == full else f"the best depth, {compared} (none has the full depth {full})"
        lines = [
            f"Pareto front: {', '.join(result['pareto_front'])}",
            f"fastest depth within {max_loss} BLEU of {of}: {result['cheapest']}",
        ]
        if self.oracle is not None:
            rows[0] += ["best for", "cumulative"]
            for row in rows[1:]:
                row += [cell(self.oracle.sentences[row[0]]), f"{self.oracle.cumulative[row[0]]:.1%}"]
            lines.append(f"BLEU with the best pair for each sentence: {self.oracle.bleu:.2f}")
        if self.rules:
            rule = self.rule(max_loss)
            enough = rule.bleu >= baseline(self.depths).bleu - max_loss
            kind = f"fastest rule within {max_loss} BLEU" if enough else f"no rule within {max_loss} BLEU, best one"
            lines.append(f"{kind}: {rule}")
        return "\n".join([f"{self.name}:", table(rows), *lines])


def pareto_front(depths: Sequence[Depth]) -> list[Depth]:
    """Return the depths that no other one beats in both BLEU and time, fastest first."""
    front: list[Depth] = []
    for depth in sorted(depths, key=lambda depth: (depth.seconds, -depth.bleu)):
        if not front or depth.bleu > front[-1].bleu:
            front.append(depth)
    return front


def cheapest(depths: Sequence[Depth], max_loss: float) -> Depth:
    """Return the fastest depth whose BLEU is at most ``max_loss`` below that of the :func:`baseline`."""
    least = baseline(depths).bleu - max_loss
    return min((depth for depth in depths if depth.bleu >= least), key=lambda depth: depth.seconds)


def baseline(depths: Sequence[Depth]) -> Depth:
    """Return the depth of the largest n and the largest m; if it was not measured, that of the best BLEU."""
    full = _full_name(depths)
    return next((depth for depth in depths if depth.name == full), max(depths, key=lambda depth: depth.bleu))


def _full_name(depths: Sequence[Depth]) -> str:
    return exit_name(max(depth.encoder for depth in depths), max(depth.decoder for depth in depths))


def by_size(depth: Depth) -> tuple[int, int, int]:
    """Return a key that sorts depths by their larger side.

    All depths of at most k stages on both sides come before the others, so that cumulative shares include those of
    these k x k depths.
    """
    return max(depth.encoder, depth.decoder), depth.encoder + depth.decoder, depth.encoder


def oracle(
    depths: Sequence[Depth], translations: Sequence[Sequence[str]], bleus: Sequence[Sequence[float]]
) -> tuple[dict[str, int], list[str]]:
    """Choose the translation of each sentence that has the best sentence BLEU, and of equal ones the fastest depth's.

    Returns:
        Number of sentences chosen from each depth, by its name and sorted :func:`by_size`; and the translations.
    """
    counts = {depth.name: 0 for depth in sorted(depths, key=by_size)}
    chosen = []
    for candidates, scores in zip(zip(*translations, strict=True), zip(*bleus, strict=True), strict=True):
        ranks = [(score, -depth.seconds) for score, depth in zip(scores, depths, strict=True)]
        best = ranks.index(max(ranks))
        counts[depths[best].name] += 1
        chosen.append(candidates[best])
    return counts, chosen


class Members(NamedTuple):
    """A system to measure: the depths of each of its runs."""

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
                run.path, len(trained), len(pairs), ", ".join(exit_name(*pair) for pair in trained),
            )  # fmt: skip
        systems.append(Members(name, [(run, pairs)]))
    if single:
        ordered = sorted(single.values(), key=lambda member: member[1][-1])
        for (first, pair), (second, other) in pairwise(ordered):
            if pair == other:
                depth = exit_name(*pair[0])
                raise ConfigError(f"{first.path} and {second.path} both have the depth {depth}; give one of them")
        systems.insert(0, Members(f"{len(single)} models" if len(single) > 1 else next(iter(single)), ordered))
    return systems


def _stages(run: Run, *, alone: bool) -> Pair:
    stages = run.config.model.exit_stages()
    totals = (1, 1) if stages is None else (stages[0].total, stages[1].total)
    if stages is None or (alone and totals == (1, 1)):
        named = run.config.model.named_exits
        what = f"has the exits {' and '.join(named)}; `translate --exit` chooses one" if named else "has one exit"
        raise ConfigError(f"{run.path} {what}, and not several stages (layers, or loops over shared layers)")
    return totals


def measure(
    system: Members, text: ParallelText, scorer: Scorer, *, checkpoint: str, max_tokens: int, repeat: int,
    with_oracle: bool, with_rules: bool = False, with_signs: bool = False,
) -> System:  # fmt: skip
    """Translate a text at every depth of a system; the times are medians of ``repeat`` measurements.

    ``with_rules`` tries rules for the trained exits of the full encoder, by beam search as they are used,
    ``with_signs`` measures reliance and drafts.

    Raises:
        ConfigError: if there are fewer than two of them.
        CheckpointError: if a run has no such checkpoint.
    """
    pairs = [pair for _, of_run in system.pairs for pair in of_run]
    exits = _exits(system) if with_rules else []
    settings = {"name": "beam"} if with_rules else {}
    times: dict[Pair, list[tuple[float, float]]] = {pair: [] for pair in pairs}
    translations: dict[Pair, list[Translation]] = {}
    bleus: dict[Pair, float] = {}

    def translate(translator: Translator, lines: list[str], warn: bool = False) -> list[Translation]:
        counts = None if warn else SourceCounts()
        return [best[0] for best in translator.stream(lines, max_tokens=max_tokens, counts=counts)]

    # All pairs in turn, so that a change of the machine's load affects them alike.
    for repetition, (run, of_run) in product(range(repeat), system.pairs):
        started = time.monotonic()
        translator = Translator.open(run.path, checkpoint=checkpoint, **text.tags_for(run), **settings)
        to_load = time.monotonic() - started
        for pair in of_run:
            shallower = translator.at_exit(exit_name(*pair))
            if isinstance(search := shallower.search, SpeculativeConfig) and search.draft_layers >= pair[1]:
                shallower.search = search.without_drafts()
            translate(shallower, text.sources[:_WARM_UP_SENTENCES])
            started = time.monotonic()
            translations[pair] = translate(shallower, text.sources, warn=repetition == 0 and pair == of_run[0])
            times[pair].append((time.monotonic() - started, to_load))
            bleus[pair] = scorer.first([one.text for one in translations[pair]])
            logger.info("%s: BLEU %.2f, %.1f s", exit_name(*pair), bleus[pair], times[pair][-1][0])
    depths = [Depth(*pair, bleus[pair], *map(median, zip(*times[pair], strict=True))) for pair in pairs]
    if with_signs:
        for run, of_run in system.pairs:
            texts_of = {pair: [one.text for one in translations[pair]] for pair in of_run}
            signs = _signs(run, checkpoint, text, texts_of)
            depths = [
                replace(depth, reliance=signs[pair][0], accepted=signs[pair][1]) if pair in signs else depth
                for pair, depth in zip(pairs, depths, strict=True)
            ]
    seconds = {depth.decoder: depth.seconds for depth in depths if (depth.encoder, depth.decoder) in exits}
    tried = list(rules({m: translations[n, m] for n, m in exits}, seconds, scorer.first)) if exits else []
    if not with_oracle:
        return System(system.name, depths, rules=tried)
    texts = [[one.text for one in translations[pair]] for pair in pairs]
    sentences, chosen = oracle(depths, texts, [scorer.sentence_bleus(lines) for lines in texts])
    return System(system.name, depths, Oracle(sentences, scorer.first(chosen)), tried)


def _signs(
    run: Run, checkpoint: str, text: ParallelText, texts: Mapping[Pair, list[str]]
) -> dict[Pair, tuple[float, float | None]]:
    """Return the mean reliance of translations at each depth, and the share of drafted tokens that are accepted."""
    signs: dict[Pair, tuple[float, float | None]] = {}
    tags, sources = text.tags_for(run), text.sources
    translator = Translator.open(run.path, checkpoint=checkpoint, **tags)
    encoder, decoder = max(texts)
    for (n, m), lines in texts.items():
        scored = translator.at_exit(exit_name(n, m)).score(sources, lines, warn=False, reliance=True)
        reliance = fmean(one.reliance or 0.0 for one in scored)
        accepted = None
        if n == encoder and m < decoder:
            search = {"name": "speculative", "draft_layers": m, "draft_tokens": 4, "draft_confidence": 1.0}
            drafting, counts = Translator.open(run.path, checkpoint=checkpoint, **tags, **search), SourceCounts()
            with suppress(ConfigError):  # of layers that keep a state, whose exits draft nothing
                for _ in drafting.stream(sources, max_tokens=1, counts=counts):  # sentence by sentence, as drafts pay
                    pass
            if drafted := counts.drafts.get("drafted", 0):
                accepted = counts.drafts.get("accepted", 0) / drafted
        signs[n, m] = reliance, accepted
        logger.info(
            "%s: reliance %.2f nats%s",
            exit_name(n, m),
            reliance,
            "" if accepted is None else f", {accepted:.1%} of drafts accepted",
        )
    return signs


def _exits(system: Members) -> list[Pair]:
    """Return the trained exits of one run's full encoder."""
    (run, pairs), *others = system.pairs
    exits = [(n, m) for n, m in pairs if n == pairs[-1][0] and run.trained_at(exit_name(n, m), pairs[-1])]
    if others or len(exits) < 2:
        raise ConfigError(
            f"--fit chooses among exits of one run, but {system.name} has trained only one with its whole encoder; "
            "give a run of many exits, or add some by `train --add-exits`"
        )
    return exits


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


def draw_depths(systems: Sequence[System], out: Path) -> None:
    """Draw BLEU over n and m of each system, BLEU against time, signs by depth, and the oracle's choices."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    has_oracle = any(system.oracle is not None for system in systems)
    has_signs = systems[0].depths[0].reliance is not None
    rows = 1 + has_signs + has_oracle
    columns = len(systems) + 1
    with picture(out, 5.2 * columns, 4.5 * rows) as figure:
        parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
        *maps, plane = parts[0].subplots(1, columns)
        # One scale for all systems, so that their colours can be compared.
        bleus = [depth.bleu for system in systems for depth in system.depths]
        scale = Normalize(min(bleus), max(bleus))
        for axis, system in zip(maps, systems, strict=True):
            _draw_bleu(axis, system, scale)
        parts[0].colorbar(ScalarMappable(scale), ax=maps)
        for system in systems:
            depths, front = system.depths, pareto_front(system.depths)
            points = plane.scatter([depth.seconds for depth in depths], [depth.bleu for depth in depths], s=14)
            label, colour = plainly(f"Pareto front: {system.name}"), points.get_facecolor()[0]
            plane.plot([depth.seconds for depth in front], [depth.bleu for depth in front], color=colour, label=label)
            for depth in front:
                plane.annotate(depth.name, (depth.seconds, depth.bleu), fontsize="small")
            if system.rules:
                chosen = [rule.seconds for rule in system.rules], [rule.bleu for rule in system.rules]
                plane.scatter(*chosen, s=20, marker="x", color=colour, label=plainly(f"rules: {system.name}"))
        plane.set(xlabel="seconds, without loading", ylabel="BLEU")
        plane.legend(fontsize="small")
        plane.grid(alpha=0.3)
        if has_signs:
            _draw_signs(parts[1].subplots(), systems)
        if has_oracle:
            _draw_choices(parts[-1].subplots(), systems)


def _draw_bleu(axis: Axes, system: System, scale: Normalize) -> None:
    rows, columns = (max(getattr(depth, side) for depth in system.depths) for side in ("encoder", "decoder"))
    values = [[math.nan] * columns for _ in range(rows)]
    for depth in system.depths:
        values[depth.encoder - 1][depth.decoder - 1] = depth.bleu
        axis.text(depth.decoder, depth.encoder, f"{depth.bleu:.1f}", ha="center", va="center", color="white")
    borders = (0.5, columns + 0.5, 0.5, rows + 0.5)
    axis.imshow(values, origin="lower", extent=borders, aspect="auto", norm=scale)
    axis.set(xticks=range(1, columns + 1), yticks=range(1, rows + 1), title=plainly(f"BLEU: {system.name}"))
    axis.set(xlabel="decoder stages m", ylabel="encoder stages n")


def _draw_signs(axis: Axes, systems: Sequence[System]) -> None:
    """Draw reliance by decoder depth with the whole encoder as lines, and the accepted drafts dashed."""
    shares = axis.twinx()
    for system in systems:
        whole = max(depth.encoder for depth in system.depths)
        depths = sorted((depth for depth in system.depths if depth.encoder == whole), key=lambda depth: depth.decoder)
        stages = [depth.decoder for depth in depths]
        reliances = [math.nan if depth.reliance is None else depth.reliance for depth in depths]
        accepted = [math.nan if depth.accepted is None else 100.0 * depth.accepted for depth in depths]
        (line,) = axis.plot(stages, reliances, marker="o", label=plainly(system.name))
        shares.plot(stages, accepted, marker="s", linestyle="--", color=line.get_color())
    axis.set(xlabel="decoder stages m, whole encoder", ylabel="reliance on the source (nats): lines")
    axis.set_xticks(range(1, 1 + max(depth.decoder for system in systems for depth in system.depths)))
    shares.set(ylabel="drafted tokens accepted (%): dashed", ylim=(0.0, 105.0))
    axis.legend(fontsize="small")


def _draw_choices(axis: Axes, systems: Sequence[System]) -> None:
    """Draw the share of sentences that each depth translates best as bars, and their sums as lines."""
    depths = {depth.name: depth for system in systems for depth in system.depths}
    names = sorted(depths, key=lambda name: by_size(depths[name]))
    oracles = {system.name: system.oracle.sentences for system in systems if system.oracle is not None}
    width = 0.8 / len(oracles)
    sums = axis.twinx()
    for number, (system, sentences) in enumerate(oracles.items()):
        total = sum(sentences.values())
        shift = (number - (len(oracles) - 1) / 2) * width
        shares = [100.0 * sentences.get(name, 0) / total for name in names]
        bars = axis.bar([place + shift for place in range(len(names))], shares, width, label=plainly(system))
        sums.plot(range(len(names)), list(accumulate(shares)), color=bars[0].get_facecolor(), linewidth=1.5)
    axis.set_xticks(range(len(names)), names, rotation=90 if len(names) > 20 else 0)
    axis.set(xlabel="n-m", ylabel="sentences translated best (%): bars", title="oracle over depths")
    sums.set(ylabel="cumulative (%): lines", ylim=(0.0, 105.0))
    axis.legend(fontsize="small", loc="center right")
