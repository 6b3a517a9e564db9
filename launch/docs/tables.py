"""Write the pages of docs/ that are generated from the code: all settings, and the table of recipes.

python launch/docs/tables.py
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from deepspeed_nmt.commands.recipes import layers, width
from deepspeed_nmt.commands.settings import settings_reference
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.choice import is_installed
from deepspeed_nmt.planning.gpus import GPUS
from deepspeed_nmt.planning.memory import GIB
from deepspeed_nmt.recipes import recipes
from deepspeed_nmt.run.plans import Plans
from deepspeed_nmt.search.decode_options import DecodeOptions

LARGE = "deep_decoder_big_54_stabilised"
DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- written by launch/docs/tables.py -->\n\n", "<!-- end of what it writes -->\n"

PAGES = {
    "export.md#translate-with-ctranslate2": "export runtime",
    "#n-best-lists": "nbest",
    "translation.md#alignments": "alignment",
    "translation.md#doubtful-translations": "reliance",
    "papers/depth-growing.md": "exit rerank",
    "papers/multi-layer-softmaxing.md": "encoder-layers decoder-layers",
    "multilingual.md#symbols-and-tags": "tag tag-target",
    "translation.md#text-that-is-not-utf-8": "strict",
    "#pieces": "workers",
    "translation.md": "search",
    "translation.md#diverse-beam-search": "groups diversity",
    "translation.md#sampling": "samples",
    "translation.md#speculative-decoding": "draft-layers",
    "papers/parallel-decoder.md": "iterations length-beam",
    "translation.md#rules": "prefix",
    "translation.md#lexical-constraints": "constraints",
}
"""Pages, or sections of this one, that say more of an option of `translate`."""


def settings_page() -> str:
    """Return the page of all settings."""
    return f"""\
# All settings

Each setting with its default, the values it takes, and its meaning. [Settings](settings.md) explains how to give
them. (This page is generated: `python launch/docs/tables.py` writes it from the code.)

{settings_reference()}"""


def recipe_table() -> str:
    """Return the table of all recipes."""
    head = ["recipe", "layers", "D", "norm", "dropout", "peak lr", "warm-up", "tokens an update", "updates"]
    rows = []
    for name in recipes():
        config = load_config(name)
        model: Any = config.model
        norm = "post" if hasattr(model, "source") else "none"
        if hasattr(model, "norms"):
            norm = "/".join(dict.fromkeys(model.norms()))
        rows.append(
            [
                *(f"`{name}`", layers(model), f"{width(model)}", norm),
                *(f"{model.dropout:g}", f"{config.optimizer.lr:g}", f"{config.schedule.warmup_updates:,}"),
                *(f"{config.batch.update_tokens:,}", f"{config.training.max_updates:,}"),
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def plan_table() -> str:
    """Return the table of the memory that `plan` computes for a large model on clusters of V100s."""
    recomputed = ["engine.recompute_encoder=1", "engine.recompute_decoder=1"]
    vocabulary, plans = Vocabulary(32000), Plans()
    lines = [
        "| cluster | as the recipe is set (ZeRO-2, 4,096 tokens) | with all layers recomputed | advised | GiB |",
        "|---|---|---|---|---|",
    ]
    for name, ranks in itertools.product(("v100-16g", "v100-32g"), (8, 32)):
        gpu = GPUS[name]
        plain, small = (
            plans.on(gpu, ranks, load_config(LARGE, settings=settings), vocabulary).planner
            for settings in ([], recomputed)
        )
        as_set, least = plain.as_set(gpu.usable_gib), small.as_set(gpu.usable_gib)
        advised = plain.advised(gpu)
        assert not any(advised.recompute), "the table has no column for it"
        cells = [
            f"{ranks} x V100 {gpu.gib:.0f} GB",
            f"{as_set.total / GIB:.2f} GiB{'' if as_set.fits(gpu.usable_gib) else ', does not fit'}",
            f"{least.total / GIB:.2f} GiB",
            f"ZeRO-{advised.layout.stage}, {advised.micro_tokens:,} tokens",
            f"{advised.total / GIB:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    (flops,) = plans.flops(load_config(LARGE), vocabulary).values()
    work = f"A target token costs {flops / 1e9:.2f} GFLOP, forward and backward."
    return "\n".join([*lines, "", work, ""])


def option_tables() -> str:
    """Return the tables of the options of `translate`."""
    more = {name: f" ([more]({page}))" for page, names in PAGES.items() for name in names.split()}
    groups: dict[str, list[str]] = {}
    for field, info in DecodeOptions.model_fields.items():
        if info.description is None:
            continue
        name, extra, text = field.replace("_", "-"), info.json_schema_extra, info.description
        if "(default" not in text and info.default not in (None, False, True):
            text += f" ({info.default:,})" if isinstance(info.default, int) else f" ({info.default})"
        typed = f"--{name} {extra['metavar']}".strip()
        row = f"| `{typed}` | {text.replace('(default: ', '(')}{more.get(name, '')} |\n"
        groups.setdefault(extra.get("group", ""), []).append(row)
    head = "| option | effect |\n|---|---|\n"
    titles = {group: f"\n**{group.capitalize()}**\n\n" if group else "" for group in groups}
    return "".join(titles[group] + head + "".join(rows) for group, rows in groups.items())


def with_table(page: str, table: str) -> str:
    """Return a page with a new version of the table between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{table}\n{END}{after}"


def main() -> None:
    """Write the pages."""
    if not is_installed("softmax", "triton"):  # the plans of the table are those with Triton's kernels
        sys.exit("Triton must be installed, but is not; run `pip install -r requirements/test.txt`")
    pages = {"configuration.md": settings_page()}
    for name, table in (("recipes.md", recipe_table()), ("scale.md", plan_table()), ("commands.md", option_tables())):
        pages[name] = with_table((DOCS / name).read_text(encoding="utf-8"), table)
    for name, page in pages.items():
        (DOCS / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
