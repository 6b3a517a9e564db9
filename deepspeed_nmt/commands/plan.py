"""Tell what a recipe needs, without building it: for now, how many parameters it has.

A sweep is a small grid of settings around a recipe, one of the papers' figures for example. `--sweep` lists its
points; with `--point I` it prints one as arguments for `train`:

    deepspeed-nmt plan --sweep deep_decoder_fig1
    deepspeed-nmt train $(deepspeed-nmt plan --sweep deep_decoder_fig1 --point 3) --data DATA --run RUN
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = "count the parameters of a recipe, or list a sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", metavar="R", help="a named experiment")
    what.add_argument("--sweep", metavar="S", help="a named grid of settings around a recipe")
    parser.add_argument("--point", type=int, metavar="I", help="print point I of the sweep, from 1, for `train`")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="V", help="tokens of the vocabulary [32000]")
    parser.add_argument("--json", action="store_true", help="one JSON object for each recipe or point, one a line")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, on top of the recipe")


def run(arguments: argparse.Namespace) -> int:
    """Count on the meta device, where parameters have shapes and no memory."""
    import json

    from deepspeed_nmt.config import sweep
    from deepspeed_nmt.console import output
    from deepspeed_nmt.errors import ConfigError

    if arguments.vocab_size < 4:
        raise ConfigError(f"--vocab-size must be at least 4, but is {arguments.vocab_size}")
    if arguments.point is not None and arguments.sweep is None:
        raise ConfigError("--point needs --sweep: it is the number of one of its points")
    points = [(arguments.recipe, [])] if arguments.sweep is None else sweep(arguments.sweep)
    if arguments.point is not None:
        if not 1 <= arguments.point <= len(points):
            raise ConfigError(f"--point must be between 1 and {len(points)}, but is {arguments.point}")
        recipe, settings = points[arguments.point - 1]
        output(" ".join(["--recipe", recipe, *settings, *arguments.settings]))
        return 0
    for number, (recipe, settings) in enumerate(points, 1):
        count = _parameters(recipe, [*settings, *arguments.settings], arguments.vocab_size)
        result: dict[str, object] = {"recipe": recipe, "vocab_size": arguments.vocab_size, "parameters": count}
        if arguments.sweep is not None:
            result = {"point": number, **result, "settings": settings}
        if arguments.json:
            output(json.dumps(result))
        elif arguments.sweep is None:
            output(f"{recipe} with a vocabulary of {arguments.vocab_size:,}: {count:,} parameters")
        else:
            output(f"{number:>3}  {count:>13,} parameters  --recipe {recipe} {' '.join(settings)}")
    return 0


def _parameters(recipe: str, settings: Sequence[str], vocab_size: int) -> int:
    import torch

    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.runs import build_model

    config = load_config(recipe, settings=settings)
    with torch.device("meta"):
        model = build_model(config, Vocabulary(vocab_size))
    return sum(parameter.numel() for parameter in model.parameters())
