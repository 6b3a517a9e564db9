"""Write the pages of docs/ that are generated from the code: all settings, and the table of recipes.

python launch/docs/tables.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_nmt.config import load_config
from deepspeed_nmt.recipes import recipes
from deepspeed_nmt.settings_reference import settings_reference

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- written by launch/docs/tables.py -->\n\n", "<!-- end of what it writes -->\n"


def recipe_table() -> str:
    """Return the table of all recipes."""
    head = "| recipe | layers | D | norm | dropout | peak lr | warm-up | tokens an update | updates |\n"
    return head + "|---" * 9 + "|\n" + "".join(f"| {' | '.join(_row(name))} |\n" for name in recipes())


def _row(name: str) -> list[str]:
    config = load_config(name)
    model: Any = config.model
    return [
        f"`{name}`",
        _layers(model),
        f"{model.dim if hasattr(model, 'dim') else model.source.dim}",
        f"{model.norm}" if hasattr(model, "norm") else "post",
        f"{model.dropout:g}",
        f"{config.optimizer.lr:g}",
        f"{config.schedule.warmup_updates:,}",
        f"{config.batch.update_tokens:,}",
        f"{config.training.max_updates:,}",
    ]


def _layers(model: Any) -> str:
    """Return the layers of encoder and decoder as text, with loops after a cross and grown layers in brackets."""
    if hasattr(model, "source"):  # BERTs
        coordinator = f" + {model.coordinator_layers}" if getattr(model, "decoder", "") == "coordinator" else ""
        decoder = model.target.layers // 2 if getattr(model, "decoder", "") == "serial" else model.target.layers
        return f"{model.source.layers} + {decoder}{coordinator}"
    sides = (f"{model.encoder_layers}", f"{model.decoder_layers}")
    if hasattr(model, "encoder_loops"):
        sides = (f"{sides[0]} x {model.encoder_loops}", f"{sides[1]} x {model.decoder_loops}")
    if hasattr(model, "top_encoder_layers"):
        sides = (f"{sides[0]} (+{model.top_encoder_layers})", f"{sides[1]} (+{model.top_decoder_layers})")
    return " + ".join(sides)


def with_table(page: str) -> str:
    """Return a page with an updated table of recipes."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}{recipe_table()}\n{END}{after}"


def main() -> None:
    """Write both pages."""
    (DOCS / "configuration.md").write_text(settings_reference(), encoding="utf-8")
    page = DOCS / "recipes.md"
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
