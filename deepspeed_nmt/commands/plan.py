"""Tell what a recipe needs, without building it: for now, how many parameters it has."""

from __future__ import annotations

import argparse

HELP = "count a recipe's parameters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--recipe", required=True, metavar="R", help="a named experiment")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="V", help="tokens of the vocabulary [32000]")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, on top of the recipe")


def run(arguments: argparse.Namespace) -> int:
    """Count on the meta device, where parameters have shapes and no memory."""
    import json

    import torch

    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.console import output
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.runs import build_model

    if arguments.vocab_size < 4:
        raise ConfigError(f"--vocab-size must be at least 4, but is {arguments.vocab_size}")
    config = load_config(arguments.recipe, settings=arguments.settings)
    with torch.device("meta"):
        model = build_model(config, Vocabulary(arguments.vocab_size))
    count = sum(parameter.numel() for parameter in model.parameters())
    if arguments.json:
        result = {"recipe": arguments.recipe, "vocab_size": arguments.vocab_size, "parameters": count}
        output(json.dumps(result))
    else:
        output(f"{arguments.recipe} with a vocabulary of {arguments.vocab_size:,}: {count:,} parameters")
    return 0
