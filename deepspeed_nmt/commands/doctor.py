"""Examine this host, or all hosts of a job, before a training.

    deepspeed-nmt doctor --run RUN                            # this host
    srun python -m deepspeed_nmt doctor --run RUN             # all hosts of a job, started like training

Checks Python, torch, DeepSpeed, Triton and apex, GPUs and their driver, names, ports and the network, the run
directory, clocks, memory and limits, and the job. Each line is ok, a warning, or a fault with what to do. The exit
status is 1 if there is a fault. Nothing is left behind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.console import output
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.launched import once_per_host, place

_MOST_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--run", type=Path, metavar="DIR", help="run directory to check; it need not exist (default: this directory)"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S",
        help="seconds after which a rank stops waiting for another (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Examine, print, and return the exit status."""
    with once_per_host():
        place()
        if not 1.0 <= arguments.timeout <= _MOST_S:
            raise ConfigError(f"--timeout is {arguments.timeout:g} seconds; give 1 to {_MOST_S:g}")
        if arguments.run is not None and arguments.run.exists() and not arguments.run.is_dir():
            raise ConfigError(f"--run is {arguments.run}, which is a file; choose a directory")
    return _examine(arguments)


def _examine(arguments: argparse.Namespace) -> int:
    """Make all checks; rank 0 prints, or the first rank of each host if they cannot connect."""
    import json
    import signal

    from deepspeed_nmt.doctor.examination import context_of, examine

    # Batch systems announce a time limit by it, which is a finding and no reason to end.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        result = examine(context_of(place(), arguments.run, arguments.timeout))
    finally:
        signal.signal(signal.SIGUSR1, before)
    if result is None:
        return 0
    output(json.dumps(result.as_json()) if arguments.json else "\n".join(result.as_text()))
    return min(1, result.count("fault"))
