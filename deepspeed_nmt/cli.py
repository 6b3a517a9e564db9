"""The `deepspeed-nmt` program: finds the command, runs it, and turns the user's mistakes into messages."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger, report, setup_logging
from deepspeed_nmt.errors import ReportedError, TrainingError, UserError
from deepspeed_nmt.parallel.launched import place

# Each is a module deepspeed_nmt.commands.<name with _> with HELP, add_arguments(parser) and run(arguments) -> status.
# They are imported only when asked for: `score` should not wait for torch and DeepSpeed.
_SETTING = re.compile(r"[\w.]+=")

COMMANDS = ("sample-data", "prepare", "train", "translate", "score", "average", "plan", "report", "selftest")


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
    parser = _parser(command)
    arguments, rest = parser.parse_known_args(words)
    if rest and not (hasattr(arguments, "settings") and all(_SETTING.match(word) for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.settings += rest  # argparse takes settings on one side of the options only
    setup_logging()
    module = importlib.import_module(f"deepspeed_nmt.commands.{arguments.command.replace('-', '_')}")
    try:
        setup_logging(place().rank)
        status: int = module.run(arguments)
        return status
    except ReportedError as reported:
        return reported.status
    except KeyboardInterrupt:
        logger.error("interrupted; nothing half-made was left behind")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`| head`): no traceback, and no second error while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, TrainingError, OSError) as error:
        return report(error)
