"""List the recipes, which are named experiments, with their layers and what they are.

    deepspeed-nmt recipes [WORD ...]

Recipes are grouped by the paper that they repeat. Words choose those that have all of them in the name, the group or
the description. `deepspeed-nmt train --recipe NAME` runs one.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from deepspeed_nmt.console import output, table
from deepspeed_nmt.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a name, a group or a description")


def run(arguments: argparse.Namespace) -> int:
    """Print the recipes by group, each with layers, width and description."""
    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.recipes import recipe_files

    groups: dict[str, list[list[str]]] = {}
    for name, file in recipe_files().items():
        about, group = description(file.read_text(encoding="utf-8")), file.parent.name
        if all(word.lower() in f"{name} {group} {about}".lower() for word in arguments.words):
            model = load_config(name).model
            groups.setdefault(group, []).append([name, f"{layers(model)}, D {width(model)}", about])
    if not groups:
        raise UserError(f"no recipe has {' '.join(arguments.words)}; `deepspeed-nmt recipes` lists all")
    for number, (group, rows) in enumerate(sorted(groups.items())):
        output(f"{'' if number == 0 else chr(10)}{group}")
        output("\n".join(f"  {line}" for line in table(rows, left=3).splitlines()))
    return 0


def description(text: str) -> str:
    """Return the first sentence of the comment with which the YAML of a recipe begins."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:])
    return re.split(r"(?<=[^.]{3}\.)\s+(?=[A-Z])", " ".join(lines))[0]


def width(model: Any) -> int:
    """Return the width of a model's states, D."""
    dim: int = (model if hasattr(model, "dim") else model.source).dim
    return dim


def layers(model: Any) -> str:
    """Return the layers of encoder and decoder, with loops after a cross and grown layers in brackets."""
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
