"""Draw docs/images/collapse.png from the record of the search for a collapse.

python benchmarks/collapse_picture.py
"""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from records import RESULTS, ROOT, read

SYSTEMS = {
    "15-6, 1": "plain",
    "15-6, CAD (drop depth 3 of 6, ratio 1), 1": "CAD",
    "15-6, CAD, DDR, ALD, 1": "CAD, DDR, ALD",
    "15-6, depth-scaled initialisation, 1": "depth-scaled\ninitialisation",
}
"""Post-norm systems and seeds, as the table names them, and their labels."""
BIGRAM = 36  # validation perplexity of a bigram model of the training text, from the same section
THRESHOLD = 0.2  # collapse.threshold


def measured() -> dict[str, dict[str, float]]:
    """Return the figures by system and column."""
    table = read(RESULTS / "collapse_search.json").tables["runs"]
    columns = ("train ppl", "valid ppl", "source reliance")
    return {name: {column: float(table.figure(f"post, {name}", column)) for column in columns} for name in SYSTEMS}


def main() -> None:
    """Draw perplexities and source reliance of the systems."""
    systems = measured()
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.7), layout="constrained", width_ratios=(3, 2))
    places = range(len(systems))
    for shift, (column, label) in enumerate((("train ppl", "training"), ("valid ppl", "validation"))):
        bars = axes[0].bar(
            [place + 0.4 * shift - 0.2 for place in places],
            [values[column] for values in systems.values()],
            width=0.38,
            color=("#9ecae1", "#08519c")[shift],
            label=f"{label} text",
        )
        axes[0].bar_label(bars, fmt="%g", label_type="center", color=("black", "white")[shift])
    axes[0].axhline(BIGRAM, color="#555555", linestyle=":", linewidth=1)
    axes[0].text(3.55, BIGRAM + 0.6, "a bigram model", color="#555555", fontsize=9, ha="right")
    axes[0].set(ylim=(0, 49), title="perplexity")
    axes[0].legend(loc="upper left", ncols=2)
    bars = axes[1].bar(places, [values["source reliance"] for values in systems.values()], width=0.5, color="#08519c")
    axes[1].bar_label(bars, fmt="%.2f", padding=9)  # above the threshold's line
    axes[1].axhline(THRESHOLD, color="#d62728", linestyle="--", linewidth=1)
    axes[1].text(1, THRESHOLD + 0.22, "the monitor warns below this line", color="#d62728", fontsize=9, ha="center")
    axes[1].set(title="source reliance (nats a token)", ylim=(0, 2.1))
    figure.suptitle(
        "Post-norm, 15 encoder and 6 decoder layers: a language model, unless its initialisation is depth-scaled"
    )
    for axis in axes:
        axis.set_xticks(places, list(SYSTEMS.values()), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "images" / "collapse.png", dpi=110)


if __name__ == "__main__":
    main()
