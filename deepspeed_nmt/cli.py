"""DeepSpeed-scaled training and decoding of very deep translation models.

This module is the program `deepspeed-nmt`: it runs a command, and turns errors of the user into messages.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import re
import signal
import sys
from collections.abc import Sequence
from keyword import iskeyword
from types import ModuleType
from typing import Any, NoReturn

from typing_extensions import override

from deepspeed_nmt import __version__
from deepspeed_nmt.console import discard_output, logger, report, set_up_streams, setup_logging
from deepspeed_nmt.errors import (
    EXIT_USER_ERROR,
    ReportedError,
    TrainingError,
    UserError,
    finite_number,
    options_as_typed,
    whole_number,
)
from deepspeed_nmt.interruption import Interrupted, interruptible
from deepspeed_nmt.parallel.launched import place, use_expandable_segments

COMMANDS = (
    *("sample-data", "prepare", "train", "translate", "backtranslate", "score", "score-pairs", "average"),
    *("choose-best", "export", "import", "import-fairseq", "recipes", "settings", "plan", "report", "selftest"),
    "doctor",
)
"""Names of the commands.

Each is a module of deepspeed_nmt.commands (with _ for -, and after a keyword of Python) that defines HELP,
add_arguments(parser) and run(arguments), which returns the exit status. Only the requested one is imported, and its
functions import what they need: `--help` need not wait for torch. If it defines BEYOND, `arguments.beyond` are the
words after `--`.
"""
_SETTING = re.compile(r"[\w.]+=")
_SENTENCES = {
    r"argument (\S+): invalid int value: (.*)": r"\1 is \2, which is no whole number",
    r"argument (\S+): invalid float value: (.*)": r"\1 is \2, which is no finite number",
    r"argument (\S+): expected (?:one|at least one) argument":
        r"\1 must have a value, but has none; one that begins with - is given as \1=VALUE",
    r"argument (\S+): not allowed with argument (\S+)": r"\1 and \2 exclude one another; give one of them",
}  # fmt: skip
"""Messages of argparse, and what is said instead."""


def module_of(command: str) -> ModuleType:
    """Import the module of a command."""
    name = command.replace("-", "_") + "_" * iskeyword(command)
    return importlib.import_module(f"deepspeed_nmt.commands.{name}")


class Parser(argparse.ArgumentParser):
    """Parser that reports a mistake in a sentence, as the commands do; ``--help`` shows the options."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.register("type", int, whole_number)  # for `type=int` in all commands
        self.register("type", float, finite_number)

    @override
    def error(self, message: str) -> NoReturn:
        """Log a message, and exit."""
        for pattern, sentence in _SENTENCES.items():
            message = re.sub(pattern, sentence, message)
        setup_logging()
        logger.error("error: %s (see `%s --help`)", message, self.prog)
        sys.exit(EXIT_USER_ERROR)


def _parser(command: str | None) -> argparse.ArgumentParser:
    first_line = (__doc__ or "").partition("\n")[0]  # `python -OO` removes docstrings
    parser = Parser(prog="deepspeed-nmt", description=first_line)
    parser.add_argument("--version", action="version", version=f"deepspeed-nmt {__version__}")
    # The deepspeed launcher passes this option; the local rank is read from the environment instead.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if command is None:
            commands.add_parser(name, help=module_of(name).HELP)
        elif command != name:
            commands.add_parser(name)
        else:
            module, form = module_of(name), argparse.RawDescriptionHelpFormatter
            module.add_arguments(
                commands.add_parser(name, help=module.HELP, description=module.__doc__, formatter_class=form)
            )
    return parser


def _check_words(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Exit with a message if a word is empty, or an option has no value."""
    for word in words:
        if word == "" or (word.startswith("--") and word.endswith("=")):  # as a path it would be this directory
            parser.error("arguments must not be empty, but one is; is a variable of the shell unset?")
        if word.startswith("--") and word.endswith("=--"):  # argparse makes an empty list of it
            parser.error(f"argument {word[:-3]}: expected one argument")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    set_up_streams()
    gc.set_threshold(700, 10, 100)  # a full collection passes over all that torch has imported, at 30 ms each
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if word in COMMANDS), None)
    parser = _parser(command)
    _check_words(words, parser)
    end = words.index("--") if command and "--" in words and hasattr(module_of(command), "BEYOND") else len(words)
    words, beyond = words[:end], words[end + 1 :]
    arguments, rest = parser.parse_known_args(words)
    if rest and not (hasattr(arguments, "settings") and all(_SETTING.match(word) for word in rest)):
        parser.prog = " ".join([parser.prog, arguments.command, *filter(None, [getattr(arguments, "kind", None)])])
        settings = "; a setting is given as section.key=value" if hasattr(arguments, "settings") else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{settings}")
    if rest:
        arguments.settings += rest  # argparse accepts settings on one side of the options only
    arguments.beyond = beyond
    return execute(arguments)


def execute(arguments: argparse.Namespace) -> int:
    """Run a command whose arguments are parsed, and return its exit status."""
    setup_logging()
    use_expandable_segments()
    module = module_of(arguments.command)
    try:
        setup_logging(place().rank)
        with interruptible(), options_as_typed():
            status: int = module.run(arguments)
        return status
    except ReportedError as reported:
        return reported.status
    except KeyboardInterrupt as interrupt:
        number = interrupt.signal if isinstance(interrupt, Interrupted) else signal.SIGINT
        how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
        logger.error("%s; no incomplete file was left behind", how)
        return 128 + number
    except BrokenPipeError:  # the reader of the output has exited (`| head`)
        discard_output()
        return 1
    except (UserError, TrainingError, OSError) as error:
        discard_output()
        return report(error)
