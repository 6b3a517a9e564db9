r"""Make a corpus of monolingual text, whose other side a trained run translates: back-translation, or distillation.

    deepspeed-nmt backtranslate --run REVERSE --text news.de --data DATA --out bt --filters web -- --search sampling
    deepspeed-nmt train --recipe transformer_big --run RUN --data DATA --data 'bt/data=1@<bt>'

In back-translation (Sennrich, Haddow and Birch 2016) the text is of the target language, and REVERSE translates it to
sources. With --distill (Kim and Rush 2016) it is of the source language, and a teacher translates it to targets.
Options of `translate` come after --. OUT/data is the corpus, to train on in a mixture; the last line printed is the
command. The same command resumes after it was stopped (exit status 75), and does again what other options change.
"""

from __future__ import annotations

import argparse
from signal import SIGUSR1

from deepspeed_nmt.backtranslation import BacktranslateOptions, Backtranslation, backtranslate
from deepspeed_nmt.cli import Parser
from deepspeed_nmt.commands.flags import add_flags
from deepspeed_nmt.commands.prepare import add_status, report
from deepspeed_nmt.console import logger, output
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, typed
from deepspeed_nmt.interruption import Interrupted, interruptible
from deepspeed_nmt.registry import validated
from deepspeed_nmt.search.decode_options import DecodeOptions

BEYOND = "options of `translate`"
_OWN = (
    *("run", "export", "checkpoint", "input", "output", "nbest", "token_scores", "alignment", "alignment_layer"),
    *("reliance", "strict", "buffer_lines", "runtime", "workers", "prefix", "constraints"),
)
"""Options of `translate` that are not for a single translation of each sentence, or are given before --."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_flags(parser, DecodeOptions, ("run", "checkpoint"), ("run",))
    add_flags(parser, BacktranslateOptions)
    add_status(parser)


def run(arguments: argparse.Namespace) -> int:
    """Make the corpus, and print what was removed, what is left, and how to train on it."""
    if arguments.status is not None:
        from deepspeed_nmt.data.cluster import status

        output(status(Backtranslation, arguments.status))
        return 0
    given = {name: value for name, value in vars(arguments).items() if name in BacktranslateOptions.model_fields}
    options = validated(BacktranslateOptions, {**given, "translation": _translation(arguments)})
    try:
        with interruptible(SIGUSR1):
            made = backtranslate(options)
    except Interrupted as end:
        logger.info("stopped by %s; start the same command again to resume", end.signal.name)
        return EXIT_STOPPED
    if isinstance(made, str):
        output(made)
        return 0
    corpora = " ".join(f"--data '{corpus}'" for corpus in options.mixture)
    output(
        f"{report(made, options.out / 'data')}\n\nto train:\ndeepspeed-nmt train --recipe RECIPE --run RUN {corpora}"
    )
    return 0


def _translation(arguments: argparse.Namespace) -> DecodeOptions:
    """Return the options of the translation: runs and checkpoint, and the arguments after --."""
    parser = Parser(prog="deepspeed-nmt backtranslate", add_help=False, allow_abbrev=False)
    add_flags(parser, DecodeOptions, [name for name in DecodeOptions.model_fields if name not in _OWN])
    parsed, others = parser.parse_known_args(arguments.beyond)
    if own := sorted({word for word in others if word.partition("=")[0] in map(typed, _OWN)}):
        raise ConfigError(
            f"{own[0]} cannot come after --, because each sentence gets one translation by --run; leave it out"
        )
    if others:
        raise ConfigError(
            f"{' '.join(others)} after -- is no option of `translate`; see `deepspeed-nmt translate --help`"
        )
    return DecodeOptions.of({**vars(parsed), "run": arguments.run, "checkpoint": vars(arguments).get("checkpoint")})
