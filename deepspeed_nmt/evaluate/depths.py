"""BLEU and time of a model at each depth: Pareto front, fastest sufficient depth, and oracle over depths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_nmt.evaluate.picture import save_picture


@dataclass(frozen=True)
class Depth:
    """Result of one exit.

    Attributes:
        encoder: n, stages of the encoder.
        decoder: m, stages of the decoder.
        bleu: of the whole file.
        seconds: time to translate it.
    """

    encoder: int
    decoder: int
    bleu: float
    seconds: float

    @property
    def name(self) -> str:
        """Name of the exit, n-m."""
        return f"{self.encoder}-{self.decoder}"


def pareto_front(depths: Sequence[Depth]) -> list[Depth]:
    """Return the depths that no other one beats in both BLEU and time, fastest first."""
    front: list[Depth] = []
    for depth in sorted(depths, key=lambda each: (each.seconds, -each.bleu)):
        if not front or depth.bleu > front[-1].bleu:
            front.append(depth)
    return front


def cheapest(depths: Sequence[Depth], max_loss: float) -> Depth:
    """Return the fastest depth whose BLEU is at most ``max_loss`` below that of the full depth, the last one."""
    enough = [depth for depth in depths if depth.bleu >= depths[-1].bleu - max_loss]
    return min(enough, key=lambda each: each.seconds)


def oracle(sentence_scores: Sequence[Sequence[float]]) -> list[int]:
    """Return for each sentence the index of the depth that translates it best, the first of equals.

    Shape: depths x sentences -> sentences
    """
    columns = zip(*sentence_scores, strict=True)
    return [max(range(len(column)), key=column.__getitem__) for column in columns]


def depth_table(depths: Sequence[Depth], chosen: Mapping[str, int], result: Mapping[str, object]) -> str:
    """Return the report for people.

    Args:
        depths: all depths.
        chosen: number of sentences that each depth translates best, by name; empty without an oracle.
        result: the report for programs.
    """
    lines = [f"{'n-m':>7}{'BLEU':>9}{'seconds':>10}{'  best for' if chosen else ''}".rstrip()]
    for depth in depths:
        best = f"{chosen[depth.name]:>10,}" if chosen else ""
        lines.append(f"{depth.name:>7}{depth.bleu:>9.2f}{depth.seconds:>10.1f}{best}")
    front = result["pareto_front"]
    assert isinstance(front, list)
    lines += ["", f"Pareto front: {', '.join(front)}"]
    lines.append(f"fastest depth within {result['max_loss']} BLEU of the full depth: {result['cheapest']}")
    if chosen:
        picked = result["oracle"]
        assert isinstance(picked, dict)
        lines.append(f"BLEU with the best pair for each sentence: {picked['bleu']:.2f}")
    return "\n".join(lines)


def draw_depths(depths: Sequence[Depth], out: Path) -> None:
    """Draw a heat map of BLEU over n and m, and BLEU against time with the Pareto front."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows, columns = depths[-1].encoder, depths[-1].decoder
    figure, (heat, plane) = pyplot.subplots(1, 2, figsize=(11.0, 4.5))
    grid = [[depths[n * columns + m].bleu for m in range(columns)] for n in range(rows)]
    image = heat.imshow(grid, origin="lower", extent=(0.5, columns + 0.5, 0.5, rows + 0.5), aspect="auto")
    for depth in depths:
        heat.text(depth.decoder, depth.encoder, f"{depth.bleu:.1f}", ha="center", va="center", color="white")
    heat.set_xticks(range(1, columns + 1))
    heat.set_yticks(range(1, rows + 1))
    heat.set_xlabel("decoder stages m")
    heat.set_ylabel("encoder stages n")
    heat.set_title("BLEU")
    figure.colorbar(image, ax=heat)
    plane.scatter([each.seconds for each in depths], [each.bleu for each in depths], s=14)
    front = pareto_front(depths)
    plane.plot([each.seconds for each in front], [each.bleu for each in front], color="tab:red", label="Pareto front")
    for each in front:
        plane.annotate(each.name, (each.seconds, each.bleu), fontsize="small")
    plane.set_xlabel("seconds")
    plane.set_ylabel("BLEU")
    plane.legend()
    plane.grid(alpha=0.3)
    figure.tight_layout()
    try:
        save_picture(figure, out)
    finally:
        pyplot.close(figure)
