"""Average the weights of a run's newest checkpoints.

    deepspeed-nmt average --run RUN --last 5

The average is written into the run; `translate --checkpoint average` uses it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.console import output
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.files import exclusive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory, made by `train`")
    parser.add_argument("--last", type=int, required=True, metavar="N", help="number of checkpoints, the newest ones")


def run(arguments: argparse.Namespace) -> int:
    """Write the average."""
    from deepspeed_nmt.run.directory import Run

    opened = Run.open(arguments.run)
    names = opened.checkpoints.names()
    if not 1 <= arguments.last <= len(names):
        raise CheckpointError(
            f"--last is {arguments.last}, and {arguments.run} keeps {len(names)} checkpoints; give a number "
            "from 1 to that, or keep more with training.keep_last"
        )
    chosen = names[-arguments.last :]
    store = opened.checkpoints
    refusal = f"{{holder}} is making an average of {arguments.run}; wait for it"
    with exclusive(store.directory / ".average.lock", refusal):
        path = store.save_average([opened.checkpoint(name) for name in chosen])
    output(f"{path}: average of {', '.join(chosen)}")
    return 0
