"""Draw the pictures of docs/images that come from records.

    python benchmarks/pictures.py

collapse.png is what cross-attention drop mends (record `collapse`), stabilisers.png the validation perplexity of each
`model.norm` by depth (record `stabilisers`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from records import RESULTS, ROOT, read

ARMS = {
    "mixed6-15_drop0": ("cross-attention in all layers", "#d62728"),
    "mixed6-15_drop78": ("none in the lowest 12 (CAD)", "#08519c"),
}
"""Arms of the record, and how they are drawn."""
PANELS = {
    "train/ppl": "training perplexity",
    "collapse/prefix_reliance": "prefix reliance (nats a token)",
    "valid/bleu": "validation BLEU",
}
"""Curves, and the titles of their panels."""
SEED = 1
IMAGES = ROOT / "docs" / "images"


def rows_of(record: str) -> list[dict[str, Any]]:
    """Return the rows of a record that are of the first seed."""
    return [row for row in read(RESULTS / f"{record}.json").rounds if row["seed"] == SEED]


def draw_collapse() -> None:
    """Draw the curves of the arms."""
    curves = {row["arm"]: row["curves"] for row in rows_of("collapse")}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3.4), layout="constrained")
    for axis, (tag, title) in zip(axes, PANELS.items(), strict=True):
        for arm, (label, colour) in ARMS.items():
            axis.plot(*zip(*curves[arm][tag], strict=True), color=colour, label=label, linewidth=2)
        axis.set(title=title, xlabel="update")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(yscale="log", yticks=(10, 30, 100, 300, 1000), yticklabels=("10", "30", "100", "300", "1,000"))
    axes[0].minorticks_off()
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("A pre-norm encoder of 6 layers and a post-norm decoder of 15: what its cross-attention erases")
    figure.savefig(IMAGES / "collapse.png", dpi=110)


def draw_stabilisers() -> None:
    """Draw the validation perplexity of models of equally many layers on both sides, lowest at the greatest depth."""
    lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows_of("stabilisers"):
        match = re.fullmatch(r"(\w+)_(\d+)-(\d+)", row["arm"])
        if match and match[2] == match[3] and row["seed"] == 1:
            lines[match[1]].append((int(match[2]), row["valid/ppl"]))
    figure, axis = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    depths = sorted({depth for line in lines.values() for depth, _ in line})
    colours = plt.colormaps["turbo"]
    for number, (style, line) in enumerate(sorted(lines.items(), key=lambda each: max(each[1])[1])):
        colour, dashes = colours(number / (len(lines) - 1)), "-" if number % 2 == 0 else "--"
        axis.plot(*zip(*sorted(line), strict=True), dashes, color=colour, marker="o", markersize=4, label=style)
    axis.set(yscale="log", xlabel="layers of the encoder, and of the decoder", ylabel="validation perplexity")
    axis.set(xticks=depths, xticklabels=[f"{depth}+{depth}" for depth in depths])
    # What does not train is beyond.
    axis.set(ylim=(42, 300), yticks=(50, 70, 100, 150, 200), yticklabels=("50", "70", "100", "150", "200"))
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(IMAGES / "stabilisers.png", dpi=110)


if __name__ == "__main__":
    draw_collapse()
    draw_stabilisers()
