"""BLEU and time at each depth: Pareto front, fastest sufficient depth, and oracle over depths.

A system translates at several depths: one model with many exits, or many models with one depth each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.evaluate.picture import picture
from deepspeed_nmt.evaluate.table import cell, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize


@dataclass(frozen=True)
class Depth:
    """Result of one depth.

    Attributes:
        encoder: n, stages of the encoder.
        decoder: m, stages of the decoder.
        bleu: of the whole file.
        seconds: time to translate it.
        loading_seconds: time to make and load the model.
    """

    encoder: int
    decoder: int
    bleu: float
    seconds: float
    loading_seconds: float = 0.0

    @property
    def name(self) -> str:
        """Name of the exit, n-m."""
        return f"{self.encoder}-{self.decoder}"


@dataclass(frozen=True)
class Oracle:
    """Choice of the best depth for each sentence.

    Attributes:
        sentences: number of sentences that each depth translates best, by its name, in the order of
            :func:`by_size`.
        bleu: BLEU of the chosen translations.
    """

    sentences: dict[str, int]
    bleu: float

    @property
    def cumulative(self) -> dict[str, float]:
        """Share of sentences that a depth or one before it translates best, by name."""
        total = sum(self.sentences.values())
        return {
            name: count / total
            for name, count in zip(self.sentences, accumulate(self.sentences.values()), strict=True)
        }


@dataclass(frozen=True)
class System:
    """Results of one system.

    Attributes:
        name: of the system.
        depths: all its depths, in the order of n, then m.
        oracle: None if it was not asked for.
    """

    name: str
    depths: Sequence[Depth]
    oracle: Oracle | None = None

    def report(self, max_loss: float) -> dict[str, Any]:
        """Return the report for programs.

        Args:
            max_loss: BLEU that the cheapest depth may lose.
        """
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
        return result

    def text(self, max_loss: float) -> str:
        """Return the report for people.

        Args:
            max_loss: BLEU that the cheapest depth may lose.
        """
        head = ["n-m", "BLEU", "seconds", "with loading"]
        rows = [
            [each.name, cell(each.bleu, 2), cell(each.seconds, 1), cell(each.seconds + each.loading_seconds, 1)]
            for each in self.depths
        ]
        if self.oracle is not None:
            head += ["best for", "cumulative"]
            cumulative = self.oracle.cumulative
            for row in rows:
                row += [cell(self.oracle.sentences[row[0]]), f"{cumulative[row[0]]:.1%}"]
        lines = [
            f"{self.name}:",
            text_table([head, *rows]),
            f"Pareto front: {', '.join(depth.name for depth in pareto_front(self.depths))}",
            f"fastest depth within {max_loss} BLEU of {self._baseline()}: {cheapest(self.depths, max_loss).name}",
        ]
        if self.oracle is not None:
            lines.append(f"BLEU with the best pair for each sentence: {self.oracle.bleu:.2f}")
        return "\n".join(lines)

    def _baseline(self) -> str:
        """Return words for the depth that the cheapest one is compared with."""
        if full_depth(self.depths) is not None:
            return "the full depth"
        return f"the best depth, {baseline(self.depths).name} (none has the full depth {_full_name(self.depths)})"


def pareto_front(depths: Sequence[Depth]) -> list[Depth]:
    """Return the depths that no other one beats in both BLEU and time, fastest first."""
    front: list[Depth] = []
    for depth in sorted(depths, key=lambda each: (each.seconds, -each.bleu)):
        if not front or depth.bleu > front[-1].bleu:
            front.append(depth)
    return front


def cheapest(depths: Sequence[Depth], max_loss: float) -> Depth:
    """Return the fastest depth whose BLEU is at most ``max_loss`` below that of the :func:`baseline`."""
    least = baseline(depths).bleu - max_loss
    return min((depth for depth in depths if depth.bleu >= least), key=lambda each: each.seconds)


def baseline(depths: Sequence[Depth]) -> Depth:
    """Return the full depth; if it was not measured, the depth of the best BLEU."""
    return full_depth(depths) or max(depths, key=lambda each: each.bleu)


def full_depth(depths: Sequence[Depth]) -> Depth | None:
    """Return the depth of the largest n and the largest m; None if no model has both."""
    return next((depth for depth in depths if depth.name == _full_name(depths)), None)


def _full_name(depths: Sequence[Depth]) -> str:
    return f"{max(depth.encoder for depth in depths)}-{max(depth.decoder for depth in depths)}"


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

    Args:
        depths: all depths.
        translations: translations of all sentences by each depth.
        bleus: sentence BLEU of each translation.

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


def draw_depths(systems: Sequence[System], out: Path) -> None:
    """Draw BLEU over n and m of each system, BLEU against time, and the distribution of the oracle's choices."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    rows = 2 if any(system.oracle is not None for system in systems) else 1
    columns = len(systems) + 1
    with picture(out, 5.2 * columns, 4.5 * rows) as figure:
        parts = figure.subfigures(rows, 1, squeeze=False)[:, 0]
        *maps, plane = parts[0].subplots(1, columns)
        # One scale for all systems, so that their colours can be compared.
        found = [depth.bleu for system in systems for depth in system.depths]
        scale = Normalize(min(found), max(found))
        for axis, system in zip(maps, systems, strict=True):
            _draw_bleu(axis, system, scale)
        parts[0].colorbar(ScalarMappable(scale), ax=maps)
        for system in systems:
            _draw_times(plane, system)
        plane.set_xlabel("seconds, without loading")
        plane.set_ylabel("BLEU")
        plane.legend(fontsize="small")
        plane.grid(alpha=0.3)
        if rows > 1:
            _draw_choices(parts[1].subplots(), systems)


def _draw_bleu(axis: Axes, system: System, scale: Normalize) -> None:
    rows, columns = (max(getattr(each, side) for each in system.depths) for side in ("encoder", "decoder"))
    values = [[math.nan] * columns for _ in range(rows)]
    for depth in system.depths:
        values[depth.encoder - 1][depth.decoder - 1] = depth.bleu
        axis.text(depth.decoder, depth.encoder, f"{depth.bleu:.1f}", ha="center", va="center", color="white")
    borders = (0.5, columns + 0.5, 0.5, rows + 0.5)
    axis.imshow(values, origin="lower", extent=borders, aspect="auto", norm=scale)
    axis.set_xticks(range(1, columns + 1))
    axis.set_yticks(range(1, rows + 1))
    axis.set_xlabel("decoder stages m")
    axis.set_ylabel("encoder stages n")
    axis.set_title(f"BLEU: {system.name}")


def _draw_times(axis: Axes, system: System) -> None:
    points = axis.scatter([each.seconds for each in system.depths], [each.bleu for each in system.depths], s=14)
    front = pareto_front(system.depths)
    colour = points.get_facecolor()[0]
    label = f"Pareto front: {system.name}"
    axis.plot([each.seconds for each in front], [each.bleu for each in front], color=colour, label=label)
    for each in front:
        axis.annotate(each.name, (each.seconds, each.bleu), fontsize="small")


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
        bars = axis.bar([place + shift for place in range(len(names))], shares, width, label=system)
        sums.plot(range(len(names)), list(accumulate(shares)), color=bars[0].get_facecolor(), linewidth=1.5)
    axis.set_xticks(range(len(names)), names, rotation=90 if len(names) > 20 else 0)
    axis.set_xlabel("n-m")
    axis.set_ylabel("sentences translated best (%): bars")
    sums.set_ylabel("cumulative (%): lines")
    sums.set_ylim(0.0, 105.0)
    axis.set_title("oracle over depths")
    axis.legend(fontsize="small", loc="center right")
