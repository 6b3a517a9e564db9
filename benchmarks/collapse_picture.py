"""Draw docs/images/collapse.png from the table "A setting in which 6 layers train and 15 collapse" of RESULTS.md.

python benchmarks/collapse_picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
ARMS = ("6 layers", "15 layers")
VOCABULARY = 2_000  # tokens; the perplexity of guessing
THRESHOLD = 0.2  # collapse.threshold


def measured() -> dict[str, dict[str, float]]:
    """Read the rows of the table: arm -> column -> value."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    lines = text.split("**A setting in which 6 layers train and 15 collapse**")[1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header = [re.sub(r" \(.*", "", name) for name in table[0]]
    rows = {row[0]: row[1:] for row in table[2:] if len(row) == len(header)}
    return {
        arm: {name: float(cell.replace(",", "")) for name, cell in zip(header[1:], rows[arm], strict=True)}
        for arm in ARMS
    }


def main() -> None:
    """Draw perplexities, BLEU and source reliance of both decoders."""
    arms = measured()
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7), layout="constrained", width_ratios=(2, 1, 1))
    places = range(len(ARMS))
    for shift, (name, label) in enumerate((("train ppl", "training"), ("valid ppl", "validation"))):
        bars = axes[0].bar(
            [place + 0.4 * shift - 0.2 for place in places],
            [arms[arm][name] for arm in ARMS],
            width=0.38,
            color=("#9ecae1", "#08519c")[shift],
            label=f"{label} text",
        )
        axes[0].bar_label(bars, labels=[f"{arms[arm][name]:,g}" for arm in ARMS])
    axes[0].axhline(VOCABULARY, color="#d62728", linestyle="--", linewidth=1)
    axes[0].text(-0.55, VOCABULARY * 1.15, "guessing: the monitor warns above this line", color="#d62728", fontsize=9)
    axes[0].set(yscale="log", ylim=(5, 120_000), xlim=(-0.6, 1.6), title="perplexity")
    axes[0].legend(loc="upper left")
    for axis, name, unit in ((axes[1], "test BLEU", ""), (axes[2], "source reliance", " (nats)")):
        bars = axis.bar(places, [arms[arm][name] for arm in ARMS], width=0.5, color="#08519c")
        axis.bar_label(bars, labels=[f"{arms[arm][name]:g}" for arm in ARMS])
        axis.set(title=name + unit, xlim=(-0.6, 1.6))
        axis.margins(y=0.15)
    axes[2].axhline(THRESHOLD, color="#d62728", linestyle="--", linewidth=1)
    axes[2].text(0.5, THRESHOLD + 0.03, "it warns\nbelow", color="#d62728", fontsize=9, ha="center")
    figure.suptitle("Post-norm decoders after 1,550 updates: the deep one learns nothing usable")
    for axis in axes:
        axis.set_xticks(places, [f"decoder of {arm}" if axis is axes[0] else arm for arm in ARMS])
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "images" / "collapse.png", dpi=110)


if __name__ == "__main__":
    main()
