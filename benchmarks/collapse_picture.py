"""Draw docs/images/collapse.png from the record of the experiment with cross-attention drop.

python benchmarks/collapse_picture.py
"""

from __future__ import annotations

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


def main() -> None:
    """Draw the curves of the arms."""
    curves = {row["arm"]: row["curves"] for row in read(RESULTS / "collapse.json").rounds if row["seed"] == SEED}
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
    figure.savefig(ROOT / "docs" / "images" / "collapse.png", dpi=110)


if __name__ == "__main__":
    main()
