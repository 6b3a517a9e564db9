"""Write an English-German corpus that a grammar makes from a seed, to try the other commands on.

It needs no download: the same options give the same files everywhere. Sentences of the three parts differ, in both
languages. A small model translates it well after minutes of training, so a bad BLEU means something is wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "write a small English-German corpus, made by a grammar"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where train.en, train.de, ... go")
    for name, default in (("train", 30000), ("valid", 500), ("test", 500)):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="PAIRS", help=f"sentence pairs of {name} (%(default)s)"
        )
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other sentences (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Write the files and say where they are."""
    from deepspeed_nmt.console import output
    from deepspeed_nmt.sample.corpus import SPLITS, write_sample

    write_sample(arguments.out, arguments.train, arguments.valid, arguments.test, arguments.seed)
    for name in SPLITS:
        output(f"{arguments.out / name}.en and .de: {getattr(arguments, name):,} pairs")
    return 0
