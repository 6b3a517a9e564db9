"""Choose a run's best checkpoint by late metrics whose results have come.

    deepspeed-nmt choose-best --run RUN

The results are those of `late:PATH` in validation.metrics, which training never reads. They are logged, and the
choice is recorded in the run, which may be trained meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.console import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory, made by `train`")


def run(arguments: argparse.Namespace) -> int:
    """Read the results, and print the best checkpoint."""
    from deepspeed_nmt.run.directory import Run
    from deepspeed_nmt.run.late_scores import choose_best

    output(choose_best(Run.open(arguments.run)))
    return 0
