"""Options of `prepare` that name its text."""

from __future__ import annotations

import argparse
from pathlib import Path

_NAMES = {"train": "training set", "valid": "validation set", "test": "test set"}


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name files of text, of weights and of scores."""
    for split in ("train", "valid", "test"):
        for side in ("source", "target"):
            parser.add_argument(
                f"--{split}-{side}", nargs="+", type=Path, default=[], metavar="F", required=split == "valid",
                help=f"{side} text of the {_NAMES[split]}, one sentence a line",
            )  # fmt: skip
    parser.add_argument(
        "--tsv", nargs="+", type=Path, default=[], action="extend", metavar="F",
        help="training text with both sides on a line, separated by a tab; -: standard input",
    )  # fmt: skip
    parser.add_argument(
        "--tsv-columns",
        metavar="S,T[,W]",
        help="columns of --tsv with source, target, and weights; others are ignored (default: 1,2, and no others)",
    )
    parser.add_argument(
        "--train-weights", nargs="+", type=Path, default=[], metavar="F",
        help="weights of the training pairs, one positive number a line: factors of their loss",
    )  # fmt: skip
    parser.add_argument(
        "--train-scores", nargs="+", type=Path, default=[], metavar="F",
        help="scores of the training pairs, one number a line, for the filter score",
    )  # fmt: skip
