"""Choose a run's best checkpoint again, by late metrics whose results have come since training ended.

    deepspeed-nmt choose-best --run RUN

A training that goes on, or is started again, does this itself. The results are those of `late:PATH` in
validation.metrics; they are logged, and recorded in the newest checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "choose a run's best checkpoint by results that came late"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory, made by `train`")


def run(arguments: argparse.Namespace) -> int:
    """Take in the results, and print the best checkpoint.

    Raises:
        ConfigError: if it is no run.
        DataError: if it is being trained.
        CheckpointError: if the newest checkpoint is damaged.
    """
    from deepspeed_nmt.console import output
    from deepspeed_nmt.run.directory import Run
    from deepspeed_nmt.run.late_results import choose_again
    from deepspeed_nmt.run.lock import run_lock

    opened = Run.open(arguments.run)
    with run_lock(arguments.run):
        output(choose_again(opened))
    return 0
