"""The `deepspeed-nmt` program: finds the command, runs it, and turns the user's mistakes into messages."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger, setup_logging
from deepspeed_nmt.errors import EXIT_USER_ERROR, TrainingError, UserError

# Each is a module deepspeed_nmt.commands.<name with _> with HELP, add_arguments(parser) and run(arguments) -> status.
# They are imported only when asked for: `score` should not wait for torch and DeepSpeed.
COMMANDS = ("sample-data", "prepare", "train", "translate", "score", "average", "plan")


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepspeed-nmt", description=__doc__.split(":")[0])
    parser.add_argument("--version", action="version", version=f"deepspeed-nmt {__version__}")
    # The deepspeed launcher puts this before everything else; the rank is read from the environment instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if command is not None and command != name:
            commands.add_parser(name)
            continue
        module = importlib.import_module(f"deepspeed_nmt.commands.{name.replace('-', '_')}")
        module.add_arguments(
            commands.add_parser(
                name,
                help=module.HELP,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word in COMMANDS), None)
    arguments = _parser(command).parse_args(words)
    setup_logging(int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))))
    module = importlib.import_module(f"deepspeed_nmt.commands.{arguments.command.replace('-', '_')}")
    try:
        status: int = module.run(arguments)
        return status
    except UserError as error:
        logger.error("error: %s", error)
        return EXIT_USER_ERROR
    except TrainingError as error:
        logger.error("stopped: %s", error)
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; nothing half-made was left behind")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): no traceback, and no second error while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        logger.error("error: %s", error)
        return 1
